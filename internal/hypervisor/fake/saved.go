package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

var (
	_ hypervisor.Snapshotter = (*Instance)(nil)
	_ hypervisor.Linker      = (*Instance)(nil)
)

// state is the saved form of a fake VM's devices.
type state struct {
	Driver string `json:"driver"`
	CPUs   int    `json:"cpus"`
	Memory int64  `json:"memory"` // bytes
	NICs   []int  `json:"nics"`   // their places, after how many there were when the guest booted
	Length int    `json:"length"` // bytes of the text that the guest remembers, at the start of its memory
}

// maxState bounds how much of a saved state is read, in bytes.
const maxState = 1 << 20

// Machine implements hypervisor.MachineTeller.
func (d *Driver) Machine(ctx context.Context, _ vm.Accel) (vm.Machine, error) {
	info, err := d.Probe(ctx)
	if err != nil {
		return vm.Machine{}, err
	}
	return vm.Machine{Driver: Name, Version: info.Version, Type: Name, Arch: runtime.GOARCH, Accel: info.Accel, CPU: Name}, nil
}

// Save implements hypervisor.Snapshotter. The memory file holds the text that the guest remembers (see Host.Remember); the rest
// is a hole.
func (i *Instance) Save(ctx context.Context, p hypervisor.SavePlan) (_ hypervisor.Saved, err error) {
	if err := i.usable(ctx, OpSave); err != nil {
		return hypervisor.Saved{}, err
	}
	machine, err := i.d.Machine(ctx, i.v.Plan.Accel)
	if err != nil {
		return hypervisor.Saved{}, err
	}
	began := time.Now()
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("save VM %s: %w", i.v.Plan.ID, err), remove(p.State), remove(p.Memory))
		}
	}()
	used, delta, err := i.hold(p)
	if err != nil {
		return hypervisor.Saved{}, err
	}
	if err := i.still(ctx, p); err != nil {
		return hypervisor.Saved{}, err
	}
	if err := i.usable(ctx, OpSaved); err != nil {
		return hypervisor.Saved{}, errors.Join(err, i.setPaused(context.WithoutCancel(ctx), false))
	}
	saved := hypervisor.Saved{Pause: time.Since(began), Method: "stopped", Memory: used, Delta: delta, Machine: machine}
	if !p.Hold {
		saved.Method = "precopy"
	}
	if p.Taken != nil {
		p.Taken()
	}
	return saved, nil
}

// hold writes the state and changes the disks at one instant. After it the guest is paused if p says so.
func (i *Instance) hold(p hypervisor.SavePlan) (used int64, delta bool, err error) {
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	disks := slices.Clone(i.v.Plan.Disks)
	for _, o := range p.Overlays {
		at := slices.IndexFunc(disks, func(d vm.Disk) bool { return d.Serial == o.Serial })
		if at < 0 {
			return 0, false, errdefs.Invalidf("the VM has no disk %s", o.Serial)
		}
		if _, err := os.Stat(o.Disk.Path); err != nil {
			return 0, false, errdefs.Preconditionf("open the new disk %s: %w", o.Serial, err)
		}
		disks[at] = o.Disk
	}
	has := i.v.size()
	text, err := json.Marshal(state{Name, has.CPUs, has.Memory, places(i.v.Plan), len(i.v.Memory)})
	if err != nil {
		return 0, false, err
	}
	if err := os.WriteFile(p.State, text, 0o600); err != nil {
		return 0, false, err
	}
	if delta, err = i.saveMemory(p); err != nil {
		return 0, false, err
	}
	i.v.Plan.Disks, i.v.Paused = disks, i.v.Paused || p.Hold
	return int64(len(i.v.Memory)), delta, h.save(i.v)
}

// still calls p.Still with the guest paused.
func (i *Instance) still(ctx context.Context, p hypervisor.SavePlan) error {
	if p.Still == nil {
		return nil
	}
	was, err := i.State(ctx)
	if err == nil {
		err = i.setPaused(ctx, true)
	}
	if err != nil {
		return err
	}
	err = p.Still(ctx)
	if was == hypervisor.Running {
		err = errors.Join(err, i.setPaused(context.WithoutCancel(ctx), false))
	}
	return err
}

// saveMemory writes what the guest remembers. It writes a delta if the base has the same size.
func (i *Instance) saveMemory(p hypervisor.SavePlan) (delta bool, err error) {
	text, size := i.v.Memory, i.v.Plan.Memory-i.v.Plan.Growth.Plugged
	f, err := os.OpenFile(p.Memory, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return false, err
	}
	_, err = f.WriteString(text)
	err = errors.Join(err, f.Truncate(size))
	if base, serr := os.Stat(p.Base); p.Base != "" && serr == nil && base.Size() == size {
		own := sparse.NewPages(size)
		own.Add([]sparse.Extent{{Length: int64(len(text))}})
		delta, err = true, errors.Join(err, sparse.EndDelta(f, size, own))
	}
	return delta, errors.Join(err, f.Close())
}

// recall returns what the guest of a saved state remembers.
func recall(ctx context.Context, p hypervisor.Plan) (string, error) {
	in := p.Incoming
	if in.Feed != "" {
		in = &hypervisor.Incoming{State: in.State, Summed: in.Summed}
	}
	if err := verify(ctx, in); err != nil {
		return "", err
	}
	text, err := readStart(p.Incoming.State, maxState)
	if err != nil {
		return "", errdefs.DataLossf("read the saved state: %w", err)
	}
	var s state
	if err := json.Unmarshal(text, &s); err != nil || s.Driver != Name {
		return "", errdefs.DataLossf("the saved state is damaged, or not one of the fake driver")
	}
	if s.CPUs != p.CPUs || s.Memory != p.Memory || !slices.Equal(s.NICs, places(p)) {
		return "", errdefs.DataLossf("the saved state is of a VM with %d CPUs, %d bytes and interfaces in the places %d", s.CPUs, s.Memory, s.NICs)
	}
	if in = p.Incoming; in.Feed != "" {
		in = &hypervisor.Incoming{Memory: in.Memory} // it has no checksums yet
		if err := await(ctx, p.Incoming.Feed, p.Memory, int64(s.Length)); err != nil {
			return "", err
		}
	}
	f, err := openMemory(in)
	if err != nil {
		return "", errdefs.DataLossf("open the saved memory: %w", err)
	}
	defer f.Close()
	if f.Size() != p.Memory-p.Growth.Plugged || s.Length < 0 || s.Length > maxState {
		return "", errdefs.DataLossf("the saved memory has another size than %d bytes", s.Memory)
	}
	memory := make([]byte, s.Length)
	if _, err := f.ReadAt(memory, 0); err != nil && s.Length > 0 {
		return "", errdefs.DataLossf("read the saved memory: %w", err)
	}
	return string(memory), nil
}

func openMemory(in *hypervisor.Incoming) (*sparse.File, error) {
	return sparse.Open(os.Open, in.Memory, in.Base, in.Summed)
}

// verify compares all files of a saved state with their checksums, if it has them.
func verify(ctx context.Context, in *hypervisor.Incoming) error {
	for _, path := range []string{in.State, in.Memory, in.Base} {
		if !in.Summed || path == "" {
			continue
		}
		sums, err := sparse.ReadSums(path + sparse.SumSuffix)
		if err != nil {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		if err := errors.Join(sums.Verify(ctx, f), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

func readStart(path string, limit int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b := make([]byte, limit)
	n, err := f.ReadAt(b, 0)
	if n == 0 && limit > 0 && err != nil {
		return nil, err
	}
	return b[:n], nil
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// SetLink implements hypervisor.Linker.
func (i *Instance) SetLink(ctx context.Context, place int, up bool) error {
	if err := i.usable(ctx, OpLink); err != nil {
		return err
	}
	h := i.d.host
	h.mu.Lock()
	defer h.mu.Unlock()
	nic := i.v.nicAt(place)
	if nic < 0 {
		return errdefs.NotFoundf("VM %s has no interface %d", i.v.Plan.ID, place)
	}
	i.v.Down = slices.Clone(i.v.Down)
	i.v.Down[nic] = !up
	return h.save(i.v)
}

// Remember makes the guest of the running VM id remember text. A VM that resumes from its saved state remembers it too.
func (h *Host) Remember(id vm.ID, text string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := h.vms[id]
	if v == nil || v.Ended != "" {
		return errdefs.NotFoundf("no fake VM %s runs", id)
	}
	v.Memory = text
	return h.save(v)
}

// Memory returns what the guest of the running VM id remembers, and which of its NICs have no carrier.
func (h *Host) Memory(id vm.ID) (text string, down []bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if v := h.vms[id]; v != nil && v.Ended == "" {
		return v.Memory, slices.Clone(v.Down)
	}
	return "", nil
}
