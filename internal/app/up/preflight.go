package up

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const tunDevice = "/dev/net/tun"

// preflight rejects starts that cannot succeed, before anything of an instance is made.
// Errors: InvalidArgument, FailedPrecondition.
func preflight(o Options) error {
	if err := o.check(); err != nil {
		return err
	}
	if err := needRoot("up"); err != nil {
		return err
	}
	if err := haveTun(tunDevice); err != nil {
		return err
	}
	return o.Assets.check()
}

func needRoot(verb string) error {
	if os.Geteuid() != 0 {
		return errdefs.Preconditionf("cocoon %s needs root because it manages taps and bridges; run it with sudo", verb)
	}
	return nil
}

// haveTun checks the device from which VM interfaces are made. It opens it, because in a container the device may exist
// but be forbidden.
func haveTun(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case err == nil:
		return f.Close()
	case errors.Is(err, os.ErrNotExist):
		return errdefs.Preconditionf("%s is missing, but the network of VMs needs it; run `modprobe tun`, or start the container with --device=%s", path, path)
	}
	return errdefs.Preconditionf("the network of VMs needs %s, which cannot be opened: %w; run `modprobe tun`", path, err)
}
