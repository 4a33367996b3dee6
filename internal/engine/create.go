package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/engine/proclog"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Operations, and the steps at which each can be interrupted. They are stored in the journal: their meaning never
// changes.
const (
	opCreate  = "create"  // disks
	opLaunch  = "launch"  // disks, launch
	opStart   = "start"   // network, launch
	opStop    = "stop"    // shutdown
	opRestart = "restart" // shutdown, launch
	opRemove  = "remove"  // kill

	opAdopt = "adopt" // adopt

	opSave      = "save"      // save
	opClone     = "clone"     // disks
	opHibernate = "hibernate" // save, undo
	opWake      = "wake"      // launch, answer, clean
	opRestore   = "restore"   // disks, kill, launch, answer, clean

	stepAdopt    = "adopt"
	stepDisks    = "disks"
	stepNetwork  = "network"
	stepLaunch   = "launch"
	stepShutdown = "shutdown"
	stepKill     = "kill"
	stepSave     = "save"
	stepUndo     = "undo"
	stepAnswer   = "answer"
	stepClean    = "clean"
)

// Create creates the VM of spec and leaves it ready to start.
// Errors: InvalidArgument and NotFound (image) before anything changes, AlreadyExists; any other failure is rolled
// back.
func (e *Engine) Create(ctx context.Context, spec vm.Spec) (vm.Record, error) {
	return e.createVM(ctx, spec, opCreate)
}

// Launch is Create and Start in one. If the start fails, the whole VM is rolled back. Failures after its process runs
// (such as a guest that does not come up) are in its record.
func (e *Engine) Launch(ctx context.Context, spec vm.Spec) (vm.Record, error) {
	return e.createVM(ctx, spec, opLaunch)
}

func (e *Engine) createVM(caller context.Context, spec vm.Spec, op string) (vm.Record, error) {
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
	r, err := e.planAndCreate(ctx, spec, anySize, op)
	if err != nil {
		return vm.Record{}, e.life.ended(caller, fmt.Errorf("%s vm %s: %w", op, spec.Name, err))
	}
	e.log.Info("vm created", "vm", r.ID, "op", op, "image", spec.Image, "dur", time.Since(began))
	return r.Clone(), nil
}

// diskSizer is a store that knows the size of the disks in its images; 0 for images without one.
type diskSizer interface {
	DiskSize(ctx context.Context, img image.Image) (int64, error)
}

// planAndCreate reserves the name, begins the operation, builds the VM, and rolls back on failure. With anySize, the
// storage of spec is only the default.
func (e *Engine) planAndCreate(ctx context.Context, spec vm.Spec, anySize bool, op string) (vm.Record, error) {
	img, err := e.images.Get(ctx, spec.Image)
	if err != nil {
		return vm.Record{}, err
	}
	if sizes, ok := e.images.(diskSizer); ok && anySize { // the default must not refuse an image with a larger disk
		size, err := sizes.DiskSize(ctx, img)
		if err != nil {
			return vm.Record{}, err
		}
		spec.Storage = max(spec.Storage, size)
	}
	r, err := e.design(spec, img)
	if err != nil {
		return vm.Record{}, err
	}
	r.Owner = vm.Behalf(ctx)
	more, err := e.designContainers(ctx, &r)
	if err != nil {
		return vm.Record{}, err
	}
	return e.buildNew(ctx, r, op, func(m *machine, back *undo.Stack) (vm.Record, error) {
		return e.build(ctx, m, append([]image.Image{img}, more...), spec.Volumes, op, back)
	})
}

// buildNew creates the VM of r under an intent, which build settles. If it fails, nothing of the VM remains.
func (e *Engine) buildNew(ctx context.Context, r vm.Record, op string, build func(*machine, *undo.Stack) (vm.Record, error)) (vm.Record, error) {
	if err := e.index.reserve(r.Owner.Qualify(r.Spec.Name), r.ID); err != nil {
		return vm.Record{}, err
	}
	m := e.newMachine(r)
	release, err := e.queue.acquire(ctx, m.id)
	if err == nil {
		defer release()
		err = e.insert(ctx, m, e.begin(op, stepDisks, nil))
	}
	if err != nil {
		e.index.unreserve(m.key())
		return vm.Record{}, err
	}
	var back undo.Stack
	if r, err = build(m, &back); err != nil {
		return r, e.unbuild(ctx, m, &back, err)
	}
	return r, nil
}

func (e *Engine) newMachine(r vm.Record) *machine {
	m := &machine{id: r.ID, log: proclog.New(e.stateDir(r.ID), e.cfg.MaxLogBytes), self: newTurn(), volumes: newTurn()}
	m.containers = e.containerLogs(r)
	m.rec.Store(&r)
	return m
}

// build creates the disks, the volumes and the NICs of m and, for a launch, starts it. It settles the intent. The
// first image belongs to the VM, the others to its containers.
func (e *Engine) build(ctx context.Context, m *machine, images []image.Image, volumes []vm.Volume, op string, back *undo.Stack) (vm.Record, error) {
	r := m.record()
	back.Push(func(context.Context) error { return e.removeDirs(m.id) })
	if err := e.makeUnborn(m.id); err != nil {
		return r, err
	}
	if err := e.writeVolumes(m.id, volumes); err != nil {
		return r, err
	}
	root, err := e.images.Prepare(ctx, images[0], e.stateDir(m.id), r.Spec.Storage)
	if err != nil {
		return r, err
	}
	containers := r.Clone().Containers
	if root.Disks, err = e.layContainers(ctx, containers, images[1:], root.Disks); err != nil {
		return r, err
	}
	// This needs no step of its own: attaching again gives the same result, and undo assumes that every NIC may
	// exist.
	nics, err := e.attach(ctx, r, back, true)
	if err != nil {
		return r, err
	}
	r.Disks = root.Disks
	seeded, err := e.seed(ctx, r, nics)
	if err != nil {
		return r, err
	}
	if err := e.syncing(m.id, seeded)(); err != nil {
		return r, err
	}
	complete := func(r *vm.Record) { r.Disks, r.NICs, r.Containers = seeded, nics, containers }
	if op == opCreate {
		if err := e.born(m.id); err != nil {
			return r, err
		}
		return e.commit(ctx, m, e.synced(e.journal.Settle), func(r *vm.Record) { complete(r); r.State = vm.StateCreated })
	}
	if _, err := e.commit(ctx, m, e.step(stepLaunch), complete); err != nil {
		return r, err
	}
	return e.bootVM(ctx, m, back)
}

// unbuild rolls back a failed creation and returns why it failed. If the rollback fails, the VM stays in StateError,
// so that it can be seen and removed.
func (e *Engine) unbuild(ctx context.Context, m *machine, back *undo.Stack, cause error) error {
	err := back.Run(ctx)
	if err == nil {
		err = e.forget(ctx, m)
	}
	if err == nil {
		return cause
	}
	err = fmt.Errorf("undo: %w; remove vm %s to try again", err, m.id)
	e.fail(ctx, m, vm.ReasonCreateFailed, errors.Join(cause, err))
	return errors.Join(cause, err)
}

// fail settles m in StateError.
func (e *Engine) fail(ctx context.Context, m *machine, reason string, cause error) {
	broken := func(r *vm.Record) {
		r.State, r.Reason, r.Message, r.AgentReady = vm.StateError, reason, cause.Error(), false
	}
	if _, err := e.commit(ctx, m, e.journal.Settle, broken); err != nil {
		// The journal still holds the intent: the next recovery handles it. Until then the VM can be removed.
		e.log.Error("vm failed and the journal does not take it", "vm", m.id, "err", err)
		m.write.Lock()
		defer m.write.Unlock()
		r := m.record()
		broken(&r)
		m.rec.Store(&r)
	}
}

// attach creates the NICs of r. On failure, back detaches those already created; if fresh, it also releases their
// addresses.
func (e *Engine) attach(ctx context.Context, r vm.Record, back *undo.Stack, fresh bool) ([]vm.NIC, error) {
	var nics []vm.NIC
	for i, want := range r.Spec.NICs {
		n, err := e.network(want)
		if err != nil {
			return nil, err
		}
		nic, err := n.Attach(ctx, r.ID, r.Owner.Qualify(r.Spec.Name), i, want)
		if err != nil {
			return nil, err
		}
		back.Push(func(ctx context.Context) error {
			if err := n.Detach(ctx, nic); err != nil || !fresh {
				return err
			}
			return n.Release(ctx, nic)
		})
		nics = append(nics, nic)
	}
	return nics, nil
}

// detach removes the taps of nics; with release it also releases the addresses. It skips a network that this node no
// longer has: such a network sweeps its taps itself if it comes back.
func (e *Engine) detach(ctx context.Context, nics []vm.NIC, release bool) error {
	for _, nic := range nics {
		n := e.networks.Get(nic.Network)
		if n == nil {
			e.log.Warn("interface left alone, its network is not configured", "network", nic.Network)
			continue
		}
		if err := n.Detach(ctx, nic); err != nil {
			return err
		}
		if !release {
			continue
		}
		if err := n.Release(ctx, nic); err != nil {
			return err
		}
	}
	return nil
}
