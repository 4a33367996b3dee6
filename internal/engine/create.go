package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Create creates the VM of spec and leaves it ready to start.
// Errors: InvalidArgument and NotFound (image) before anything changes, AlreadyExists; any other failure is rolled
// back.
func (e *Engine) Create(ctx context.Context, spec vm.Spec) (vm.Record, error) {
	return e.createVM(ctx, spec, createOperation)
}

// Launch is Create and Start in one. If the start fails, the whole VM is rolled back. Failures after its process runs
// (such as a guest that does not come up) are in its record.
func (e *Engine) Launch(ctx context.Context, spec vm.Spec) (vm.Record, error) {
	return e.createVM(ctx, spec, launchOperation)
}

func (e *Engine) createVM(caller context.Context, spec vm.Spec, o operation[*creation]) (vm.Record, error) {
	anySize := spec.Storage == 0
	spec = spec.Clone().Default()
	if err := spec.Validate(); err != nil {
		return vm.Record{}, err
	}
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	began := time.Now()
	r, err := e.planAndCreate(ctx, spec, anySize, o)
	if err != nil {
		return vm.Record{}, e.life.ended(caller, fmt.Errorf("%s vm %s: %w", o.name, spec.Name, err))
	}
	e.log.Info("vm created", "vm", r.ID, "op", o.name, "image", spec.Image, "dur", time.Since(began))
	return r.Clone(), nil
}

// diskSizer is a store that knows the size of the disks in its images; 0 for images without one.
type diskSizer interface {
	DiskSize(ctx context.Context, img image.Image) (int64, error)
}

// imageOf returns the image of the VM of spec. One that boots from a volume, or a sandbox, has an image without ID.
func (n *node) imageOf(ctx context.Context, spec vm.Spec) (image.Image, error) {
	if spec.Sandbox {
		return image.Blank(), nil
	}
	if _, ok := vm.BootVolume(spec.Image); ok {
		return noImage(spec.Image), nil
	}
	return n.images.Get(ctx, spec.Image)
}

// noImage stands for the image of a VM that boots from a volume.
func noImage(name string) image.Image { return image.Image{Name: name, Type: vm.ImageDisk} }

// planAndCreate plans the VM of spec and creates it. With anySize, the storage of spec is only the default.
func (n *node) planAndCreate(ctx context.Context, spec vm.Spec, anySize bool, o operation[*creation]) (vm.Record, error) {
	img, err := n.imageOf(ctx, spec)
	if err != nil {
		return vm.Record{}, err
	}
	if sizes, ok := n.images.(diskSizer); ok && anySize && img.ID != "" { // the default must not refuse an image with a larger disk
		size, err := sizes.DiskSize(ctx, img)
		if err != nil {
			return vm.Record{}, err
		}
		spec.Storage = max(spec.Storage, size)
	}
	driver, err := n.driverFor(ctx, spec.Driver)
	if err != nil {
		return vm.Record{}, err
	}
	r, err := n.design(spec.Created(), driver, img)
	if err != nil {
		return vm.Record{}, err
	}
	r.Owner = vm.Behalf(ctx)
	if err := n.nics.choosable(r.Owner, spec.NICs); err != nil {
		return vm.Record{}, err
	}
	more, err := n.designContainers(ctx, &r)
	if err != nil {
		return vm.Record{}, err
	}
	files, err := n.designImageVolumes(ctx, &r)
	if err != nil {
		return vm.Record{}, err
	}
	more = append(more, files...)
	if err := n.designDirs(r); err != nil {
		return vm.Record{}, err
	}
	if err := n.designSocket(r); err != nil {
		return vm.Record{}, err
	}
	if err := n.designHostDisks(r); err != nil {
		return vm.Record{}, err
	}
	if err := n.designAttached(ctx, &r); err != nil {
		return vm.Record{}, err
	}
	if err := n.possible(ctx, r); err != nil {
		return vm.Record{}, err
	}
	return o.create(ctx, n, r, func(m *machine) *creation {
		return &creation{newVM: newVM{machine: m}, images: append([]image.Image{img}, more...), volumes: spec.Volumes}
	})
}

// newVM is a VM that an operation creates. No caller was told of it.
type newVM struct {
	*machine
	back undo.Stack
}

// undo rolls back a failed creation and returns why it failed. If the rollback fails, the VM stays in StateError, so
// that it can be seen and removed.
func (v *newVM) undo(ctx context.Context, cause error) error {
	err := v.back.Run(ctx)
	if err == nil {
		err = v.forget(ctx)
	}
	if err == nil {
		return cause
	}
	err = errors.Join(cause, fmt.Errorf("undo: %w; remove vm %s to try again", err, v.id))
	v.fail(ctx, opCreate, vm.ReasonCreateFailed, err)
	return err
}

// recover removes what an interrupted creation made. A VM whose process is on record is complete, though, and stays.
func (v *newVM) recover(ctx context.Context) (next string, err error) {
	if len(v.record().Handle) > 0 {
		return "", v.adoptAndSettle(ctx)
	}
	if err := v.erase(ctx, true); err != nil {
		return "", err
	}
	if err := v.dropCopies(ctx, v.id); err != nil {
		return "", err
	}
	return "", v.forget(ctx)
}

// creation makes a new VM from images.
type creation struct {
	newVM
	images  []image.Image // the first belongs to the VM, the next to its containers, the others to its volumes
	volumes []vm.Volume
}

var createOperation = operation[*creation]{
	name: opCreate, recall: recallCreation,
	steps: []step[*creation]{
		{word: stepDisks, run: (*creation).buildOnly, undo: (*creation).undo, recover: (*creation).recover},
	},
}

var launchOperation = operation[*creation]{
	name: opLaunch, recall: recallCreation,
	steps: []step[*creation]{
		{word: stepDisks, run: (*creation).build, undo: (*creation).undo, recover: (*creation).recover},
		{word: stepLaunch, run: (*creation).launch, undo: (*creation).undo, recover: (*creation).recover},
	},
}

func recallCreation(m *machine, _ journal.Intent) (*creation, error) {
	return &creation{newVM: newVM{machine: m}}, nil
}

// build creates the disks, the volumes and the NICs of the VM.
func (c *creation) build(ctx context.Context) (outcome, error) {
	r := c.record()
	c.back.Push(func(context.Context) error { return c.dirs.remove(c.id) })
	if err := c.dirs.makeUnborn(c.id); err != nil {
		return outcome{}, err
	}
	if r.Spec.KeepsFirmware() != "" {
		if err := c.dirs.kept.Lay(r, c.dirs.firmware(c.id)); err != nil {
			return outcome{}, err
		}
	}
	if err := c.dirs.writeVolumes(c.id, c.volumes); err != nil {
		return outcome{}, err
	}
	var root image.Rootfs
	var err error
	if c.images[0].ID != "" || r.Spec.Sandbox {
		if root, err = c.node.images.Prepare(ctx, c.images[0], image.Layout{Dir: c.dirs.state(c.id), Storage: r.Spec.Storage, Raw: c.drivers.rawOnly(r.Driver)}); err != nil {
			return outcome{}, err
		}
	}
	sums, err := c.layKernel(ctx, r)
	if err != nil {
		return outcome{}, err
	}
	planned := r.Clone()
	if root.Disks, err = c.layImages(ctx, planned, c.images[1:], root.Disks); err != nil {
		return outcome{}, err
	}
	if root.Disks, err = c.withHostDisks(r, root.Disks); err != nil {
		return outcome{}, err
	}
	has, err := c.withVolumes(ctx, r, root.Disks, &c.back)
	if err != nil {
		return outcome{}, err
	}
	// This needs no step of its own: attaching again gives the same result, and undo assumes that every NIC may
	// exist.
	nics, err := c.nics.attach(ctx, r, &c.back, true)
	if err != nil {
		return outcome{}, err
	}
	r.Disks = has.disks
	seeded, err := c.seed(ctx, r, nics)
	if err != nil {
		return outcome{}, err
	}
	if err := c.dirs.syncing(c.id, seeded)(); err != nil {
		return outcome{}, err
	}
	return outcome{change: func(r *vm.Record) {
		r.Disks, r.NICs, r.Containers, r.ImageVolumes, r.Attached = seeded, nics, planned.Containers, planned.ImageVolumes, has.attached
		r.KernelSums = sums
	}}, nil
}

// buildOnly is build for a VM that is not started.
func (c *creation) buildOnly(ctx context.Context) (outcome, error) {
	done, err := c.build(ctx)
	if err != nil {
		return done, err
	}
	complete := done.change
	return outcome{synced: true, change: func(r *vm.Record) { complete(r); r.State = vm.StateCreated }}, c.dirs.born(c.id)
}

func (c *creation) launch(ctx context.Context) (outcome, error) { return c.boot(ctx, &c.back) }
