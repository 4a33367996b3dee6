// Package desired keeps the workloads of an appliance: what they shall be, what is known of them, and what has happened to them. All
// of it is in memory, and is stored before anybody is told.
//
// It starts nothing. Whoever follows the workloads asks for Changes.
package desired

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
)

// MaxWorkloads is the number of workloads that a machine can have.
const MaxWorkloads = 1000

// Store keeps workloads. Safe for concurrent use.
type Store struct {
	docs journal.Documents
	now  func() time.Time

	mu      sync.Mutex
	rows    map[string]workload.Row
	damaged map[string]error // rows that cannot be read; their names are taken
	follow  []func(name string)

	events events
}

// Open reads the workloads. A damaged record is kept and reported; it hinders no other.
func Open(ctx context.Context, docs journal.Documents, now func() time.Time, log *slog.Logger) (*Store, error) {
	s := &Store{docs: docs, now: now, rows: map[string]workload.Row{}, damaged: map[string]error{}}
	all, err := docs.List(ctx, journal.Workloads)
	if err != nil {
		return nil, err
	}
	for _, d := range all {
		r, err := workload.Decode(d.Name, d.Data)
		if err != nil {
			log.Error("a workload is left alone, because its record is damaged", "workload", d.Name, "err", err)
			s.damaged[d.Name] = err
			continue
		}
		s.rows[d.Name] = r
	}
	return s, s.events.load(ctx, docs)
}

// Follow calls changed with the name of each workload whose spec or desired state changes from now on. changed must not wait.
func (s *Store) Follow(changed func(name string)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.follow = append(s.follow, changed)
}

// Get returns a workload. Errors: NotFound, DataLoss.
func (s *Store) Get(name string) (workload.Row, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.get(name)
	return r.Clone(), err
}

func (s *Store) get(name string) (workload.Row, error) {
	r, ok := s.rows[name]
	if err := s.damaged[name]; err != nil {
		return r, err
	}
	if !ok {
		return r, errdefs.NotFoundf("there is no workload %q", name)
	}
	return r, nil
}

// List returns all workloads, sorted by name.
func (s *Store) List() []workload.Row {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.list()
}

// Address returns the address of a workload on the bridge while it runs; "" if there is none.
func (s *Store) Address(name string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rows[name].Workload.GetStatus().GetAddress()
}

// At returns the name of the workload that runs at an address of the bridge; "" if there is none.
func (s *Store) At(address string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, r := range s.rows {
		if address != "" && r.Workload.GetStatus().GetAddress() == address {
			return name
		}
	}
	return ""
}

// Names returns the names of all workloads, also of those whose records are damaged.
func (s *Store) Names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.AppendSeq(slices.Collect(maps.Keys(s.rows)), maps.Keys(s.damaged))
}

func (s *Store) list() []workload.Row {
	all := make([]workload.Row, 0, len(s.rows))
	for _, r := range s.rows {
		all = append(all, r.Clone())
	}
	slices.SortFunc(all, func(a, b workload.Row) int { return cmp.Compare(a.Name(), b.Name()) })
	return all
}

// Applied is the answer to Apply.
type Applied struct {
	Row     workload.Row
	Action  capsulev1.ApplyAction
	Changes []*capsulev1.FieldChange
}

// Apply makes w what the workload of its name shall be. Its status stays. fits says whether it fits beside the others. If dry, nothing
// changes.
// Errors: those of fits, FailedPrecondition while the workload is being deleted, ResourceExhausted, DataLoss.
func (s *Store) Apply(ctx context.Context, w *capsulev1.Workload, dry bool, fits func(others []workload.Row) error) (Applied, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, err := s.get(w.GetName())
	known := err == nil
	switch {
	case err != nil && !errdefs.IsNotFound(err):
		return Applied{}, err
	case !known && len(s.rows) >= MaxWorkloads:
		return Applied{}, errdefs.Exhaustedf("there are %d workloads, and there can be no more", MaxWorkloads)
	case known && old.Desired() == capsulev1.DesiredState_DESIRED_STATE_DELETING:
		return Applied{}, errdefs.Preconditionf("workload %s is being deleted; apply it again when it is gone", w.GetName())
	}
	if err := fits(s.list()); err != nil {
		return Applied{}, err
	}
	next := workload.Row{Workload: proto.CloneOf(w), Past: old.Past}
	next.Workload.Status, next.Workload.Generation = proto.CloneOf(old.Workload.GetStatus()), old.Workload.GetGeneration()
	next.Workload.DesiredState = next.Desired()
	a := Applied{Row: next, Action: capsulev1.ApplyAction_APPLY_ACTION_CREATED, Changes: workload.Changes(old.Workload, next.Workload)}
	if known {
		a.Action = capsulev1.ApplyAction_APPLY_ACTION_CHANGED
		if len(a.Changes) == 0 {
			a.Action, a.Row = capsulev1.ApplyAction_APPLY_ACTION_UNCHANGED, old.Clone()
			return a, nil
		}
	}
	next.Workload.Generation++
	next.Next, next.Delay = time.Time{}, 0 // the spec has changed: what failed before may work now
	if w.GetRestartPolicy() != old.Workload.GetRestartPolicy() {
		next.Done = ""
	}
	if dry {
		return a, nil
	}
	if err := s.put(ctx, next, !known); err != nil {
		return Applied{}, err
	}
	s.tell(next.Name())
	a.Row = next.Clone()
	return a, nil
}

// Change changes a workload by fn, and stores it if it differs. Followers learn of a new generation.
// Errors: those of fn, NotFound, DataLoss.
func (s *Store) Change(ctx context.Context, name string, fn func(*workload.Row) error) (workload.Row, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, err := s.get(name)
	if err != nil {
		return workload.Row{}, err
	}
	next := old.Clone()
	if err := fn(&next); err != nil {
		return workload.Row{}, err
	}
	if next.Past == old.Past && proto.Equal(next.Workload, old.Workload) {
		return next, nil
	}
	if err := s.put(ctx, next, false); err != nil {
		return workload.Row{}, err
	}
	if next.Workload.GetGeneration() != old.Workload.GetGeneration() {
		s.tell(name)
	}
	return next.Clone(), nil
}

// Want changes the desired state, and makes a new generation. anew makes the container or VM anew, even if it runs.
func (s *Store) Want(ctx context.Context, name string, state capsulev1.DesiredState, anew bool) (workload.Row, error) {
	return s.Change(ctx, name, func(r *workload.Row) error {
		switch {
		case r.Desired() == capsulev1.DesiredState_DESIRED_STATE_DELETING:
			if state == r.Desired() {
				return nil
			}
			return errdefs.Preconditionf("workload %s is being deleted", name)
		case r.Desired() == state && !anew:
			return nil
		}
		r.Workload.DesiredState = state
		r.Workload.Generation++
		r.Next, r.Delay = time.Time{}, 0
		if anew {
			r.Restart++
		}
		return nil
	})
}

// Forget removes a workload. Precondition: nothing of it is left.
func (s *Store) Forget(ctx context.Context, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.docs.Write(ctx, journal.Change{Table: journal.Workloads, Name: name}); err != nil {
		return err
	}
	delete(s.rows, name)
	return nil
}

// put stores r. Precondition: mu is held.
func (s *Store) put(ctx context.Context, r workload.Row, isNew bool) error {
	data, err := r.Encode()
	if err != nil {
		return fmt.Errorf("store workload %s: %w", r.Name(), err)
	}
	if err := s.docs.Write(context.WithoutCancel(ctx), journal.Change{Table: journal.Workloads, Name: r.Name(), Data: data, New: isNew}); err != nil {
		return err
	}
	s.rows[r.Name()] = r.Clone()
	return nil
}

// tell tells the followers. Precondition: mu is held.
func (s *Store) tell(name string) {
	for _, f := range s.follow {
		f(name)
	}
}

// maxEvents is the number of events that are kept.
const maxEvents = 1000

// events are what has happened, the oldest first.
type events struct {
	mu      sync.Mutex
	all     []*capsulev1.WorkloadEvent
	changed chan struct{} // closed at the next event
}

func eventName(sequence int64) string { return fmt.Sprintf("%019d", sequence) }

func (e *events) load(ctx context.Context, docs journal.Documents) error {
	e.changed = make(chan struct{})
	stored, err := docs.List(ctx, journal.Events)
	if err != nil {
		return err
	}
	for _, d := range stored {
		x := &capsulev1.WorkloadEvent{}
		if protojson.Unmarshal(d.Data, x) == nil && eventName(x.GetSequence()) == d.Name { // history that cannot be read is no reason to stop
			e.all = append(e.all, x)
		}
	}
	return nil
}

// Record stores what has happened to a workload. reason is one word, message one sentence without a final point.
func (s *Store) Record(ctx context.Context, name, reason, message string) error {
	e := &s.events
	e.mu.Lock()
	defer e.mu.Unlock()
	x := &capsulev1.WorkloadEvent{TimeUnix: s.now().Unix(), Workload: name, Reason: reason, Message: strings.ToValidUTF8(message, "�"), Sequence: 1}
	if n := len(e.all); n > 0 {
		x.Sequence = e.all[n-1].GetSequence() + 1
	}
	data, err := protojson.Marshal(x)
	if err != nil {
		return err
	}
	changes := []journal.Change{{Table: journal.Events, Name: eventName(x.GetSequence()), Data: data}}
	e.all = append(e.all, x)
	if len(e.all) > maxEvents {
		changes = append(changes, journal.Change{Table: journal.Events, Name: eventName(e.all[0].GetSequence())})
		e.all = slices.Delete(e.all, 0, 1)
	}
	close(e.changed)
	e.changed = make(chan struct{})
	return s.docs.Write(context.WithoutCancel(ctx), changes...)
}

// Events returns the events after a sequence number, of all workloads if name is "", and a channel that is closed at the next one.
func (s *Store) Events(name string, after int64) ([]*capsulev1.WorkloadEvent, <-chan struct{}) {
	e := &s.events
	e.mu.Lock()
	defer e.mu.Unlock()
	var found []*capsulev1.WorkloadEvent
	for _, x := range e.all {
		if x.GetSequence() > after && (name == "" || x.GetWorkload() == name) {
			found = append(found, x)
		}
	}
	return found, e.changed
}
