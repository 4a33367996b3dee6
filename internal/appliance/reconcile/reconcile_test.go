package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/desired"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/journal/journaltest"
)

// fake is a driver whose instances exist in memory only, so that the time of a test is not the world's.
type fake struct {
	mu       sync.Mutex
	all      map[string]Instance
	made     int
	log      []string
	prepare  func(ctx context.Context, w *capsulev1.Workload) error
	startErr error
	exec     func(command []string) (int, error)
	changed  func(string)
}

func newFake() *fake {
	return &fake{all: map[string]Instance{}, prepare: func(context.Context, *capsulev1.Workload) error { return nil }}
}

func (f *fake) say(format string, args ...any) { f.log = append(f.log, fmt.Sprintf(format, args...)) }

func (f *fake) Check(context.Context, *capsulev1.Workload) error { return nil }

func (f *fake) Prepare(ctx context.Context, w *capsulev1.Workload) error { return f.prepare(ctx, w) }

func (f *fake) Start(_ context.Context, w *capsulev1.Workload, hash string) (Instance, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.startErr != nil {
		f.say("fail %s", w.GetName())
		return Instance{}, f.startErr
	}
	if _, ok := f.all[w.GetName()]; ok {
		panic("there are two instances of " + w.GetName())
	}
	f.made++
	i := Instance{Name: w.GetName(), ID: fmt.Sprint(f.made), Hash: hash, State: Running, StartedAt: time.Now()}
	f.all[i.Name] = i
	f.say("start %s", i.Name)
	return i, nil
}

// end ends an instance by itself.
func (f *fake) end(name string, code int32) {
	f.mu.Lock()
	i := f.all[name]
	i.State, i.ExitCode, i.EndedAt = Ended, &code, time.Now()
	f.all[name] = i
	changed := f.changed
	f.mu.Unlock()
	if changed != nil {
		changed(name)
	}
}

func (f *fake) Stop(_ context.Context, i Instance, _ time.Duration) error {
	f.mu.Lock()
	f.say("stop %s", i.Name)
	f.mu.Unlock()
	f.end(i.Name, 0)
	return nil
}

func (f *fake) Remove(_ context.Context, i Instance) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.say("remove %s", i.Name)
	delete(f.all, i.Name)
	return nil
}

func (f *fake) Forget(context.Context, string) error { return nil }

func (f *fake) Get(_ context.Context, name string) (Instance, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	i, ok := f.all[name]
	if !ok {
		return i, errdefs.NotFoundf("none")
	}
	return i, nil
}

func (f *fake) List(context.Context) ([]Instance, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []Instance
	for _, i := range f.all {
		all = append(all, i)
	}
	return all, nil
}

func (f *fake) Watch(ctx context.Context, changed func(string)) error {
	f.mu.Lock()
	f.changed = changed
	f.mu.Unlock()
	<-ctx.Done()
	return nil
}

func (f *fake) Exec(_ context.Context, _ string, e guest.Exec, _ guest.Streams) (int, error) {
	return f.exec(e.Command)
}

func (f *fake) Logs(context.Context, string, LogOptions, func([]byte) error) error { return nil }

// did returns what was done since the last call.
func (f *fake) did() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := strings.Join(f.log, ", ")
	f.log = nil
	return all
}

// rig is a machine with a fake driver.
type rig struct {
	t    *testing.T
	f    *fake
	docs *journaltest.Documents
	s    *desired.Store
	boot string
	r    *Reconciler
	stop func()
}

func newRig(t *testing.T) *rig {
	r := &rig{t: t, f: newFake(), docs: journaltest.NewDocuments(), boot: "boot-1"}
	r.start()
	t.Cleanup(func() { r.stop() })
	return r
}

// start starts the daemon, as after a crash.
func (r *rig) start() {
	r.t.Helper()
	var err error
	if r.s, err = desired.Open(r.t.Context(), r.docs, time.Now, slog.New(slog.DiscardHandler)); err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	r.r = New(Config{
		Desired: r.s, Boot: r.boot, Now: time.Now, Log: slog.New(slog.DiscardHandler),
		Drivers: map[capsulev1.WorkloadKind]Driver{capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER: r.f},
	})
	go func() {
		defer close(ended)
		_ = r.r.Run(ctx)
	}()
	r.stop = sync.OnceFunc(func() { cancel(); <-ended })
	synctest.Wait()
}

func (r *rig) apply(w *capsulev1.Workload) {
	r.t.Helper()
	w.Kind = capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER
	if w.Container == nil {
		w.Container = &capsulev1.ContainerSpec{Image: "demo"}
	}
	if _, err := r.s.Apply(r.t.Context(), w, false, func([]workload.Row) error { return nil }); err != nil {
		r.t.Fatal(err)
	}
	synctest.Wait()
}

func (r *rig) want(state capsulev1.DesiredState, anew bool) {
	r.t.Helper()
	if _, err := r.s.Want(r.t.Context(), "web", state, anew); err != nil {
		r.t.Fatal(err)
	}
	synctest.Wait()
}

// is compares what was done, and the status of web.
func (r *rig) is(did, phase, reason string) {
	r.t.Helper()
	synctest.Wait()
	if got := r.f.did(); got != did {
		r.t.Errorf("did %q, want %q", got, did)
	}
	row, err := r.s.Get("web")
	if err != nil {
		if phase != "" {
			r.t.Error(err)
		}
		return
	}
	st := row.Status()
	if got := strings.TrimPrefix(st.GetPhase().String(), "WORKLOAD_PHASE_"); got != phase || st.GetReason() != reason {
		r.t.Errorf("status %s, %s (%s), want %s, %s", got, st.GetReason(), st.GetMessage(), phase, reason)
	}
}

func (r *rig) sleep(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // of the clock of synctest
	synctest.Wait()
}

func bubble(t *testing.T, test func(r *rig)) {
	synctest.Test(t, func(t *testing.T) { test(newRig(t)) })
}

func TestLife(t *testing.T) {
	bubble(t, func(r *rig) {
		w := &capsulev1.Workload{Name: "web"}
		r.apply(w)
		r.is("start web", "RUNNING", "Running")
		r.sleep(time.Minute)
		r.is("", "RUNNING", "Running")
		w.Container.Image = "other"
		r.apply(w)
		r.is("stop web, remove web, start web", "RUNNING", "Running")
		w.RestartPolicy = capsulev1.RestartPolicy_RESTART_POLICY_NEVER // no reason to make it anew
		r.apply(w)
		r.is("", "RUNNING", "Running")
		r.want(capsulev1.DesiredState_DESIRED_STATE_STOPPED, false)
		r.is("stop web, remove web", "STOPPED", "Stopped")
		r.stop()
		r.start()
		r.is("", "STOPPED", "Stopped")
		r.want(capsulev1.DesiredState_DESIRED_STATE_RUNNING, false)
		r.is("start web", "RUNNING", "Running")
		r.want(capsulev1.DesiredState_DESIRED_STATE_RUNNING, true)
		r.is("stop web, remove web, start web", "RUNNING", "Running")
		if row, _ := r.s.Get("web"); row.Status().GetRestartCount() != 0 {
			t.Errorf("%d restarts", row.Status().GetRestartCount())
		}
		r.want(capsulev1.DesiredState_DESIRED_STATE_DELETING, false)
		r.is("stop web, remove web", "", "")
		if _, err := r.s.Get("web"); !errdefs.IsNotFound(err) {
			t.Errorf("the row is still there: %v", err)
		}
		r.apply(&capsulev1.Workload{Name: "web"})
		r.is("start web", "RUNNING", "Running")
	})
}

// A workload that ends starts again as its policy says, each time later, and soon again after a long run.
func TestRestarts(t *testing.T) {
	bubble(t, func(r *rig) {
		r.apply(&capsulev1.Workload{Name: "web"})
		r.is("start web", "RUNNING", "Running")
		for n, delay := range []time.Duration{1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300} {
			r.f.end("web", 3)
			r.is("remove web", "FAILED", "Error")
			r.sleep(delay*time.Second - time.Millisecond)
			r.is("", "FAILED", "Error")
			r.sleep(time.Millisecond)
			r.is("start web", "RUNNING", "Running")
			row, _ := r.s.Get("web")
			if st := row.Status(); st.GetExitCode() != 3 || st.GetRestartCount() != uint32(n+1) {
				t.Errorf("after %d ends: %v", n+1, st)
			}
		}
		r.sleep(longRun)
		r.f.end("web", 0)
		r.is("remove web", "FAILED", "Completed")
		r.sleep(time.Second)
		r.is("start web", "RUNNING", "Running")
	})
	for policy, restarts := range map[capsulev1.RestartPolicy][2]bool{ // after code 0, after code 1
		capsulev1.RestartPolicy_RESTART_POLICY_ALWAYS:     {true, true},
		capsulev1.RestartPolicy_RESTART_POLICY_ON_FAILURE: {false, true},
		capsulev1.RestartPolicy_RESTART_POLICY_NEVER:      {false, false},
	} {
		for code, again := range restarts {
			bubble(t, func(r *rig) {
				r.apply(&capsulev1.Workload{Name: "web", RestartPolicy: policy})
				r.f.did()
				r.f.end("web", int32(code))
				r.sleep(time.Hour)
				if got := r.f.did(); got != "remove web" && !again || got != "remove web, start web" && again {
					t.Errorf("%v after code %d: %s", policy, code, got)
				}
				if again {
					return
				}
				phase := [2]string{"STOPPED", "FAILED"}[code]
				reason := [2]string{"Completed", "Error"}[code]
				r.is("", phase, reason)
				r.stop()
				r.start()
				r.is("", phase, reason)
				r.want(capsulev1.DesiredState_DESIRED_STATE_RUNNING, true)
				r.is("start web", "RUNNING", "Running")
			})
		}
	}
}

// What cannot start is tried again, each time later, and at once when it shall be something else.
func TestStartFails(t *testing.T) {
	bubble(t, func(r *rig) {
		r.f.startErr = errors.New("no room")
		w := &capsulev1.Workload{Name: "web"}
		r.apply(w)
		r.is("fail web", "FAILED", "StartFailed")
		r.sleep(7 * time.Second)
		r.is("fail web, fail web, fail web", "FAILED", "StartFailed")
		r.f.startErr = nil
		w.StopGraceSeconds = 7
		r.apply(w)
		r.is("start web", "RUNNING", "Running")
	})
}

// A long pull is given up when the workload shall be something else.
func TestPullIsInterrupted(t *testing.T) {
	bubble(t, func(r *rig) {
		r.f.prepare = func(ctx context.Context, w *capsulev1.Workload) error {
			if w.GetContainer().GetImage() == "demo" {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		}
		w := &capsulev1.Workload{Name: "web", Container: &capsulev1.ContainerSpec{Image: "slow"}}
		r.apply(w)
		r.is("", "PENDING", "Pulling")
		w.Container.Image = "slower"
		r.apply(w)
		r.is("", "PENDING", "Pulling")
		w.Container.Image = "demo"
		r.apply(w)
		r.is("start web", "RUNNING", "Running")
		w.Container.Image = "slow"
		r.apply(w)
		r.is("stop web, remove web", "PENDING", "Pulling")
		r.want(capsulev1.DesiredState_DESIRED_STATE_DELETING, false)
		r.is("", "", "")
	})
}

func TestDependsOn(t *testing.T) {
	bubble(t, func(r *rig) {
		r.apply(&capsulev1.Workload{Name: "web", DependsOn: []string{"db", "job"}})
		r.is("", "PENDING", "Waiting")
		r.apply(&capsulev1.Workload{Name: "db"})
		r.sleep(Tick)
		r.is("start db", "PENDING", "Waiting")
		r.apply(&capsulev1.Workload{Name: "job", RestartPolicy: capsulev1.RestartPolicy_RESTART_POLICY_NEVER})
		r.f.end("job", 0) // before web has looked
		r.sleep(Tick)
		r.is("start job, remove job, start web", "RUNNING", "Running")
	})
}

func TestProbes(t *testing.T) {
	exec := func(what string) *capsulev1.Probe {
		return &capsulev1.Probe{Action: &capsulev1.Probe_Exec{Exec: &capsulev1.ProbeExec{Command: []string{what}}}, PeriodSeconds: 1, FailureThreshold: 2}
	}
	bubble(t, func(r *rig) {
		var mu sync.Mutex
		codes := map[string]int{"startup": 1, "live": 1, "ready": 1}
		set := func(what string, code int) {
			mu.Lock()
			defer mu.Unlock()
			codes[what] = code
		}
		r.f.exec = func(command []string) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return codes[command[0]], nil
		}
		ready := func() bool {
			synctest.Wait()
			row, _ := r.s.Get("web")
			return row.Status().GetReady()
		}
		startup := exec("startup")
		startup.FailureThreshold = 30
		r.apply(&capsulev1.Workload{Name: "web", StartupProbe: startup, LivenessProbe: exec("live"), ReadinessProbe: exec("ready"), RestartPolicy: capsulev1.RestartPolicy_RESTART_POLICY_ON_FAILURE})
		r.sleep(10 * time.Second)
		r.is("start web", "RUNNING", "Running") // the liveness probe does not count yet
		set("live", 0)
		set("startup", 0)
		r.sleep(3 * time.Second)
		if ready() {
			t.Error("ready, although its probe fails")
		}
		set("ready", 0)
		r.sleep(2 * time.Second)
		if !ready() {
			t.Error("not ready, although its probe succeeds")
		}
		set("ready", 1)
		r.sleep(3 * time.Second)
		if ready() {
			t.Error("still ready, although its probe fails")
		}
		set("live", 1)
		r.sleep(2 * time.Second)
		set("live", 0)
		r.sleep(2 * time.Second)
		// It ended with code 0 when it was told to; it starts again all the same, because it was unwell.
		r.is("stop web, remove web, start web", "RUNNING", "Running")
	})
}

// An instance of a workload that nobody knows is left alone.
func TestStrayIsLeftAlone(t *testing.T) {
	bubble(t, func(r *rig) {
		r.f.all["old"] = Instance{Name: "old", ID: "o", State: Running}
		r.apply(&capsulev1.Workload{Name: "web"})
		r.sleep(time.Minute)
		r.is("start web", "RUNNING", "Running")
		if _, ok := r.f.all["old"]; !ok {
			t.Error("it is gone")
		}
	})
}
