package engine_test

import (
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/vm"
)

// mute is an engine that cannot reach its guests' agents while the test says so.
func mute(t *testing.T, limit time.Duration) (*rig, *atomic.Bool) {
	t.Helper()
	var mute atomic.Bool
	r := newRig(t, func(r *rig) {
		r.cfg.AgentTimeout = limit
		r.world.Fault = func(name string) error {
			if name == "agent.Connect" && mute.Load() {
				return errdefs.Unavailablef("fault at %s", name)
			}
			return nil
		}
	})
	return r, &mute
}

// acts are the two operations that keep an earlier state which they may need again. Each begins with web hibernated.
func acts() map[string]func(r *rig) (vm.Record, error) {
	return map[string]func(r *rig) (vm.Record, error){
		"wake":    func(r *rig) (vm.Record, error) { return r.Wake(r.t.Context(), "web") },
		"restore": func(r *rig) (vm.Record, error) { return r.Restore(r.t.Context(), "web", "gold") },
	}
}

// asleep checks that web is as it was hibernated, and that it can resume from there.
func (r *rig) asleep(what string, slept vm.Record, disk string) {
	r.t.Helper()
	now := r.must(r.Inspect(r.t.Context(), "web"))
	if now.State != vm.StateHibernated || now.Snapshot != slept.Snapshot || now.Message == "" || now.AgentReady || now.PID != 0 {
		r.t.Fatalf("%s: it is %+v", what, now)
	}
	if _, err := r.world.Snapshots().Get(r.t.Context(), slept.Snapshot); err != nil {
		r.t.Fatalf("%s: its snapshot: %v", what, err)
	}
	for end := time.Now().Add(10 * time.Second); len(r.overlays(slept.ID)) != 1; <-time.After(time.Millisecond) { // from the save
		if time.Now().After(end) {
			r.t.Fatalf("%s: overlays %v", what, r.overlays(slept.ID))
		}
	}
	r.must(r.Wake(r.t.Context(), "web"))
	if got := r.disk(slept.ID); got != disk {
		r.t.Errorf("%s: its disk holds %q, want %q", what, got, disk)
	}
	if _, err := r.world.Snapshots().Get(r.t.Context(), slept.Snapshot); !errdefs.IsNotFound(err) {
		r.t.Errorf("%s: awake it has its snapshot: %v", what, err)
	}
}

// slept returns a VM that was saved as gold, has written, and is hibernated.
func (r *rig) slept() vm.Record {
	r.t.Helper()
	_, g := r.source()
	r.saved("gold")
	r.write(g, "two.")
	return r.must(r.Hibernate(r.t.Context(), "web", "night"))
}

// TestGuestThatNeverAnswers is ended within the agent timeout, and its hibernation snapshot still exists.
func TestGuestThatNeverAnswers(t *testing.T) {
	for name, act := range acts() {
		t.Run(name, func(t *testing.T) {
			r, mute := mute(t, time.Second)
			slept := r.slept()
			mute.Store(true)
			_, err := act(r)
			wantClass(t, name, err, errdefs.Unavailable)
			mute.Store(false)
			r.asleep(name, slept, "one.two.")
			r.clearAll("gold")
		})
	}
}

// TestGuestThatDiesBeforeItAnswers after it has written: only what it wrote is lost.
func TestGuestThatDiesBeforeItAnswers(t *testing.T) {
	for name, act := range acts() {
		t.Run(name, func(t *testing.T) {
			r, mute := mute(t, 20*time.Second)
			slept := r.slept()
			mute.Store(true)
			go func() {
				rec := r.await("web", "running", func(v vm.Record) bool { return v.State == vm.StateRunning })
				g := r.world.Guest(rec.ID)
				r.write(g, "never.")
				g.End(hypervisor.Exit{GuestReset: true})
			}()
			_, err := act(r)
			wantClass(t, name, err, errdefs.FailedPrecondition)
			mute.Store(false)
			r.asleep(name, slept, "one.two.")
			r.clearAll("gold")
		})
	}
}

// TestDaemonEndsBeforeTheGuestAnswers: the next daemon continues to wait.
func TestDaemonEndsBeforeTheGuestAnswers(t *testing.T) {
	for name, act := range acts() {
		for _, answers := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				r, mute := mute(t, 2*time.Second)
				slept := r.slept()
				mute.Store(true)
				done := make(chan error, 1)
				go func() { _, err := act(r); done <- err }()
				r.await("web", "running", func(v vm.Record) bool { return v.State == vm.StateRunning })
				r.stop()
				wantClass(t, name, <-done, errdefs.Unavailable)
				mute.Store(!answers)
				r.start()
				if _, err := r.world.Snapshots().Get(t.Context(), slept.Snapshot); err != nil && !answers {
					t.Errorf("its snapshot: %v", err)
				}
				if !answers {
					r.await("web", "asleep", func(v vm.Record) bool { return v.State == vm.StateHibernated })
					mute.Store(false)
					r.asleep(name, slept, "one.two.")
				} else {
					r.await("web", "ready", ready)
					want := map[string]string{"wake": "one.two.", "restore": "one."}[name]
					r.must(r.Start(t.Context(), "web")) // runs after the operation in progress
					if got := r.disk(slept.ID); got != want {
						t.Errorf("its disk holds %q, want %q", got, want)
					}
				}
				r.clearAll("gold")
			})
		}
	}
}

// TestGuestWithoutAgent counts as awake when it has run for a while, and as hibernated if it dies before.
func TestGuestWithoutAgent(t *testing.T) {
	r, host := realStore(t, func(r *rig) { r.cfg.ProvenAfter = 300 * time.Millisecond })
	web := r.must(r.Inspect(t.Context(), "web"))
	if err := host.Remember(web.ID, "one"); err != nil {
		t.Fatal(err)
	}
	slept := r.must(r.Hibernate(t.Context(), "web", ""))
	go func() {
		r.await("web", "running", func(v vm.Record) bool { return v.State == vm.StateRunning })
		_ = host.End(web.ID, fake.Crash)
	}()
	_, err := r.Wake(t.Context(), "web")
	wantClass(t, "wake", err, errdefs.FailedPrecondition)
	now := r.must(r.Inspect(t.Context(), "web"))
	if now.State != vm.StateHibernated || now.Snapshot != slept.Snapshot || now.Reason != vm.ReasonWakeFailed {
		t.Fatalf("it is %+v", now)
	}
	r.must(r.Wake(t.Context(), "web"))
	if got, _ := host.Memory(web.ID); got != "one" {
		t.Errorf("it remembers %q", got)
	}
	if _, err := r.snapshots.Get(t.Context(), slept.Snapshot); !errdefs.IsNotFound(err) {
		t.Errorf("awake it has its snapshot: %v", err)
	}
	r.clearAll()
}
