package engine_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// failing is an engine of whose calls those fail that fail names.
func failing(t *testing.T, opts ...func(*rig)) (r *rig, fail func(calls ...string)) {
	var names atomic.Pointer[[]string]
	names.Store(&[]string{})
	r = newRig(t, append(opts, func(r *rig) {
		r.world.Fault = func(call string) error {
			if slices.Contains(*names.Load(), call) {
				return errdefs.Unavailablef("no answer")
			}
			return nil
		}
	})...)
	return r, func(calls ...string) { names.Store(&calls) }
}

func paused(ctx context.Context, r *rig) error { _, err := r.Pause(ctx, "web"); return err }

func unpaused(ctx context.Context, r *rig) error { _, err := r.Unpause(ctx, "web"); return err }

// reboots resets the guest and asks it to reboot, in turns.
func reboots(ctx context.Context, r *rig, times int) error {
	for i := range times {
		if _, err := r.Reboot(ctx, "web", i%2 == 0); err != nil {
			return err
		}
	}
	return nil
}

// pauseScripts are kills while a VM is paused or unpaused. Whatever the record says afterwards is true of the guest.
func pauseScripts() map[string]script {
	each := func(f func(context.Context, *rig) error) func(context.Context, *rig) error {
		return func(ctx context.Context, r *rig) error {
			for range abreast { // each has few points
				if err := f(ctx, r); err != nil {
					return err
				}
			}
			return nil
		}
	}
	running := []vm.State{vm.StateRunning}
	pauses := func(ctx context.Context, r *rig) error { return errors.Join(paused(ctx, r), unpaused(ctx, r)) }
	unpauses := func(ctx context.Context, r *rig) error { return errors.Join(unpaused(ctx, r), paused(ctx, r)) }
	return map[string]script{
		"pause": {before: launched, after: running, act: each(pauses), only: pauses},
		"unpause": {
			before: func(ctx context.Context, r *rig) error { return errors.Join(launched(ctx, r), paused(ctx, r)) }, after: running,
			act: each(unpauses), only: unpauses,
		},
		"launch paused": {
			act: func(ctx context.Context, r *rig) error {
				s := withVolumes()
				s.Paused = true
				if _, err := r.Launch(ctx, s); err != nil {
					return err
				}
				if err := unpaused(ctx, r); err != nil {
					return err
				}
				return until(ctx, r, ready)
			},
			after: []vm.State{"", vm.StateRunning},
		},
		"reboot": {
			before: func(ctx context.Context, r *rig) error {
				if _, err := r.Launch(ctx, cloud()); err != nil {
					return err
				}
				return until(ctx, r, ready)
			},
			act:   func(ctx context.Context, r *rig) error { return reboots(ctx, r, abreast) }, // each has few points
			only:  func(ctx context.Context, r *rig) error { return reboots(ctx, r, 2) },
			after: []vm.State{vm.StateRunning, vm.StateStopped}, disk: []string{""}, // one that shuts down is not started again by another cocoond
		},
		"stop paused": {
			before: func(ctx context.Context, r *rig) error { return errors.Join(launched(ctx, r), paused(ctx, r)) },
			act:    func(ctx context.Context, r *rig) error { _, err := r.Stop(ctx, "web", -1); return err },
			after:  []vm.State{vm.StateRunning, vm.StateStopped},
		},
	}
}

func (r *rig) isPaused(want bool) {
	r.t.Helper()
	rec := r.must(r.Inspect(r.t.Context(), "web"))
	state, err := r.world.Guest(rec.ID).State(r.t.Context())
	if err != nil || (state == hypervisor.Paused) != want || (rec.Paused != "") != want || rec.State != vm.StateRunning {
		r.t.Errorf("the guest is %s (%v) and the record says %s, paused %q; want paused: %v", state, err, rec.State, rec.Paused, want)
	}
}

func TestPause(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	_, err := r.Pause(ctx, "web")
	wantClass(t, "pause of no VM", err, errdefs.NotFound)
	r.must(r.Create(ctx, spec("web")))
	for _, op := range []func(context.Context, string) (vm.Record, error){r.Pause, r.Unpause} {
		_, err := op(ctx, "web")
		wantClass(t, "of a VM that never ran", err, errdefs.FailedPrecondition)
	}
	r.must(r.Start(ctx, "web"))
	was := r.await("web", "ready", ready)
	for range 2 {
		if rec := r.must(r.Pause(ctx, "web")); rec.Paused != vm.PausedOnRequest || !rec.AgentReady {
			t.Errorf("paused: %+v", rec)
		}
		r.isPaused(true)
	}

	// Nothing goes into a paused guest, and nothing saves it.
	var out bytes.Buffer
	_, execErr := r.Exec(ctx, "web", guest.Exec{Command: []string{"echo", "x"}}, guest.Streams{Stdout: &out})
	_, statsErr := r.Stats(ctx, "web")
	_, hibernateErr := r.Hibernate(ctx, "web", "")
	_, saveErr := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	for what, err := range map[string]error{"exec": execErr, "stats": statsErr, "hibernate": hibernateErr, "save": saveErr} {
		wantClass(t, what, err, errdefs.FailedPrecondition)
		if err == nil || !strings.Contains(err.Error(), "it is paused; unpause it first") {
			t.Errorf("%s: %v", what, err)
		}
	}
	r.isPaused(true)

	r.restart() // cocoond starts again
	r.isPaused(true)
	for range 2 {
		if rec := r.must(r.Unpause(ctx, "web")); rec.Paused != "" || rec.PID != was.PID || rec.Restarts != was.Restarts {
			t.Errorf("unpaused: %+v", rec)
		}
		r.isPaused(false)
	}
	r.await("web", "ready", ready)
	if code, err := r.Exec(ctx, "web", guest.Exec{Command: []string{"echo", "again"}}, guest.Streams{Stdout: &out}); code != 0 || err != nil || out.String() != "again\n" {
		t.Errorf("exec after it: %d, %v, %q", code, err, out.String())
	}
	r.eventually("the clock is set after the pause", func() bool { return r.world.Guest(was.ID).ClockSets() > 0 })
}

// TestPauseFails: a guest that cannot be paused runs, and one that cannot be resumed is paused, and the record says so.
func TestPauseFails(t *testing.T) {
	r, fail := failing(t)
	ctx := t.Context()
	r.must(r.Launch(ctx, spec("web")))
	r.await("web", "ready", ready)
	fail("driver.Pause done")
	_, err := r.Pause(ctx, "web")
	wantClass(t, "pause", err, errdefs.Unavailable)
	r.isPaused(false)
	fail()
	r.must(r.Pause(ctx, "web"))
	fail("driver.Resume")
	_, err = r.Unpause(ctx, "web")
	wantClass(t, "unpause", err, errdefs.Unavailable)
	r.isPaused(true)
	fail()
	r.must(r.Unpause(ctx, "web"))
	r.isPaused(false)
}

// silentProgram is a hypervisor that does not answer for one VM.
type silentProgram struct {
	of    atomic.Pointer[vm.ID] // nil: it answers
	asked atomic.Int32          // how often it has not answered
	how   func(context.Context) error
}

// waits is how a request ends that the hypervisor has accepted, and queued how one ends for which there is no room in its queue.
func waits(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

func queued(context.Context) error {
	return errdefs.Unavailablef("connect to api.sock: resource temporarily unavailable")
}

// newMuted is an engine of whose calls those fail that fail names, with a hypervisor that can be mute.
func newMuted(t *testing.T, how func(context.Context) error, opts ...func(*rig)) (r *rig, m *silentProgram, fail func(calls ...string)) {
	m = &silentProgram{how: how}
	r, fail = failing(t, append(opts, func(r *rig) {
		r.cfg.AnswerTimeout = 50 * time.Millisecond
		r.world.Mute = func(ctx context.Context, id vm.ID) error {
			if of := m.of.Load(); of == nil || *of != id {
				return nil
			}
			m.asked.Add(1)
			return m.how(ctx)
		}
	})...)
	return r, m, fail
}

// goesOn lets the hypervisor of id answer after it has not done so for a while. Then its guest runs.
func (m *silentProgram) goesOn(r *rig, id vm.ID) {
	r.t.Helper()
	was := m.asked.Load()
	r.eventually("attempts to let the guest go on", func() bool { return m.asked.Load() > was+1 })
	m.of.Store(nil)
	if err := r.world.Guest(id).Await(r.t.Context(), func(s enginetest.Self) bool { return !s.Paused }); err != nil {
		r.t.Errorf("its hypervisor answers again, and its guest is paused: %v", err)
	}
	r.isPaused(false)
}

// TestSilentHypervisor: a hypervisor that does not answer, which its guest can bring about, keeps no other VM waiting when cocoond starts again. Its guest, which an
// earlier save has left paused, goes on when it answers, and the VM can be killed before that.
func TestSilentHypervisor(t *testing.T) {
	for what, how := range map[string]func(context.Context) error{"accepted": waits, "queue full": queued} {
		t.Run(what, func(t *testing.T) {
			r, mute, _ := newMuted(t, how)
			ctx := t.Context()
			web, db := r.must(r.Launch(ctx, spec("web"))), r.must(r.Launch(ctx, spec("db")))
			if err := r.world.Guest(web.ID).Pause(ctx); err != nil {
				t.Fatal(err)
			}
			mute.of.Store(&web.ID)
			r.restart()
			if rec := r.must(r.Stop(ctx, "db", 0)); rec.State != vm.StateStopped {
				t.Errorf("another VM: %+v", rec)
			}
			if rec := r.must(r.Inspect(ctx, "web")); rec.State != vm.StateRunning || rec.PID != web.PID {
				t.Errorf("the VM: %+v", rec)
			}
			mute.goesOn(r, web.ID)

			db = r.must(r.Start(ctx, "db"))
			mute.of.Store(&db.ID)
			r.restart()
			if rec := r.must(r.Stop(ctx, "db", 0)); rec.State != vm.StateStopped {
				t.Errorf("killed: %+v", rec)
			}
		})
	}
}

// TestSilentAfter: a guest goes on when its hypervisor answers again, whichever operation has left it paused.
func TestSilentAfter(t *testing.T) {
	for what, op := range map[string]struct {
		fails string
		run   func(context.Context, *rig) error
	}{
		"save": {"driver.Save done", func(ctx context.Context, r *rig) error {
			_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
			return err
		}},
		"hibernate": {"driver.Save done", func(ctx context.Context, r *rig) error { _, err := r.Hibernate(ctx, "web", ""); return err }},
		"pause":     {"driver.Pause done", paused},
	} {
		t.Run(what, func(t *testing.T) {
			r, mute, fail := newMuted(t, queued)
			ctx := t.Context()
			r.world.Stuck = true
			web := r.must(r.Launch(ctx, spec("web")))
			r.await("web", "ready", ready)
			fail(op.fails, "driver.Resume")
			mute.of.Store(&web.ID)
			wantClass(t, what, op.run(ctx, r), errdefs.Unavailable)
			fail()
			mute.goesOn(r, web.ID)
		})
	}
}

// TestSilentRefuses: a guest whose hypervisor answers again and refuses counts as the record says: it is silent if it does not answer.
func TestSilentRefuses(t *testing.T) {
	var refuses atomic.Bool
	r, mute, _ := newMuted(t, func(ctx context.Context) error {
		if refuses.Load() {
			return errors.New("refused")
		}
		return waits(ctx)
	}, func(r *rig) { r.cfg.Silence = 100 * time.Millisecond })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	web := r.must(r.Launch(ctx, spec("web")))
	mute.of.Store(&web.ID)
	r.restart()
	r.await("web", "ready", ready)
	refuses.Store(true)
	r.world.Guest(web.ID).Quiet(true)
	_, err := r.Exec(ctx, "web", guest.Exec{Command: []string{"sleep"}}, guest.Streams{})
	wantSilent(t, "a command", err)
}

// TestSaveLeavesPaused: a save that fails when its driver no longer waits to let the guest go on leaves a guest that runs.
func TestSaveLeavesPaused(t *testing.T) {
	r, fail := failing(t)
	ctx := t.Context()
	r.world.Stuck = true
	r.must(r.Launch(ctx, spec("web")))
	r.await("web", "ready", ready)
	fail("driver.Save done")
	_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	wantClass(t, "save", err, errdefs.Unavailable)
	r.isPaused(false)
	_, err = r.Hibernate(ctx, "web", "")
	wantClass(t, "hibernate", err, errdefs.Unavailable)
	r.isPaused(false)
}

// TestStartPaused: the guest does not run before it is unpaused, over a restart of cocoond. If it is stopped before that, it is
// killed at once. A later boot is paused, too.
func TestStartPaused(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	s := spec("web")
	s.Paused = true
	if rec := r.must(r.Launch(ctx, s)); rec.Paused != vm.PausedAtStart {
		t.Errorf("launched: %+v", rec)
	}
	r.isPaused(true)
	r.restart()
	r.isPaused(true)
	began := time.Now()
	if rec := r.must(r.Stop(ctx, "web", time.Hour)); rec.State != vm.StateStopped || rec.Paused != "" || time.Since(began) > time.Minute {
		t.Errorf("stopped: %+v after %s", rec, time.Since(began))
	}
	r.must(r.Start(ctx, "web"))
	r.isPaused(true)
	r.must(r.Unpause(ctx, "web"))
	r.isPaused(false)
	r.await("web", "ready", ready)

	// A guest that has run can power off in order, although it is paused.
	r.must(r.Pause(ctx, "web"))
	if rec := r.must(r.Stop(ctx, "web", time.Hour)); rec.Reason != vm.ReasonExited && rec.Reason != vm.ReasonStopped {
		t.Errorf("stopped while it was paused: %+v", rec)
	}
	r.must(r.Start(ctx, "web"))
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Error(err)
	}
	r.clean()
}

// TestPausedIsNotSilent: a paused guest does not answer, and its session stays.
func TestPausedIsNotSilent(t *testing.T) {
	const silence = time.Second
	r := newRig(t, func(r *rig) { r.cfg = engine.Config{Silence: silence} })
	ctx := t.Context()
	r.must(r.Launch(ctx, spec("web")))
	was := r.await("web", "ready", ready)
	r.must(r.Pause(ctx, "web"))
	settle := time.NewTimer(3 * silence)
	defer settle.Stop()
	<-settle.C
	if rec := r.must(r.Inspect(ctx, "web")); !rec.AgentReady || rec.Reason != "" {
		t.Errorf("after a while in pause: %+v", rec)
	}
	r.must(r.Unpause(ctx, "web"))
	var out bytes.Buffer
	if _, err := r.Exec(ctx, "web", guest.Exec{Command: []string{"echo", "x"}}, guest.Streams{Stdout: &out}); err != nil {
		t.Error(err)
	}
	if rec := r.must(r.Inspect(ctx, "web")); rec.Restarts != was.Restarts || rec.PID != was.PID {
		t.Errorf("unpaused: %+v", rec)
	}
}

// TestPausedByDiskToo: a guest that its disk has paused is not resumed by free space while it is also paused on request.
func TestPausedByDiskToo(t *testing.T) {
	r, host, free := full(t)
	ctx := t.Context()
	web := r.must(r.Inspect(ctx, "web"))
	if err := host.Fault(web.ID, noSpace); err != nil {
		t.Fatal(err)
	}
	r.await("web", "stuck", because(vm.ReasonDiskFull))
	r.must(r.Pause(ctx, "web"))
	free.Store(1 << 30)
	settle := time.NewTimer(3 * time.Second) // it is retried each second
	defer settle.Stop()
	<-settle.C
	if p, err := host.Paused(web.ID); err != nil || !p {
		t.Errorf("there is room again, and the guest is paused: %v, %v", p, err)
	}
	r.must(r.Unpause(ctx, "web"))
	r.await("web", "going on", because(""))
	if p, err := host.Paused(web.ID); err != nil || p {
		t.Errorf("unpaused, and the guest is paused: %v, %v", p, err)
	}
}
