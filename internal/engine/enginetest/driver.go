package enginetest

import (
	"context"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// Driver is the world's hypervisor.
type Driver struct{ w *World }

var (
	_ hypervisor.Driver        = Driver{}
	_ hypervisor.Seeker        = Driver{}
	_ hypervisor.Instance      = (*Guest)(nil)
	_ hypervisor.SocketTeller  = (*Guest)(nil)
	_ hypervisor.GuestDialer   = agented{}
	_ hypervisor.ConsoleOpener = agented{}
)

// Driver returns the hypervisor driver "fake".
func (w *World) Driver() Driver { return Driver{w} }

// Name implements hypervisor.Driver.
func (d Driver) Name() string { return "fake" }

// RawOnly implements hypervisor.DiskReader.
func (d Driver) RawOnly() bool { return d.w.raw }

// Probe implements hypervisor.Driver.
func (d Driver) Probe(context.Context) (hypervisor.Info, error) {
	return hypervisor.Info{Version: "1"}, nil
}

// Launch implements hypervisor.Driver.
func (d Driver) Launch(ctx context.Context, p hypervisor.Plan) (hypervisor.Instance, error) {
	if err := d.w.Fault("driver.Launch"); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if _, err := os.Stat(p.Dir); err != nil {
		return nil, err
	}
	for _, disk := range p.Disks {
		if _, err := os.Stat(disk.Path); err != nil {
			return nil, err
		}
	}
	for _, nic := range p.NICs {
		if _, err := os.Stat(d.w.path("taps", nic.Tap)); err != nil {
			return nil, err
		}
	}
	pr := proc{ID: p.ID, PID: d.w.nextPID(p), Port: p.Agent, Paused: p.Paused, Size: vm.Size{CPUs: p.CPUs, Memory: p.Memory}, Boot: p.Memory - p.Growth.Plugged}
	if p.VSOCK {
		pr.CID = crc32.ChecksumIEEE([]byte(p.ID))
	}
	for _, disk := range p.Disks {
		pr.Serials = append(pr.Serials, disk.Serial)
	}
	if len(p.NICs) > 0 {
		pr.MAC = p.NICs[0].MAC
	}
	pr.connect(p)
	if p.Disks[0].Serial == silent {
		pr.Port = ""
	}
	if err := pr.wake(p); err != nil {
		return nil, err
	}
	if _, exists, err := d.w.loadProc(p.ID); err != nil || exists {
		return nil, errdefs.Conflictf("vm %s runs already (%v)", p.ID, err)
	}
	if err := os.WriteFile(d.w.path("cgroups", string(p.ID)), nil, 0o600); err != nil {
		return nil, err
	}
	if err := d.w.save(pr); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(p.Dir, "socket"), nil, 0o600); err != nil {
		return nil, err
	}
	g := d.w.hold(pr)
	if err := d.w.Fault("driver.Launch done"); err != nil {
		return nil, errors.Join(err, g.Kill(context.WithoutCancel(ctx)))
	}
	return d.w.instance(g), nil
}

// Adopt implements hypervisor.Driver.
func (d Driver) Adopt(_ context.Context, h hypervisor.Handle) (hypervisor.Instance, error) {
	if err := d.w.Fault("driver.Adopt"); err != nil {
		return nil, err
	}
	p, ok, err := d.w.loadProc(vm.ID(h))
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errdefs.NotFoundf("vm %s has ended", h)
	}
	return d.w.instance(d.w.hold(p)), nil
}

// Seek implements hypervisor.Seeker.
func (d Driver) Seek(_ context.Context, ids []vm.ID) (map[vm.ID][]int, error) {
	found := map[vm.ID][]int{}
	for _, id := range ids {
		p, ok, err := d.w.loadProc(id)
		if err != nil {
			return nil, err
		}
		if ok {
			found[id] = []int{p.PID}
		}
	}
	return found, nil
}

// Reap implements hypervisor.Driver.
func (d Driver) Reap(_ context.Context, id vm.ID, _ string) error {
	return d.w.around("driver.Reap", func() error {
		return errors.Join(remove(d.w.path("procs", string(id))), remove(d.w.path("cgroups", string(id))))
	})
}

// CID implements hypervisor.SocketTeller.
func (g *Guest) CID() uint32 { return g.p.CID } // it never changes

// hold registers p as a guest of this process.
func (w *World) hold(p proc) *Guest {
	g := newGuest(w, p)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.guests[p.ID] = g
	return g
}

func (w *World) instance(g *Guest) hypervisor.Instance {
	if w.NoAgent {
		return g
	}
	return agented{g}
}

// agented is a guest whose agent and console can be reached.
type agented struct{ *Guest }

// DialGuest implements hypervisor.GuestDialer. The stream carries nothing but the guest itself.
func (a agented) DialGuest(context.Context) (net.Conn, error) {
	if err := a.w.Fault("driver.DialGuest"); err != nil {
		return nil, err
	}
	select {
	case <-a.ended:
		return nil, errdefs.Unavailablef("no such socket")
	default:
	}
	c, _ := net.Pipe()
	return wire{c, a.Guest}, nil
}

// OpenConsole implements hypervisor.ConsoleOpener.
func (a agented) OpenConsole(context.Context) (io.ReadWriteCloser, error) {
	c, _ := net.Pipe()
	return c, nil
}

// ConsoleLog implements hypervisor.ConsoleOpener.
func (a agented) ConsoleLog() string { return a.w.path("procs", string(a.p.ID)+".console") }

// Handle implements hypervisor.Instance.
func (g *Guest) Handle() hypervisor.Handle { return hypervisor.Handle(g.p.ID) }

// PID implements hypervisor.Instance.
func (g *Guest) PID() int { return g.p.PID }

// State implements hypervisor.Instance.
func (g *Guest) State(ctx context.Context) (hypervisor.RunState, error) {
	if err := g.w.Mute(ctx, g.p.ID); err != nil {
		return "", err
	}
	select {
	case <-g.ended:
		return "", errdefs.NotFoundf("vm %s has ended", g.p.ID)
	default:
	}
	if p, _ := g.look(); p.Paused {
		return hypervisor.Paused, nil
	}
	return hypervisor.Running, nil
}

// Shutdown implements hypervisor.Instance.
func (g *Guest) Shutdown(context.Context) error {
	if err := g.w.Fault("driver.Shutdown"); err != nil {
		return err
	}
	if p, _ := g.look(); g.ACPI && !p.Paused {
		g.End(hypervisor.Exit{GuestShutdown: true})
	}
	return nil
}

// Kill implements hypervisor.Instance.
func (g *Guest) Kill(context.Context) error {
	return g.w.around("driver.Kill", func() error {
		g.End(hypervisor.Exit{Signal: 9, Code: -1})
		return remove(g.w.path("cgroups", string(g.p.ID)))
	})
}

// Wait implements hypervisor.Instance.
func (g *Guest) Wait(ctx context.Context) (hypervisor.Exit, error) {
	select {
	case <-g.ended:
		return g.exit, nil
	case <-ctx.Done():
		return hypervisor.Exit{}, ctx.Err()
	}
}

// Close implements hypervisor.Instance.
func (g *Guest) Close() error { return nil }
