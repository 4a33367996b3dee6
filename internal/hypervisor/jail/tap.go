package jail

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cenkalti/backoff/v5"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// OpenTaps attaches to the tap of each NIC, in the namespace of the tap. The taps must exist; this creates none. The caller closes them.
func OpenTaps(ctx context.Context, nics []vm.NIC) ([]*os.File, error) {
	taps := make([]*os.File, len(nics))
	for i, n := range nics {
		open := func() (err error) {
			taps[i], err = openTap(ctx, n)
			return err
		}
		var err error
		if n.NetNS == "" {
			err = open()
		} else {
			err = proc.OnThread(func() error { // a thread that has changed its namespace cannot be used for anything else
				if err := enterNetNS(n.NetNS); err != nil {
					return err
				}
				return open()
			})
		}
		if err != nil {
			CloseAll(taps)
			return nil, err
		}
	}
	return taps, nil
}

func enterNetNS(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return errdefs.Preconditionf("open network namespace: %w", err)
	}
	defer f.Close()
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", path, err)
	}
	return nil
}

// The process of another VM that is being started holds a copy of every descriptor of ours between its fork and its exec,
// including the one with which this tap was just created. On a busy machine that takes a while.
const busyLimit, busyPause = 5 * time.Second, time.Millisecond

func openTap(ctx context.Context, n vm.NIC) (*os.File, error) {
	req, err := unix.NewIfreq(n.Tap)
	if err != nil || n.Tap == "" {
		return nil, errdefs.Invalidf("invalid tap name %q", n.Tap)
	}
	if err := linkExists(n.Tap); err != nil {
		return nil, err
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, errdefs.Preconditionf("open /dev/net/tun: %w; try `modprobe tun`", err)
	}
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	_, err = backoff.Retry(ctx, func() (attached bool, err error) {
		if err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req); !errors.Is(err, unix.EBUSY) {
			err = backoff.Permanent(err)
		}
		return true, err
	}, backoff.WithBackOff(backoff.NewConstantBackOff(busyPause)), backoff.WithMaxElapsedTime(busyLimit))
	if err != nil {
		_ = unix.Close(fd)
		if errors.Is(err, unix.EBUSY) {
			return nil, errdefs.Conflictf("tap %s is in use by another process", n.Tap)
		}
		return nil, fmt.Errorf("attach to tap %s: %w", n.Tap, err)
	}
	return os.NewFile(uintptr(fd), n.Tap), nil
}

// linkExists checks that the tap exists, because TUNSETIFF would otherwise create a new one.
func linkExists(name string) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("look for tap %s: %w", name, err)
	}
	defer func() { _ = unix.Close(s) }()
	req, err := unix.NewIfreq(name)
	if err != nil {
		return fmt.Errorf("look for tap %s: %w", name, err)
	}
	if err := unix.IoctlIfreq(s, unix.SIOCGIFINDEX, req); err != nil {
		return errdefs.Preconditionf("tap %s does not exist: %w", name, err)
	}
	return nil
}
