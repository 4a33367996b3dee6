package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// drivers are the hypervisors of this node, by name.
type drivers map[string]hypervisor.Driver

func (ds drivers) get(name string) (hypervisor.Driver, error) {
	if d := ds[name]; d != nil {
		return d, nil
	}
	return nil, errdefs.Invalidf("no hypervisor driver is called %q; available: %s", name, ds.names())
}

// usable reports whether the driver with that name can start VMs here.
func (ds drivers) usable(ctx context.Context, name string) bool {
	d := ds[name]
	if d == nil {
		return false
	}
	_, err := d.Probe(ctx)
	return !errdefs.IsUnavailable(err)
}

// check refuses a plan that the driver with that name can never start.
func (ds drivers) check(ctx context.Context, name string, p hypervisor.Plan) error {
	d, err := ds.get(name)
	if err != nil {
		return err
	}
	if c, ok := hypervisor.As[hypervisor.Checker](d); ok {
		return c.Check(ctx, p)
	}
	return nil
}

// rawOnly reports whether all disks of VMs of the driver with that name must be raw.
func (ds drivers) rawOnly(name string) bool {
	r, ok := hypervisor.As[hypervisor.DiskReader](ds[name])
	return ok && r.RawOnly()
}

// firmware returns what boots a disk guest of the driver with that name that asks for no firmware.
func (ds drivers) firmware(name string) vm.Firmware {
	if t, ok := hypervisor.As[hypervisor.FirmwareTeller](ds[name]); ok {
		return t.Firmware()
	}
	return vm.FirmwareBIOS
}

// names lists the drivers for a message.
func (ds drivers) names() string { return list(slices.Collect(maps.Keys(ds))) }

// list joins all for a message.
func list(all []string) string {
	if len(all) == 0 {
		return "none"
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// reap ends a process of r that nobody watches: the one of the handle, and any that was launched in dir without
// leaving a handle.
func (ds drivers) reap(ctx context.Context, r vm.Record, dir string) error {
	d, err := ds.get(r.Driver)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, undo.Limit) // a process that waits for a disk may not end
	defer cancel()
	if len(r.Handle) > 0 {
		inst, err := d.Adopt(ctx, hypervisor.Handle(r.Handle))
		if err == nil {
			err = errors.Join(inst.Kill(ctx), inst.Close())
		}
		if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsInvalid(err) {
			return err
		}
	}
	return d.Reap(ctx, r.ID, dir)
}

// reapUnknown ends every process that any driver may have launched for id in dir.
func (ds drivers) reapUnknown(ctx context.Context, id vm.ID, dir string) error {
	for _, d := range ds {
		if err := d.Reap(ctx, id, dir); err != nil {
			return fmt.Errorf("end its process of driver %s: %w", d.Name(), err)
		}
	}
	return nil
}

// seek returns the processes of VMs that the journal does not know.
func (ds drivers) seek(ctx context.Context, ids []vm.ID) (map[vm.ID][]int, error) {
	pids := map[vm.ID][]int{}
	for _, d := range ds {
		seeker, ok := hypervisor.As[hypervisor.Seeker](d)
		if !ok {
			continue
		}
		found, err := seeker.Seek(ctx, ids)
		if err != nil {
			return nil, fmt.Errorf("look for processes of driver %s: %w", d.Name(), err)
		}
		maps.Copy(pids, found)
	}
	return pids, nil
}

// lastExit asks the driver how the process of r ended, which nobody watched.
func (ds drivers) lastExit(ctx context.Context, r vm.Record) ending {
	d, err := ds.get(r.Driver)
	if err != nil {
		return ending{lost: true}
	}
	t, ok := hypervisor.As[hypervisor.ExitTeller](d)
	if !ok {
		return ending{lost: true}
	}
	exit, err := t.LastExit(ctx, hypervisor.Handle(r.Handle))
	return ending{exit: exit, lost: err != nil}
}

// ending says how a process ended.
type ending struct {
	exit   hypervisor.Exit
	asked  bool // the engine wanted it to end
	killed bool // and had to use force
	lost   bool // it ended while nobody watched it
}
