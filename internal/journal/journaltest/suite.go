// Package journaltest has a test suite for the contract of journal.Journal, and a decorator that injects faults.
//
// It is only for tests and depends on no implementation.
package journaltest

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"sync"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// Opener opens the journal in dir; a second call after Close finds the data of the first. history is the minimum number
// of events to keep; more are allowed.
type Opener func(t *testing.T, dir string, history int) journal.Journal

// Run checks that the journal that open returns fulfils the contract.
func Run(t *testing.T, open Opener) {
	for name, test := range map[string]func(*testing.T, Opener){
		"life of a record":     lifeOfARecord,
		"refusals":             refusals,
		"survives close":       survivesClose,
		"events":               events,
		"history is bounded":   historyIsBounded,
		"changed":              changed,
		"concurrent writers":   concurrentWriters,
		"canceled callers":     canceledCallers,
		"update keeps intents": updateKeepsIntents,
		"sync":                 syncs,
	} {
		t.Run(name, func(t *testing.T) { test(t, open) })
	}
}

// Record returns a record with every kind of field set.
func Record(name string) vm.Record {
	code := 7
	return vm.Record{
		ID:    vm.NewID(),
		Spec:  vm.Spec{Name: name, Image: "demo", Labels: map[string]string{"a": "b"}, Process: vm.Process{Env: []vm.EnvVar{{Name: "S", Value: "x\x00ü"}}}},
		State: vm.StateCreating, Driver: "fake", ImageType: vm.ImageOCI, ImageDigest: "sha256:1",
		Disks:  []vm.Disk{{Path: "/d/cow", Format: vm.DiskRaw, Serial: "cow", Backing: &vm.Disk{Path: "/d/base"}}},
		NICs:   []vm.NIC{{Network: "n", Tap: "t0", IP: "10.0.0.2", DNS: []string{"1.1.1.1"}}},
		Handle: []byte{0, 1, 2}, PID: 42, ExitCode: &code, CreatedAt: time.Unix(1, 2).UTC(),
	}
}

func intent(r vm.Record, op, step string) journal.Intent {
	return journal.Intent{ID: r.ID, Op: op, Step: step, Args: json.RawMessage(`{"grace":1}`), Began: time.Unix(5, 6)}
}

// must returns a function that fails the test if a change returns an error.
func must(t *testing.T) func(vm.Record, error) vm.Record {
	return func(r vm.Record, err error) vm.Record {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
}

func wantClass(t *testing.T, what string, err error, want errdefs.Class) {
	t.Helper()
	if !errdefs.Is(err, want) {
		t.Errorf("%s: got %v (%v), want %v", what, err, errdefs.ClassOf(err), want)
	}
}

func load(t *testing.T, j journal.Journal) ([]vm.Record, []journal.Intent) {
	t.Helper()
	records, intents, err := j.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return records, intents
}

func opened(t *testing.T, open Opener, history int) journal.Journal {
	t.Helper()
	j := open(t, t.TempDir(), history)
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return j
}

func lifeOfARecord(t *testing.T, open Opener) {
	j, ctx := opened(t, open, 100), t.Context()
	_, err := j.Begin(ctx, intent(Record("a"), "create", "disks"), Record("a"))
	wantClass(t, "intent of another vm", err, errdefs.InvalidArgument)

	r := must(t)(begin(ctx, j, Record("a"), "create", "disks"))
	if r.Revision != 1 || j.Revision() != 1 {
		t.Errorf("revision %d, journal %d, want 1", r.Revision, j.Revision())
	}
	_, intents := load(t, j)
	if len(intents) != 1 || !reflect.DeepEqual(intents[0], intent(r, "create", "disks")) {
		t.Errorf("intents %+v", intents)
	}
	r.PID = 43
	r = must(t)(j.Step(ctx, r.ID, "network", r))
	if _, intents = load(t, j); intents[0].Step != "network" || intents[0].Op != "create" {
		t.Errorf("intent after step: %+v", intents[0])
	}
	r.State = vm.StateRunning
	r = must(t)(j.Settle(ctx, r))
	records, intents := load(t, j)
	if len(intents) != 0 || len(records) != 1 || !reflect.DeepEqual(records[0], r) {
		t.Errorf("after settle: %+v\n%+v\nwant %+v", intents, records, r)
	}
	r = must(t)(j.Settle(ctx, r)) // a second settle only stores
	must(t)(begin(ctx, j, r, "remove", "kill"))
	for range 2 { // forgetting a removed record is no error and no event
		if err := j.Forget(ctx, r.ID); err != nil {
			t.Fatal(err)
		}
	}
	if records, intents = load(t, j); len(records)+len(intents) != 0 || j.Revision() != 6 {
		t.Errorf("after forget: %+v %+v, revision %d", records, intents, j.Revision())
	}
}

func begin(ctx context.Context, j journal.Journal, r vm.Record, op, step string) (vm.Record, error) {
	return j.Begin(ctx, intent(r, op, step), r)
}

func refusals(t *testing.T, open Opener) {
	j, ctx := opened(t, open, 100), t.Context()
	a := must(t)(begin(ctx, j, Record("a"), "create", "x"))
	_, err := begin(ctx, j, Record("a"), "create", "x")
	wantClass(t, "same name", err, errdefs.AlreadyExists)
	other := Record("a")
	other.Owner = vm.Owner{Namespace: "prod"}
	must(t)(begin(ctx, j, other, "create", "x")) // names are unique per owner
	if err := j.Forget(ctx, other.ID); err != nil {
		t.Fatal(err)
	}
	_, err = begin(ctx, j, a, "remove", "x")
	wantClass(t, "second intent", err, errdefs.Conflict)
	must(t)(j.Settle(ctx, a))
	_, err = j.Step(ctx, a.ID, "x", a)
	wantClass(t, "step without intent", err, errdefs.FailedPrecondition)
	ghost := Record("ghost")
	_, err = j.Step(ctx, ghost.ID, "x", ghost)
	wantClass(t, "step of a ghost", err, errdefs.NotFound)
	_, err = j.Settle(ctx, ghost)
	wantClass(t, "settle a ghost", err, errdefs.NotFound)
	_, err = j.Update(ctx, ghost)
	wantClass(t, "update a ghost", err, errdefs.NotFound)
	if j.Revision() != 4 {
		t.Errorf("refusals moved the revision to %d", j.Revision())
	}
	if err := j.Forget(ctx, a.ID); err != nil {
		t.Fatal(err)
	}
	must(t)(begin(ctx, j, Record("a"), "create", "x")) // the name is free again
}

func survivesClose(t *testing.T, open Opener) {
	dir, ctx := t.TempDir(), t.Context()
	j := open(t, dir, 100)
	a := must(t)(begin(ctx, j, Record("a"), "create", "x"))
	b := must(t)(begin(ctx, j, Record("b"), "create", "y"))
	a = must(t)(j.Settle(ctx, a))
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = open(t, dir, 100)
	defer j.Close()
	records, intents := load(t, j)
	if len(records) != 2 || len(intents) != 1 || intents[0].ID != b.ID || intents[0].Step != "y" {
		t.Fatalf("loaded %+v, %+v", records, intents)
	}
	if j.Revision() != 3 {
		t.Errorf("revision %d, want 3", j.Revision())
	}
	evs, err := j.Events(ctx, 1, 0)
	if err != nil || len(evs) != 2 || evs[1].Revision != a.Revision {
		t.Errorf("events %+v, %v", evs, err)
	}
	if r := must(t)(j.Settle(ctx, b)); r.Revision != 4 {
		t.Errorf("revision goes on at %d, want 4", r.Revision)
	}
}

func events(t *testing.T, open Opener) {
	j, ctx := opened(t, open, 100), t.Context()
	a := must(t)(begin(ctx, j, Record("a"), "create", "x"))
	a.State = vm.StateCreated
	a = must(t)(j.Settle(ctx, a))
	if err := j.Forget(ctx, a.ID); err != nil {
		t.Fatal(err)
	}
	evs, err := j.Events(ctx, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range evs {
		got = append(got, fmt.Sprintf("%d %s %s", e.Revision, e.Type, e.Record.State))
	}
	if want := []string{"1 ADDED creating", "2 MODIFIED created", "3 DELETED created"}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if evs, err = j.Events(ctx, 1, 1); err != nil || len(evs) != 1 || evs[0].Revision != 2 {
		t.Errorf("limit: %+v, %v", evs, err)
	}
	if evs, err = j.Events(ctx, 3, 0); err != nil || len(evs) != 0 {
		t.Errorf("nothing new: %+v, %v", evs, err)
	}
	_, err = j.Events(ctx, 4, 0)
	wantClass(t, "a revision that never was", err, errdefs.FailedPrecondition)
}

func historyIsBounded(t *testing.T, open Opener) {
	dir, ctx := t.TempDir(), t.Context()
	j := open(t, dir, 10)
	a := must(t)(begin(ctx, j, Record("a"), "create", "x"))
	for range 500 {
		a = must(t)(j.Update(ctx, a))
	}
	check := func() {
		t.Helper()
		_, err := j.Events(ctx, 5, 0)
		wantClass(t, "older than the history", err, errdefs.FailedPrecondition)
		evs, err := j.Events(ctx, j.Revision()-10, 0)
		if err != nil || len(evs) != 10 {
			t.Errorf("the last ten: %d, %v", len(evs), err)
		}
	}
	check()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = open(t, dir, 10)
	defer j.Close()
	check()
}

func changed(t *testing.T, open Opener) {
	j, ctx := opened(t, open, 100), t.Context()
	ch := j.Changed()
	select {
	case <-ch:
		t.Fatal("closed without a change")
	default:
	}
	must(t)(begin(ctx, j, Record("a"), "create", "x"))
	<-ch
	ch = j.Changed()
	if _, err := begin(ctx, j, Record("a"), "create", "x"); err == nil {
		t.Fatal("a refusal was expected")
	}
	select {
	case <-ch:
		t.Error("a refusal counts as a change")
	default:
	}
}

func concurrentWriters(t *testing.T, open Opener) {
	j, ctx := opened(t, open, 10_000), t.Context()
	const vms, rounds = 16, 8
	var wg sync.WaitGroup
	for i := range vms {
		wg.Go(func() {
			for range rounds {
				r, err := begin(ctx, j, Record(fmt.Sprint("vm", i)), "create", "x")
				if err == nil {
					r, err = j.Step(ctx, r.ID, "y", r)
				}
				if err == nil {
					_, err = j.Settle(ctx, r)
				}
				if err == nil {
					err = j.Forget(ctx, r.ID)
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	evs, err := j.Events(ctx, 0, 0)
	if err != nil || len(evs) != vms*rounds*4 {
		t.Fatalf("%d events, %v; want %d", len(evs), err, vms*rounds*4)
	}
	for i, e := range evs {
		if e.Revision != int64(i+1) {
			t.Fatalf("event %d has revision %d", i, e.Revision)
		}
	}
}

func canceledCallers(t *testing.T, open Opener) {
	j := opened(t, open, 100)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := begin(ctx, j, Record("a"), "create", "x")
	wantClass(t, "canceled", err, errdefs.Canceled)
	if records, _ := load(t, j); len(records) != 0 {
		t.Errorf("it was written all the same: %+v", records)
	}
}

func updateKeepsIntents(t *testing.T, open Opener) {
	j, ctx := opened(t, open, 100), t.Context()
	a := must(t)(begin(ctx, j, Record("a"), "stop", "shutdown"))
	must(t)(j.Update(ctx, a))
	if _, intents := load(t, j); len(intents) != 1 || intents[0].Step != "shutdown" {
		t.Errorf("intents %+v", intents)
	}
}

// syncs checks that Sync waits for earlier changes, also while others make more changes and when there is nothing to
// wait for.
func syncs(t *testing.T, open Opener) {
	j := open(t, t.TempDir(), 100)
	defer j.Close()
	for range 2 {
		if err := j.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			r := Record(fmt.Sprint("vm", i))
			_, err := j.Begin(t.Context(), intent(r, "create", "disks"), r)
			if err == nil {
				err = j.Sync(t.Context())
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantClass(t, "a canceled caller", j.Sync(ctx), errdefs.Canceled)
}
