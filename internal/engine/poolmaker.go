package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/engine/pool"
	"cocoonstack.io/cocoon/internal/engine/session"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// poolMaker makes the entries of the pool.
type poolMaker struct{ *node }

var _ pool.Maker = poolMaker{}

// Make implements pool.Maker. Everything that an entry has is named by its ID, in folders that are created first, so
// that what a crash leaves can be found.
func (p poolMaker) Make(ctx context.Context, snapshot string, spec vm.CloneSpec) (_ *pool.Entry, err error) {
	h, err := p.snapshots.Hold(ctx, snapshot)
	if err != nil {
		return nil, err
	}
	defer h.Release()
	id := vm.NewID()
	spec.Name, spec.Hostname, spec.Labels, spec.DNS = "", "", nil, nil
	r, images, err := p.designClone(ctx, h.Snapshot(), spec, id)
	if err != nil {
		return nil, err
	}
	r.Spec.Name = "cocoon-pooled-" + string(id)
	var back undo.Stack
	defer func() {
		if err != nil {
			err = errors.Join(err, back.Run(ctx))
		}
	}()
	back.Push(func(context.Context) error { return p.dirs.remove(id) })
	if err := p.dirs.makeUnborn(id); err != nil {
		return nil, err
	}
	if err := p.note(r); err != nil {
		return nil, err
	}
	if r.Disks, err = p.disksFrom(ctx, id, r.Driver, r.Spec.Storage, h, images); err != nil {
		return nil, err
	}
	if r.NICs, err = p.nics.attach(ctx, r, &back, true); err != nil {
		return nil, err
	}
	if err := p.dirs.syncing(id, r.Disks)(); err != nil { // now, and not while a caller waits for it
		return nil, err
	}
	d, err := p.drivers.get(r.Driver)
	if err != nil {
		return nil, err
	}
	plan := p.planOf(r)
	plan.Incoming = cloneOf(h, r)
	inst, err := d.Launch(ctx, plan)
	if err != nil {
		return nil, err
	}
	back.Push(func(ctx context.Context) error { return errors.Join(inst.Kill(ctx), inst.Close()) })
	if err := p.rehearse(ctx, inst, r); err != nil {
		return nil, err
	}
	return &pool.Entry{ID: id, Inst: inst, Rec: r}, nil
}

// rehearse makes the guest of r do what it will do when it is claimed, and then pauses it.
func (p poolMaker) rehearse(ctx context.Context, inst hypervisor.Instance, r vm.Record) (err error) {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.AgentTimeout)
	defer cancel()
	pauser, ok := hypervisor.As[hypervisor.Pauser](inst)
	if !ok {
		return errdefs.Unsupportedf("driver %s cannot pause a guest", r.Driver)
	}
	dialer, ok := hypervisor.As[hypervisor.GuestDialer](inst)
	if !ok {
		return errdefs.Unsupportedf("driver %s cannot reach the agent in a guest", r.Driver)
	}
	for range rehearsals {
		if err := p.rehearseOnce(ctx, dialer, r); err != nil {
			return err
		}
	}
	return pauser.Pause(ctx)
}

// rehearsals is how often a guest rehearses: the second time it accepts a session after another one, as when it is
// claimed.
const rehearsals = 2

func (p poolMaker) rehearseOnce(ctx context.Context, dialer hypervisor.GuestDialer, r vm.Record) (err error) {
	agent, err := p.agents[r.ImageType].Connect(ctx, dialer.DialGuest)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, agent.Close()) }()
	resumer, ok := agent.(guest.Resumer)
	if !ok {
		return errdefs.Unsupportedf("the agent of the guest cannot set its identity")
	}
	if _, err := resumer.Resumed(ctx, session.Resumed(r)); err != nil {
		return err
	}
	_, err = agent.Info(ctx) // later calls use gRPC, too
	return err
}

// Discard implements pool.Maker. The next start of the engine removes what it cannot.
func (p poolMaker) Discard(ctx context.Context, en *pool.Entry) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
	defer cancel()
	err := errors.Join(en.Inst.Kill(ctx), en.Inst.Close())
	if err == nil {
		err = p.nics.detach(ctx, en.Rec.NICs, true)
	}
	if err == nil {
		err = p.dirs.remove(en.ID)
	}
	if err != nil {
		p.log.Warn("clone in the pool not removed", "vm", en.ID, "err", err)
	}
}

func (p poolMaker) note(r vm.Record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("record clone in the pool: %w", err)
	}
	return atomicfile.WriteFile(p.dirs.pooled(r.ID), text, 0o600)
}

// forget releases the NICs of an entry that an earlier engine left. A folder without an entry is no error.
// Preconditions: its process has ended.
func (p poolMaker) forget(ctx context.Context, id vm.ID) error {
	text, err := os.ReadFile(p.dirs.pooled(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var r vm.Record
	if err := json.Unmarshal(text, &r); err != nil || r.ID != id {
		return errdefs.DataLossf("the record of clone %s in the pool is damaged", id)
	}
	nics, err := p.nics.of(ctx, r, true)
	if err != nil {
		return err
	}
	return p.nics.detach(ctx, nics, true)
}
