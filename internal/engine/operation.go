package engine

import (
	"context"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// Names of operations, and words of their steps. The journal stores them: their meaning never changes.
const (
	opCreate    = "create"
	opLaunch    = "launch"
	opStart     = "start"
	opStop      = "stop"
	opRestart   = "restart"
	opRemove    = "remove"
	opSave      = "save"
	opClone     = "clone"
	opHibernate = "hibernate"
	opWake      = "wake"
	opRestore   = "restore"
	opAdopt     = "adopt"

	opAddContainer    = "add container"
	opRemoveContainer = "remove container"

	opAddBootContainer = "add boot container"

	opResizeContainers = "resize containers"

	opGrow = "grow"

	opAttachVolume = "attach volume"
	opDetachVolume = "detach volume"

	opDump = "dump memory"

	opAttachNIC = "attach nic"
	opDetachNIC = "detach nic"

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
	stepJoin     = "join"
	stepResize   = "resize"
	stepGrow     = "grow"
	stepAttach   = "attach"
	stepPlug     = "plug"
	stepLeave    = "leave"
	stepUnplug   = "unplug"
	stepDetach   = "detach"
	stepDump     = "dump"
)

// operation is one kind of change of a VM that the journal follows from its first step to its end. T is such a change
// in progress. Each kind is in a file of its own, which has all of it: how it is begun, run, undone and recovered.
//
// The journal stores the names of operations and the words of steps: their meaning never changes.
type operation[T any] struct {
	name  string
	steps []step[T] // in order
	// recall returns the operation that an earlier process left unfinished.
	recall func(*machine, journal.Intent) (T, error)
	// release gives back what an operation of recall has taken since; nil: nothing.
	release func(T)
	// told: a caller may know of the VM before the operation has ended. So a VM that is found with it unfinished is
	// worth finishing it.
	told bool
}

// step is one part of an operation. While it runs, the journal has its word.
type step[T any] struct {
	word string
	// run does the step. nil: no step leads to this one but the undo of another.
	run func(T, context.Context) (outcome, error)
	// undo takes back what the operation did, because run, or the commit of its outcome, has failed with the given
	// error, and settles the operation. It returns why the operation failed; nil: its aim is reached nevertheless.
	undo func(T, context.Context, error) error
	// recover finishes or undoes an operation that was interrupted in this step by the end of an earlier process. If
	// that takes long, it returns the word of the step to go on with; "" otherwise.
	recover func(T, context.Context) (next string, err error)
	// lasting: if the engine ends in this step, nothing is undone, and the next engine goes on with it.
	lasting bool
}

// outcome is the result of a step.
type outcome struct {
	change func(*vm.Record)      // committed with the word of the next step, or with the end of the operation; nil: none
	synced bool                  // the change survives a power cut before anything follows it
	gone   bool                  // the VM does not exist any more: its record is removed instead
	then   func(context.Context) // follows the commit; nil: nothing
}

// run begins the operation on m and runs its steps. Preconditions: m is held.
func (o operation[T]) run(ctx context.Context, m *machine, x T, args []byte) (vm.Record, error) {
	if err := m.open(ctx, o.name, o.steps[0].word, args); err != nil {
		return m.record(), err
	}
	return o.from(ctx, m, x, 0)
}

// from runs the steps from one on, which the journal has already. It returns the record of the last commit.
func (o operation[T]) from(ctx context.Context, m *machine, x T, at int) (r vm.Record, err error) {
	for ; at < len(o.steps) && o.steps[at].run != nil; at++ {
		s := o.steps[at]
		done, err := s.run(x, ctx)
		if err == nil {
			r, err = o.commit(ctx, m, done, at)
		}
		if err != nil {
			if !s.lasting || m.life.serving.Err() == nil {
				err = s.undo(x, ctx, err)
			}
			return m.record(), err
		}
		if done.then != nil {
			done.then(ctx)
		}
	}
	return r, nil
}

// commit records the outcome of a step, and that the next one runs or that the operation has ended.
func (o operation[T]) commit(ctx context.Context, m *machine, done outcome, at int) (vm.Record, error) {
	if done.gone {
		return m.record(), m.forget(ctx)
	}
	with := put(m.journal.Settle)
	if next := at + 1; next < len(o.steps) && o.steps[next].run != nil {
		with = m.step(o.steps[next].word)
	}
	if done.synced {
		with = m.synced(with)
	}
	if done.change == nil {
		done.change = same
	}
	return m.commit(ctx, with, done.change)
}

// create begins the operation with a new VM of the record r, and runs its steps. with returns the operation on it.
func (o operation[T]) create(ctx context.Context, n *node, r vm.Record, with func(*machine) T) (vm.Record, error) {
	if err := n.vms.reserve(r.Owner.Qualify(r.Spec.Name), r.ID); err != nil {
		return vm.Record{}, err
	}
	m := n.newMachine(r)
	release, err := n.vms.queue.Lock(ctx, m.id)
	if err == nil {
		defer release()
		err = m.insert(ctx, m.begin(o.name, o.steps[0].word, nil))
	}
	if err != nil {
		n.vms.unreserve(m.key())
		return vm.Record{}, err
	}
	return o.from(ctx, m, with(m), 0)
}

// recoverable is an operation of any kind, as recovery sees it.
type recoverable interface {
	id() string
	words() []string
	worthFinishing() bool
	// recover finishes or undoes the operation of m that an earlier process left unfinished. If that takes long, it
	// returns the rest of it, which needs m to stay held.
	recover(ctx context.Context, m *machine, in journal.Intent) (rest func(context.Context) error, err error)
}

func (o operation[T]) id() string { return o.name }

func (o operation[T]) worthFinishing() bool { return o.told }

func (o operation[T]) words() (words []string) {
	for _, s := range o.steps {
		words = append(words, s.word)
	}
	return words
}

func (o operation[T]) recover(ctx context.Context, m *machine, in journal.Intent) (rest func(context.Context) error, err error) {
	x, err := o.recall(m, in)
	if err != nil {
		return nil, err
	}
	at := o.at(in.Step)
	if at < 0 {
		return nil, errdefs.Unsupportedf("this version of Cocoon does not know the step %q of the operation %q", in.Step, in.Op)
	}
	release := func() {
		if o.release != nil {
			o.release(x)
		}
	}
	next, err := o.steps[at].recover(x, ctx)
	if next == "" || err != nil {
		release()
		return nil, err
	}
	return func(ctx context.Context) error {
		defer release()
		_, err := o.from(ctx, m, x, o.at(next))
		return err
	}, nil
}

// at returns the index of the first step with a word.
func (o operation[T]) at(word string) int { return slices.Index(o.words(), word) }
