package volumes

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// How long one call waits for an NFS server. The caller tries again.
const (
	nfsPatience = 10 * time.Second // for the mount
	nfsReach    = 3 * time.Second  // for the name, and for a connection to one address
)

// nfsClientFile has the name by which NFS servers know the guest. Without it, servers would take guests with the same host name for
// one (Documentation/filesystems/nfs/client-identifier.rst).
const nfsClientFile = "/sys/module/nfs/parameters/nfs4_unique_id"

// Waiting is an error that may pass: the volume is mounted when it is tried again later.
type Waiting struct{ error }

// Unwrap returns the error without its kind.
func (w Waiting) Unwrap() error { return w.error }

// waits returns err as Waiting if it comes from the server of volume v.
func waits(v vm.Volume, err error) error {
	if _, ok := errors.AsType[unix.Errno](err); ok && v.Kind == vm.VolumeNFS {
		return Waiting{err}
	}
	return err
}

// nfsTry is an attempt to mount a folder of an NFS server. The kernel may not return for long, so it has a goroutine of its own.
type nfsTry struct {
	done chan struct{} // closed when tree and err are set
	tree int           // the mount, which is nowhere yet
	err  error
}

// makeNFS mounts a folder of an NFS server in the stage.
// Errors: Waiting as long as the server cannot be reached, or refuses. Preconditions: mu is held.
func (k *Keeper) makeNFS(ctx context.Context, v vm.Volume) error {
	dir := path.Join(k.stage, v.Name)
	if err := os.Mkdir(dir, 0o700); err != nil && !os.IsExist(err) {
		return err
	}
	try := k.tries[v.Name]
	if try == nil {
		if err := k.prepareNFS(); err != nil {
			return err
		}
		try = &nfsTry{done: make(chan struct{})}
		k.tries[v.Name] = try
		work := context.WithoutCancel(ctx) // the next call takes the result, if this one is given up
		go func() {
			defer close(try.done)
			try.tree, try.err = mountNFS(work, *v.NFS)
		}()
	}
	timer := time.NewTimer(nfsPatience)
	defer timer.Stop()
	select {
	case <-try.done:
	case <-timer.C:
		return Waiting{errdefs.Unavailablef("mount %s: the server has not answered for %s", v.NFS.Source(), nfsPatience)}
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	delete(k.tries, v.Name)
	if errdefs.Is(try.err, errdefs.Unsupported) {
		return try.err
	}
	if try.err != nil {
		return Waiting{fmt.Errorf("mount %s: %w", v.NFS.Source(), try.err)}
	}
	defer unix.Close(try.tree)
	fd, err := resolve(dir)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return move(try.tree, fd)
}

// KnownAs sets the name by which NFS servers know the guest. It takes effect with the first mount.
func (k *Keeper) KnownAs(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.client = name
}

// prepareNFS loads NFS into the kernel and tells it the name of this guest for servers. Preconditions: mu is held.
func (k *Keeper) prepareNFS() error {
	if k.machine.NFS != nil {
		if err := k.machine.NFS(); err != nil {
			return err
		}
	}
	name, err := os.ReadFile(nfsClientFile)
	switch {
	case os.IsNotExist(err):
		return errdefs.Unsupportedf("the kernel of the guest has no NFS")
	case err != nil:
		return err
	case strings.TrimSpace(string(name)) == k.client:
		return nil
	}
	return os.WriteFile(nfsClientFile, []byte(k.client), 0)
}

// mountNFS returns a mount of n that is nowhere yet.
func mountNFS(ctx context.Context, n vm.NFS) (tree int, err error) {
	options, err := vm.ParseNFSOptions(n.Options)
	if err != nil {
		return -1, err
	}
	versions, port := n.Versions()
	server, own, err := reachNFS(ctx, n.Server, family(options), port)
	if err != nil {
		return -1, err
	}
	for _, version := range versions {
		tree, err = mountNFSAs(n, options, map[string]string{
			"source": n.Source(), "addr": server.String(), "clientaddr": own.String(), "vers": version,
		})
		if !errors.Is(err, unix.EPROTONOSUPPORT) {
			return tree, err
		}
	}
	return -1, fmt.Errorf("the server supports none of the versions %s of NFS: %w", strings.Join(versions, ", "), err)
}

// family returns the network of net.Resolver that options ask for.
func family(options []vm.NFSOption) string {
	for _, o := range options {
		switch o {
		case vm.NFSOption{Name: "proto", Value: "tcp"}:
			return "ip4"
		case vm.NFSOption{Name: "proto", Value: "tcp6"}:
			return "ip6"
		}
	}
	return "ip"
}

// reachNFS returns an address of the server that accepts connections at port, and the guest's own address towards it.
func reachNFS(ctx context.Context, server, network string, port int) (at, own netip.Addr, err error) {
	limited, cancel := context.WithTimeout(ctx, nfsReach)
	addrs, err := (&net.Resolver{PreferGo: true}).LookupNetIP(limited, network, server)
	cancel()
	if err != nil {
		return at, own, fmt.Errorf("find the address of the server: %w", err)
	}
	var errs []error
	for _, at := range addrs {
		at = at.Unmap()
		d := net.Dialer{Timeout: nfsReach}
		conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(at.String(), strconv.Itoa(port)))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		local, _ := netip.ParseAddrPort(conn.LocalAddr().String()) // of a TCP connection
		return at, local.Addr().Unmap(), conn.Close()
	}
	return at, own, fmt.Errorf("reach the server: %w", errors.Join(errs...))
}

// mountAttributes are the options that are attributes of the mount, not of the file system.
var mountAttributes = map[string]int{
	"ro": unix.MOUNT_ATTR_RDONLY, "nosuid": unix.MOUNT_ATTR_NOSUID, "noexec": unix.MOUNT_ATTR_NOEXEC,
	"noatime": unix.MOUNT_ATTR_NOATIME, "nodiratime": unix.MOUNT_ATTR_NODIRATIME, "strictatime": unix.MOUNT_ATTR_STRICTATIME,
}

// mountNFSAs is mountNFS with parameters of the file system besides options, which replace those. Each is a string of its own for the
// kernel, so none can bring another one.
func mountNFSAs(n vm.NFS, options []vm.NFSOption, parameters map[string]string) (tree int, err error) {
	fs, err := unix.Fsopen("nfs4", unix.FSOPEN_CLOEXEC)
	if errors.Is(err, unix.ENODEV) {
		return -1, errdefs.Unsupportedf("the kernel of the guest has no NFS 4")
	}
	if err != nil {
		return -1, err
	}
	defer unix.Close(fs)
	attributes := unix.MOUNT_ATTR_NODEV
	for _, o := range options {
		bit, ok := mountAttributes[o.Name]
		switch {
		case ok:
			attributes |= bit
		case o.Name == "vers" || o.Name == "nfsvers":
		case o.Value == "":
			err = unix.FsconfigSetFlag(fs, o.Name)
		default:
			err = unix.FsconfigSetString(fs, o.Name, o.Value)
		}
		if err != nil {
			return -1, fmt.Errorf("mount option %s: %w%s", o.Name, err, complaints(fs))
		}
	}
	for name, value := range parameters {
		if err := unix.FsconfigSetString(fs, name, value); err != nil {
			return -1, fmt.Errorf("mount option %s=%s: %w%s", name, value, err, complaints(fs))
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("%s%w%s", meaning(err, n), err, complaints(fs))
	}
	return unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attributes)
}

// meaning says what an error of a mount means, with a colon; "" if the error says it itself.
func meaning(err error, n vm.NFS) string {
	switch {
	case errors.Is(err, unix.ENOENT):
		return "the server has no folder " + n.Path + ": "
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return "the server does not let this guest have " + n.Path + ": "
	}
	return ""
}

// complaints returns what the kernel says about a failed mount, in brackets.
func complaints(fs int) string {
	var all []string
	for len(all) < 4 {
		var line [256]byte
		n, err := unix.Read(fs, line[:])
		if err != nil || n <= 0 {
			break
		}
		all = append(all, strings.TrimSpace(strings.TrimPrefix(string(line[:n]), "e ")))
	}
	if len(all) == 0 {
		return ""
	}
	return " (" + strings.Join(all, "; ") + ")"
}
