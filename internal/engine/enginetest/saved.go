package enginetest

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

var (
	_ hypervisor.Snapshotter   = (*Guest)(nil)
	_ hypervisor.Pauser        = (*Guest)(nil)
	_ hypervisor.NICSwapper    = (*Guest)(nil)
	_ hypervisor.MachineTeller = Driver{}
	_ guest.Resumer            = resumer{}
	_ guest.FreezeReporter     = reporter{}
)

// Machine implements hypervisor.MachineTeller.
func (d Driver) Machine(_ context.Context, accel vm.Accel) (vm.Machine, error) {
	m := d.w.Machine
	if m.Driver == "" {
		m = vm.Machine{Driver: "fake", Version: "1", Type: "m1", Arch: "any", Accel: vm.AccelTCG, CPU: "max"}
	}
	if accel != vm.AccelAuto {
		m.Accel = accel
	}
	return m, d.w.Fault("driver.Machine")
}

// wake makes pr the guest that p says: one that boots, or one that resumes.
func (pr *proc) wake(p hypervisor.Plan) error {
	for _, d := range p.Disks {
		if d.Role == vm.RoleCOW {
			pr.Disk = d
		}
	}
	var content string
	if pr.Disk.Path != "" { // a guest that boots from a volume has no other disk
		var err error
		if content, err = Content(pr.Disk); err != nil {
			return err
		}
	}
	if pr.Written = len(content); p.Incoming == nil {
		return nil
	}
	text, err := os.ReadFile(p.Incoming.State)
	if err != nil {
		return errdefs.DataLossf("read the saved state: %w", err)
	}
	var was proc
	if err := json.Unmarshal(text, &was); err != nil {
		return errdefs.DataLossf("the saved state is damaged: %w", err)
	}
	if _, err := os.Stat(p.Incoming.Memory); err != nil {
		return errdefs.DataLossf("the saved memory is missing: %w", err)
	}
	// No real hypervisor would notice this, but it destroys the guest's file systems.
	if was.Written != len(content) {
		return errdefs.DataLossf("the guest knows of %d bytes on its disk, which has %d", was.Written, len(content))
	}
	if kernel := p.Boot.Direct(); kernel && !was.SetUp && !p.Incoming.Booting {
		return errdefs.DataLossf("the guest was saved while its firmware read the kernel, and finds none")
	}
	for _, serial := range was.Serials {
		if !slices.Contains(pr.Serials, serial) {
			return errdefs.DataLossf("the guest was saved with the disk %s, which is missing", serial)
		}
	}
	if was.Width != pr.Width || !maps.EqualFunc(was.NICs, pr.NICs, func(string, string) bool { return true }) {
		return errdefs.DataLossf("the guest was saved with the interfaces %v, and booted with %d; it is to have %v and %d", was.NICs, was.Width, pr.NICs, pr.Width)
	}
	if was.Size != pr.Size || was.Boot != pr.Boot {
		return errdefs.DataLossf("the guest was saved with %+v, and booted with %d bytes of memory; it is to have %+v and %d", was.Size, was.Boot, pr.Size, pr.Boot)
	}
	was.Folders = nil // a process knows only its own
	was.Larger, was.Storage = strings.Join(p.Incoming.Grown, " "), 0
	was.ID, was.PID, was.Disk, was.Paused, was.Down = pr.ID, pr.PID, pr.Disk, false, pr.Down
	*pr = was
	return nil
}

// Content returns what a disk holds: what was written to its files, the lowest first.
func Content(d vm.Disk) (string, error) {
	below := ""
	if d.Backing != nil {
		var err error
		if below, err = Content(*d.Backing); err != nil {
			return "", err
		}
	}
	text, err := os.ReadFile(d.Path)
	return below + string(text), err
}

// Write makes the guest write to its disk. A paused guest cannot.
func (g *Guest) Write(text string) error {
	var err error
	g.change(func() {
		if g.p.Paused {
			err = errdefs.Preconditionf("the guest is paused")
			return
		}
		var f *os.File
		if f, err = os.OpenFile(g.p.Disk.Path, os.O_WRONLY|os.O_APPEND, 0); err != nil {
			return
		}
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Close())
		g.p.Written += len(text)
	})
	return err
}

// Disk is what the guest's disk holds.
func (g *Guest) Disk() (string, error) {
	p, _ := g.look()
	return Content(p.Disk)
}

// Self is what the guest believes about itself.
type Self struct {
	Hostname  string
	MachineID string
	MAC       string // of its first interface
	Lines     int    // written by its main process
	Resumed   int    // how often it was told its identity
	Paused    bool
	Down      bool // its first interface has no carrier
	Frozen    bool
	Larger    string // serials of the disks that were reported larger when it resumed
	Storage   int64  // size to which it grew its file system then, bytes
}

// Await waits until ok holds for what the guest is, or ctx ends.
func (g *Guest) Await(ctx context.Context, ok func(Self) bool) error {
	for {
		_, changed := g.look()
		if ok(g.Self()) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Self asks the guest.
func (g *Guest) Self() Self {
	p, _ := g.look()
	return Self{p.Hostname, p.MachineID, p.MAC, p.Lines, p.Resumed, p.Paused, p.Down[0], p.Frozen, p.Larger, p.Storage}
}

// Save implements hypervisor.Snapshotter.
func (g *Guest) Save(ctx context.Context, p hypervisor.SavePlan) (hypervisor.Saved, error) {
	if err := g.w.Fault("driver.Save"); err != nil {
		return hypervisor.Saved{}, err
	}
	select {
	case <-g.ended:
		return hypervisor.Saved{}, errdefs.NotFoundf("vm %s has ended", g.p.ID)
	default:
	}
	if p, _ := g.look(); len(p.Folders) > 0 && !p.Apart {
		return hypervisor.Saved{}, errdefs.Unsupportedf("the guest has the device of a folder, which cannot be saved")
	}
	var err error
	g.change(func() { err = g.hold(p) })
	if err != nil {
		return hypervisor.Saved{}, err
	}
	if p.Still != nil {
		err = p.Still(ctx)
	}
	if err = errors.Join(err, g.w.Fault("driver.Save done")); err != nil {
		g.change(func() { g.p.Paused = g.w.Stuck })
		return hypervisor.Saved{}, errors.Join(err, remove(p.State), remove(p.Memory))
	}
	if p.Taken != nil {
		p.Taken()
	}
	machine, err := Driver{g.w}.Machine(ctx, vm.AccelAuto)
	return hypervisor.Saved{Pause: 7, Method: "stopped", Machine: machine}, err
}

func (g *Guest) hold(p hypervisor.SavePlan) error {
	text, err := json.Marshal(g.p)
	if err != nil {
		return err
	}
	for _, o := range p.Overlays {
		if o.Disk.Path == g.p.Disk.Path {
			continue
		}
		if _, err := os.Stat(o.Disk.Path); err != nil {
			return err
		}
		below := g.p.Disk // the hypervisor uses its own state, not the caller's
		g.p.Disk = o.Disk
		g.p.Disk.Backing = &below
	}
	g.p.Paused = p.Hold
	return errors.Join(os.WriteFile(p.State, text, 0o600), os.WriteFile(p.Memory, []byte("memory"), 0o600))
}

// Pause implements hypervisor.Pauser.
func (g *Guest) Pause(context.Context) error { return g.paused("driver.Pause", true) }

// Resume implements hypervisor.Pauser.
func (g *Guest) Resume(context.Context) error { return g.paused("driver.Resume", false) }

func (g *Guest) paused(call string, paused bool) error {
	return g.w.around(call, func() error {
		select {
		case <-g.ended:
			return errdefs.NotFoundf("vm %s has ended", g.p.ID)
		default:
			g.change(func() { g.p.Paused = paused })
			return nil
		}
	})
}

// SwapNIC implements hypervisor.NICSwapper.
func (g *Guest) SwapNIC(_ context.Context, nic int, mac string) error {
	return g.w.around("driver.SwapNIC", func() error {
		if nic == 0 {
			g.change(func() { g.p.MAC, g.p.Down = mac, with(g.p.Down, 0, true) })
		}
		return nil
	})
}

// resumer is a session with an agent that can give a resumed guest its identity.
type resumer struct{ *session }

// Resumed implements guest.Resumer. The host name "refused" is rejected.
func (s resumer) Resumed(_ context.Context, r guest.Resumed) (guest.ResumedReply, error) {
	if err := s.alive("agent.Resumed"); err != nil {
		return guest.ResumedReply{}, err
	}
	p, _ := s.g.look()
	switch {
	case len(r.Entropy) < 32 || r.Now.IsZero():
		return guest.ResumedReply{}, errdefs.Invalidf("there is no entropy or no time")
	case r.Hostname == "refused":
		return guest.ResumedReply{}, errdefs.New(errdefs.Internal, "the host name is not taken")
	case r.Clone != nil && len(r.NICs) > 0 && p.MAC != r.Clone.MACs[0] && p.MAC != r.NICs[0].MAC:
		return guest.ResumedReply{}, errdefs.NotFoundf("no interface has the MAC %s", r.Clone.MACs[0])
	}
	s.g.change(func() {
		s.g.p.Resumed++
		s.g.p.Storage = max(s.g.p.Storage, r.Storage)
		s.g.p.Hostname, s.g.p.Frozen = r.Hostname, false
		if r.Clone != nil && r.Clone.MachineID != "" {
			s.g.p.MachineID = r.Clone.MachineID
		}
		if len(r.NICs) > 0 {
			s.g.p.MAC = r.NICs[0].MAC
		}
	})
	p, _ = s.g.look()
	reply := guest.ResumedReply{LogSeq: uint64(p.Lines)}
	for _, name := range p.Names {
		var last guest.LogPlace
		s.g.mu.Lock()
		for _, e := range p.Entries[name] {
			last = guest.LogPlace{Run: e.Run, Seq: e.Seq}
		}
		s.g.mu.Unlock()
		reply.Containers = append(reply.Containers, last)
	}
	return reply, s.g.w.Fault("agent.Resumed done")
}

// Settle implements guest.Settler.
func (s *session) Settle(context.Context) error {
	return s.g.w.around("agent.Settle", func() error {
		if p, _ := s.g.look(); p.Frozen {
			return errdefs.Preconditionf("settled while frozen")
		}
		return nil
	})
}

// Freeze implements guest.Freezer.
func (s *session) Freeze(context.Context) (int, error) {
	return 1, s.g.w.around("agent.Freeze", func() error { s.g.change(func() { s.g.p.Frozen = true }); return nil })
}

// Thaw implements guest.Freezer.
func (s *session) Thaw(context.Context) (int, error) {
	return 1, s.g.w.around("agent.Thaw", func() error { s.g.change(func() { s.g.p.Frozen = false }); return nil })
}

// reporter is a session with an agent that does not thaw file systems by itself.
type reporter struct{ *session }

// Frozen implements guest.FreezeReporter.
func (s reporter) Frozen(context.Context) (bool, error) {
	p, _ := s.g.look()
	return p.Frozen, nil
}
