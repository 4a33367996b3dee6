package qemu

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/vm"
)

// A guest that can grow has free places for CPUs, and one device of virtio-mem, which is as large as the memory can grow. Of its memory the
// guest takes as much as we request. Memory that is plugged as modules (DIMMs) would need no driver in the guest, but it would be one more
// device for each change, which the plan of a saved guest would have to list in order.
const (
	moreMemory = "memory0" // id of the device
	moreRAM    = "more"    // name of its memory
)

// atBoot returns the memory that the guest of p has or had when it booted, in bytes.
func atBoot(p hypervisor.Plan) int64 { return p.Memory - p.Growth.Plugged }

// linuxBlock is the unit in MiB in which Linux manages memory. It uses no part of a device that is not a whole one.
const linuxBlock = 128

// room returns by how much the memory of the guest can grow after its boot, in MiB.
func room(p hypervisor.Plan) int64 {
	more := max(p.Growth.Memory-atBoot(p), 0) >> 20
	return (more + linuxBlock - 1) / linuxBlock * linuxBlock
}

// maxMemory is the part of the option for memory that says how large it can be.
func maxMemory(p hypervisor.Plan) string {
	if room(p) == 0 {
		return ""
	}
	return fmt.Sprintf(",maxmem=%dM", atBoot(p)>>20+room(p))
}

// growing adds the device by which the guest gets more memory. Its memory is not taken from the node before the guest uses it.
func (c *command) growing(p hypervisor.Plan) {
	if room(p) == 0 {
		return
	}
	backend := fmt.Sprintf("memory-backend-ram,id=%s,size=%dM,reserve=off", moreRAM, room(p))
	if len(p.Shares) > 0 { // their servers read and write it
		backend = fmt.Sprintf("memory-backend-memfd,id=%s,size=%dM,share=on", moreRAM, room(p))
	}
	c.add("-object", backend)
	c.device(props{"driver": "virtio-mem-pci", "id": moreMemory, "memdev": moreRAM, "block-size": vm.MemoryStep, "requested-size": 0}.at(slotBasic, 6))
}

// cpuPlace is a place for a CPU.
type cpuPlace struct {
	Type  string `json:"type"`
	Path  string `json:"qom-path"` // of the CPU there; "": the place is free
	Props struct {
		Socket int `json:"socket-id"`
		Die    int `json:"die-id"`
		Core   int `json:"core-id"`
		Thread int `json:"thread-id"`
	} `json:"props"`
}

// device returns the CPU for a free place.
func (p cpuPlace) device() props {
	at := p.Props
	return props{
		"driver": p.Type, "id": fmt.Sprintf("cpu%d.%d.%d", at.Socket, at.Core, at.Thread),
		"socket-id": at.Socket, "die-id": at.Die, "core-id": at.Core, "thread-id": at.Thread,
	}
}

// cpuPlaces returns the free places for CPUs in their order, and how many CPUs there are.
func cpuPlaces(ctx context.Context, c *qmp.Client) (free []cpuPlace, used int, err error) {
	var all []cpuPlace
	if err := c.Execute(ctx, "query-hotpluggable-cpus", nil, &all); err != nil {
		return nil, 0, err
	}
	for _, p := range all {
		if p.Path == "" {
			free = append(free, p)
		}
	}
	slices.SortFunc(free, func(a, b cpuPlace) int {
		return cmp.Or(cmp.Compare(a.Props.Socket, b.Props.Socket), cmp.Compare(a.Props.Core, b.Props.Core), cmp.Compare(a.Props.Thread, b.Props.Thread))
	})
	return free, len(all) - len(free), nil
}

// pluggable is the memory of a guest, in bytes.
type pluggable struct {
	boot      int64 // what it booted with
	requested int64
	most      int64 // 0: there is no device for more
}

func memoryOf(ctx context.Context, c *qmp.Client) (m pluggable, err error) {
	var sum struct {
		Base int64 `json:"base-memory"`
	}
	if err := c.Execute(ctx, "query-memory-size-summary", nil, &sum); err != nil {
		return m, err
	}
	m.boot = sum.Base
	there, err := devices(ctx, c)
	if err != nil || !slices.Contains(there, moreMemory) {
		return m, err
	}
	get := func(path, name string, to *int64) error {
		return c.Execute(ctx, "qom-get", props{"path": path, "property": name}, to)
	}
	return m, errors.Join(get(peripheral(moreMemory), "requested-size", &m.requested), get("/objects/"+moreRAM, "size", &m.most))
}

// Size implements hypervisor.Resizer.
func (i *instance) Size(ctx context.Context) (size vm.Size, err error) {
	c, err := i.connected(ctx)
	if err == nil {
		size, err = sizeOf(ctx, c)
	}
	if err != nil {
		return size, fmt.Errorf("size of VM %s: %w", i.h.ID, i.OrEnded(err))
	}
	return size, nil
}

func sizeOf(ctx context.Context, c *qmp.Client) (size vm.Size, err error) {
	if _, size.CPUs, err = cpuPlaces(ctx, c); err != nil {
		return size, err
	}
	m, err := memoryOf(ctx, c)
	size.Memory = m.boot + m.requested
	return size, err
}

// Grow implements hypervisor.Resizer.
func (i *instance) Grow(ctx context.Context, to vm.Size) error {
	c, err := i.connected(ctx)
	if err == nil {
		err = i.OrEnded(i.growTo(ctx, c, to))
	}
	if err != nil {
		return fmt.Errorf("give VM %s %d CPUs and %d bytes of memory: %w", i.h.ID, to.CPUs, to.Memory, err)
	}
	return nil
}

func (i *instance) growTo(ctx context.Context, c *qmp.Client, to vm.Size) error {
	free, cpus, err := cpuPlaces(ctx, c)
	if err != nil {
		return err
	}
	m, err := memoryOf(ctx, c)
	if err != nil {
		return err
	}
	lacks, more := max(to.CPUs-cpus, 0), max(to.Memory-m.boot, m.requested)>>20<<20
	switch {
	case lacks > len(free):
		return errdefs.Invalidf("it has places for %d CPUs", cpus+len(free))
	case more > m.most:
		return errdefs.Invalidf("it has room for %d bytes of memory", m.boot+m.most)
	}
	now := hypervisor.Plan{CPUs: cpus + lacks, Memory: m.boot + more, Graphics: i.h.Graphics}
	if err := i.d.jail.Cgroups.Limit(i.h.ID, i.h.Dir, i.h.Cgroup, bounds(now, i.d.cfg.TBSize)); err != nil {
		return err
	}
	for _, p := range free[:lacks] {
		if err := c.Execute(ctx, "device_add", p.device(), nil); err != nil {
			return err
		}
	}
	if more == 0 {
		return nil
	}
	return i.request(ctx, c, m.requested, more)
}

// request has the guest take more bytes of memory. If it does not, it has to give back what it has taken.
func (i *instance) request(ctx context.Context, c *qmp.Client, was, more int64) error {
	ask := func(ctx context.Context, n int64) error {
		return c.Execute(ctx, "qom-set", props{"path": peripheral(moreMemory), "property": "requested-size", "value": n}, nil)
	}
	e := i.listen()
	defer i.deafen(e)
	if err := ask(ctx, more); err != nil {
		return err
	}
	err := i.taken(ctx, c, e, more)
	if err != nil {
		err = errors.Join(err, ask(context.WithoutCancel(ctx), was))
	}
	return err
}

// taken waits until the guest has taken that much memory.
func (i *instance) taken(ctx context.Context, c *qmp.Client, e *ear, want int64) error {
	var has int64
	if err := c.Execute(ctx, "qom-get", props{"path": peripheral(moreMemory), "property": "size"}, &has); err != nil {
		return err
	}
	for has < want {
		ev, err := e.next(ctx, c)
		if ctx.Err() != nil {
			return errdefs.Preconditionf("the guest has taken %d of %d bytes of memory; it needs a driver for virtio-mem, which has to be loaded: %w", has, want, ctx.Err())
		}
		if err != nil {
			return err
		}
		var data struct {
			ID   string `json:"id"`
			Size int64  `json:"size"`
		}
		if ev.Name == "MEMORY_DEVICE_SIZE_CHANGE" && json.Unmarshal(ev.Data, &data) == nil && data.ID == moreMemory {
			has = data.Size
		}
	}
	return nil
}
