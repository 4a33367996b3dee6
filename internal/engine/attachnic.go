package engine

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// AttachNIC gives a VM one more interface on a network on which it has no further one, until DetachNIC or its removal. A guest that runs gets it
// at once, and that of a container image configures it as at its boot. It is no error if the VM has it already.
// Errors: NotFound, InvalidArgument (no such network), AlreadyExists if it has another hardware address there, FailedPrecondition if the VM is
// hibernated, paused or has no interface, ResourceExhausted, Unsupported, Unavailable when the guest does not answer. After an error the VM is as
// before, unless the error says that it keeps the interface.
func (v nicVerbs) AttachNIC(caller context.Context, ref string, want vm.NICSpec) (vm.Record, error) {
	return v.operate(caller, opAttachNIC, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		return m.attachNIC(ctx, want)
	})
}

func (m *machine) attachNIC(ctx context.Context, want vm.NICSpec) (vm.Record, error) {
	r := m.record()
	n, err := m.nics.network(want)
	if err != nil {
		return r, err
	}
	want = vm.NICSpec{Network: n.Name(), MAC: want.MAC, Policed: len(r.Spec.NICs) > 0 && r.Spec.NICs[0].Policed, LinkDown: want.LinkDown}
	if want.MAC != "" {
		if err := vm.ValidateMAC(want.MAC); err != nil {
			return r, err
		}
	}
	x := nicArgs{Spec: want}
	if i, err := r.Spec.NICOn(n.Name(), r.NICs); err == nil {
		x.Place = r.Spec.Place(i)
		switch {
		case want.MAC != "" && r.NICs[i].MAC != want.MAC:
			return r, errdefs.Existsf("it has an interface on network %s already, with the hardware address %s; detach it first", n.Name(), r.NICs[i].MAC)
		case !slices.Contains(r.Moving, x.Place):
			return r, nil
		}
		x.Spec = r.Spec.NICs[i]
	} else if x.Place, err = r.Spec.FreePlace(); err != nil {
		return r, err
	}
	x.Spec.Place = x.Place
	if err := m.nics.choosable(r.Owner, []vm.NICSpec{want}); err != nil {
		return r, err
	}
	if err := m.pluggable(ctx, r); err != nil {
		return r, err
	}
	if want.LinkDown {
		if err := m.possible(ctx, r.WithNIC(x.Spec, vm.NIC{LinkDown: true}, false)); err != nil {
			return r, err
		}
	}
	return attachNICOperation.run(ctx, m, &nicAttachment{moving{m, x}}, x.json())
}

// pluggable refuses to change which interfaces r has, if its guest cannot take part.
func (m *machine) pluggable(ctx context.Context, r vm.Record) error {
	if err := changeable(r); err != nil {
		return err
	}
	if r.State != vm.StateRunning {
		return nil
	}
	if err := awake(r); err != nil {
		return err
	}
	if !r.Itself() {
		return errdefs.Preconditionf("its guest still has the interfaces of the VM that it is a clone of; try again when it has its own")
	}
	if _, err := m.nicPlugger(); err != nil {
		return err
	}
	run := m.run.Load()
	if run == nil || !run.link.OurAgent() {
		return nil
	}
	if _, err := run.link.Ready(ctx, attachPatience); err != nil {
		return errdefs.Unavailablef("its guest does not answer at the moment: %w", err)
	}
	return nil
}

// nicArgs are the journal arguments of attaching and detaching an interface.
type nicArgs struct {
	Spec  vm.NICSpec `json:"spec"`
	Place int        `json:"place"`
}

func (a nicArgs) json() []byte {
	b, _ := json.Marshal(a) // strings, numbers and booleans always encode
	return b
}

func nicArgsOf(in journal.Intent) (args nicArgs, err error) {
	if err := json.Unmarshal(in.Args, &args); err != nil || args.Place < 1 || args.Spec.Network == "" {
		return args, errdefs.DataLossf("the arguments of its unfinished %s are damaged", in.Op)
	}
	return args, nil
}

// moving is what attaching and detaching an interface have in common.
type moving struct {
	*machine
	nicArgs
}

// own creates the interface, or finds it as it is.
func (a *moving) own(ctx context.Context) (network.Network, vm.NIC, error) {
	n, err := a.nics.network(a.Spec)
	if err != nil {
		return nil, vm.NIC{}, err
	}
	nic, err := attachOne(ctx, n, a.record(), a.Place, a.Spec)
	return n, nic, err
}

// insert plugs the interface into the running guest.
func (a *moving) insert(ctx context.Context) error {
	plugger, err := a.nicPlugger()
	if err != nil {
		return err
	}
	r := a.record()
	nic := r.NICs[r.Spec.NICIn(a.Place)]
	nic.Place = a.Place
	ctx, cancel := context.WithTimeout(ctx, a.cfg.AgentTimeout)
	defer cancel()
	return endedProcess(plugger.PlugNIC(ctx, nic))
}

// remove unplugs the interface from the running guest. It waits a limited time for the guest to release it.
func (a *moving) remove(ctx context.Context) error {
	plugger, err := a.nicPlugger()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, a.cfg.AgentTimeout)
	defer cancel()
	if err := plugger.UnplugNIC(ctx, a.Place); !errdefs.IsNotFound(err) {
		return err
	}
	return nil // its process has ended
}

// free removes the tap and releases the address, whether they are on record or not. A network that this node no longer has sweeps its taps itself
// if it comes back.
func (a *moving) free(ctx context.Context) error {
	r := a.record()
	if i := r.Spec.NICIn(a.Place); i > 0 {
		return a.nics.detach(ctx, r.NICs[i:i+1], true)
	}
	_, nic, err := a.own(ctx)
	if errdefs.IsInvalid(err) || errdefs.Is(err, errdefs.ResourceExhausted) { // there is no such network, or it has not given an address
		return nil
	}
	if err != nil {
		return err
	}
	return a.nics.detach(ctx, []vm.NIC{nic}, true)
}

// gone changes r to the record of a VM that does not have the interface.
func (a *moving) gone(r *vm.Record) {
	if i := r.Spec.NICIn(a.Place); i > 0 {
		*r = r.WithoutNIC(i, r.State == vm.StateRunning)
	}
}

// nicAttachment gives a VM an interface. Once it exists it is on record, so that a guest that ends meanwhile gives back its tap. Nobody expects it
// in the guest before the end.
type nicAttachment struct{ moving }

var attachNICOperation = operation[*nicAttachment]{
	name: opAttachNIC, told: true, recall: recallNICAttachment,
	steps: []step[*nicAttachment]{
		{word: stepNetwork, run: (*nicAttachment).attach, undo: (*nicAttachment).undo, recover: (*nicAttachment).recover, lasting: true},
		{word: stepPlug, run: (*nicAttachment).plug, undo: (*nicAttachment).undo, recover: (*nicAttachment).recover, lasting: true},
		{word: stepJoin, run: (*nicAttachment).join, undo: (*nicAttachment).undo, recover: (*nicAttachment).recover, lasting: true},
	},
}

func recallNICAttachment(m *machine, in journal.Intent) (*nicAttachment, error) {
	args, err := nicArgsOf(in)
	return &nicAttachment{moving{m, args}}, err
}

func (a *nicAttachment) attach(ctx context.Context) (outcome, error) {
	n, nic, err := a.own(ctx)
	if err != nil {
		return outcome{}, err
	}
	if !a.runs() { // it keeps the address, and gets the tap when it starts
		if err := n.Detach(ctx, nic); err != nil {
			return outcome{}, err
		}
	}
	return outcome{change: func(r *vm.Record) {
		running := r.State == vm.StateRunning
		if r.Spec.NICIn(a.Place) < 0 {
			*r = r.WithNIC(a.Spec, nic, running)
		}
		if running {
			*r = r.Unsettled(a.Place)
		}
	}}, nil
}

func (a *nicAttachment) plug(ctx context.Context) (outcome, error) {
	if a.record().State != vm.StateRunning {
		return outcome{}, nil
	}
	return outcome{}, a.insert(ctx)
}

func (a *nicAttachment) join(ctx context.Context) (outcome, error) {
	next := a.record().Settled(a.Place)
	if run := a.run.Load(); run != nil && next.State == vm.StateRunning {
		if err := run.link.Reconfigure(ctx, next, attachPatience); err != nil {
			return outcome{}, err
		}
	}
	return outcome{synced: true, change: func(r *vm.Record) { *r = r.Settled(a.Place) }}, nil
}

// undo takes the interface back. If the guest does not give it back, the VM keeps it.
func (a *nicAttachment) undo(ctx context.Context, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
	defer cancel()
	var err error
	if a.runs() && a.record().Spec.NICIn(a.Place) > 0 {
		err = a.remove(ctx)
	}
	if err == nil {
		err = a.free(ctx)
	}
	if err != nil {
		a.log.Warn("interface that was not attached stays with its vm", "vm", a.id, "err", err)
		a.settleFailed(ctx, opAttachNIC, same)
		return fmt.Errorf("%w; the VM keeps the interface on network %s, because it could not be taken back: %w; detach it", cause, a.Spec.Network, err)
	}
	a.settleFailed(ctx, opAttachNIC, a.gone)
	return cause
}

// recover goes on where the earlier process of the engine ended. The interface is on record before recovery removes what no record has. A VM that
// does not run is as before.
func (a *nicAttachment) recover(ctx context.Context) (next string, err error) {
	runs, err := a.readopt(ctx)
	if err != nil {
		return "", err
	}
	if runs {
		done, err := a.attach(ctx)
		if err == nil {
			_, err = a.commit(ctx, a.step(stepPlug), done.change)
		}
		if err != nil {
			a.log.Warn("interface not attached", "vm", a.id, "network", a.Spec.Network, "err", a.undo(ctx, err))
			return "", nil
		}
		return stepPlug, nil
	}
	if err := a.free(ctx); err != nil {
		return "", err
	}
	return "", a.settle(ctx, a.gone)
}
