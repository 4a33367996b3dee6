package firecracker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// The program opens taps itself, by their names in its own network namespace, which is empty. So each tap is there for the moment in which it is opened, and then
// comes back: a tap that is open can be moved. What a link loses when it moves is put back (docs/adr/0037).

// lend runs attach while the taps of the plan are in the network namespace of the process. However it ends, the taps that still exist are back.
func (l *launch) lend(ctx context.Context, attach func() error) (err error) {
	if len(l.Plan.NICs) == 0 {
		return attach()
	}
	if err := free(ctx, l.Plan.NICs); err != nil {
		return err
	}
	there, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", l.Proc.PID()))
	if err != nil {
		return fmt.Errorf("open the network namespace of the process: %w", err)
	}
	defer there.Close()
	if err := l.Proc.Signal(0); err != nil { // it has the namespace still, so it is its own
		return fmt.Errorf("open the network namespace of the process: %w", err)
	}
	for _, nic := range l.Plan.NICs {
		loan, err := lendTap(nic, there)
		if err != nil {
			return err
		}
		if in := l.Plan.Incoming; in != nil && in.LinksDown {
			loan.was.up = false // so that no packet passes until OpenLink
		}
		defer func() { err = errors.Join(err, loan.back()) }()
	}
	return attach()
}

// free checks that nobody else has the taps open. A process of another VM that is being started may have, for a moment (jail.OpenTaps), also what this check opens. So none
// is being started during the last look, which therefore is short.
func free(ctx context.Context, nics []vm.NIC) error {
	files, err := jail.OpenTaps(ctx, nics)
	jail.CloseAll(files)
	if err != nil {
		return err
	}
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	files, err = jail.OpenTaps(ctx, nics)
	jail.CloseAll(files)
	return err
}

// lookTime is more than one look takes.
const lookTime = 100 * time.Millisecond

// loan is a tap that is in the namespace of a process.
type loan struct {
	nic  vm.NIC
	was  *tapState
	home *os.File // its own namespace
	away *os.File
}

func lendTap(nic vm.NIC, away *os.File) (_ *loan, err error) {
	n := &loan{nic: nic, away: away}
	path := nic.NetNS
	if path == "" {
		path = "/proc/thread-self/ns/net"
	}
	if n.home, err = os.Open(path); err != nil {
		return nil, errdefs.Preconditionf("open network namespace: %w", err)
	}
	err = within(n.home, func() error {
		if n.was, err = readLink(nic.Tap); err != nil {
			return err
		}
		if err := netlink.LinkSetNsFd(n.was.link, int(away.Fd())); err != nil {
			return fmt.Errorf("lend tap %s: %w", nic.Tap, err)
		}
		return nil
	})
	if err != nil {
		_ = n.home.Close()
		return nil, err
	}
	return n, nil
}

// back brings the tap home, as it was. It is gone if the process has ended meanwhile; then there is nothing to bring.
func (n *loan) back() error {
	defer n.home.Close()
	err := within(n.away, func() error {
		link, err := netlink.LinkByName(n.nic.Tap)
		if err != nil {
			return err
		}
		return netlink.LinkSetNsFd(link, int(n.home.Fd()))
	})
	if err == nil {
		err = within(n.home, n.was.restore)
	}
	if err != nil {
		return fmt.Errorf("bring tap %s back: %w", n.nic.Tap, err)
	}
	return nil
}

// within runs f in a network namespace.
func within(ns *os.File, f func() error) error {
	return proc.OnThread(func() error { // a thread that has changed its namespace cannot be used for anything else
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter a network namespace: %w", err)
		}
		return f()
	})
}

// at runs f in the namespace of t.
func (t tap) at(f func() error) error {
	if t.NetNS == "" {
		return f()
	}
	ns, err := os.Open(t.NetNS)
	if err != nil {
		return errdefs.Unavailablef("open network namespace: %w", err)
	}
	defer ns.Close()
	return within(ns, f)
}

// open lets packets pass t.
func (t tap) open() error {
	return t.at(func() error {
		link, err := netlink.LinkByName(t.Name)
		if err != nil {
			return errdefs.Unavailablef("look for tap %s: %w", t.Name, err)
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return errdefs.Unavailablef("bring up tap %s: %w", t.Name, err)
		}
		return nil
	})
}

// OpenLink implements hypervisor.LinkOpener. It sets the tap up. Firecracker itself cannot change the carrier of a guest.
func (i *instance) OpenLink(_ context.Context, place int) error {
	if err := i.Alive(); err != nil {
		return err
	}
	for _, t := range i.h.Links {
		if t.Place == place {
			return i.Named(t.open())
		}
	}
	return errdefs.NotFoundf("VM %s has no interface at place %d", i.h.ID, place)
}
