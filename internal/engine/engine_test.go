package engine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestLifeCycle(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec := r.must(r.Create(ctx, spec("web")))
	if rec.State != vm.StateCreated || len(rec.Disks) != 1 || len(rec.NICs) != 1 || rec.Process.Entrypoint[0] != "/init" {
		t.Errorf("created: %+v", rec)
	}
	rec = r.must(r.Start(ctx, "web"))
	if rec.State != vm.StateRunning || rec.PID == 0 || len(rec.Handle) == 0 || rec.StartedAt.IsZero() || rec.Restarts != 0 {
		t.Errorf("started: %+v", rec)
	}
	if again := r.must(r.Start(ctx, string(rec.ID))); again.PID != rec.PID {
		t.Error("a second start started it again")
	}
	rec = r.await("web", "ready", ready)
	id := r.world.Guest(rec.ID).Identity()
	if id.Hostname != "web" || id.NICs[0].Tap != "" || id.NICs[0].IP == "" || id.Hosts[0] != rec.NICs[0].IP+" web" {
		t.Errorf("the guest was told %+v", id)
	}
	wantClass(t, "remove while running", r.Remove(ctx, "web", false), errdefs.FailedPrecondition)
	rec = r.must(r.Stop(ctx, string(rec.ID[:5]), -1))
	if rec.State != vm.StateStopped || rec.Reason != vm.ReasonStopped || rec.ExitCode == nil || *rec.ExitCode != 143 || rec.PID != 0 || rec.Handle != nil || rec.AgentReady {
		t.Errorf("stopped: %+v", rec)
	}
	r.must(r.Stop(ctx, "web", -1))
	rec = r.must(r.Restart(ctx, "web", -1)) // a VM that does not run is started
	pid := rec.PID
	rec = r.must(r.Restart(ctx, "web", 0))
	if rec.PID == pid || rec.Restarts != 2 || rec.State != vm.StateRunning {
		t.Errorf("restarted: %+v", rec)
	}
	if !r.ImageInUse("sha256:demo") || r.ImageInUse("sha256:other") {
		t.Error("image use is wrong")
	}
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	if r.ImageInUse("sha256:demo") {
		t.Error("the image of a removed VM is in use")
	}
	_, err := r.Inspect(ctx, "web")
	wantClass(t, "inspect what is gone", err, errdefs.NotFound)
	r.clean()
}

func TestRefusalsChangeNothing(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	for name, tt := range map[string]struct {
		change func(*vm.Spec)
		want   errdefs.Class
	}{
		"unknown image":     {func(s *vm.Spec) { s.Image = "nope" }, errdefs.NotFound},
		"bad name":          {func(s *vm.Spec) { s.Name = "a/b" }, errdefs.InvalidArgument},
		"cpu 1000":          {func(s *vm.Spec) { s.CPUs = 1000 }, errdefs.InvalidArgument},
		"no program":        {func(s *vm.Spec) { s.Image = "bare" }, errdefs.InvalidArgument},
		"unknown driver":    {func(s *vm.Spec) { s.Driver = "bhyve" }, errdefs.InvalidArgument},
		"unknown network":   {func(s *vm.Spec) { s.NICs = []vm.NICSpec{{Network: "x"}} }, errdefs.InvalidArgument},
		"command of a disk": {func(s *vm.Spec) { s.Image, s.Process.Args = "disk", []string{"x"} }, errdefs.InvalidArgument},
	} {
		s := spec("web")
		tt.change(&s)
		_, err := r.Launch(ctx, s)
		wantClass(t, name, err, tt.want)
	}
	r.clean()
	r.must(r.Create(ctx, spec("web")))
	_, err := r.Launch(ctx, spec("web"))
	wantClass(t, "duplicate name", err, errdefs.AlreadyExists)
	for _, ref := range []string{"", "nope"} {
		_, err = r.Start(ctx, ref)
		if !errdefs.IsNotFound(err) && !errdefs.IsInvalid(err) {
			t.Errorf("start %q: %v", ref, err)
		}
	}
	if err := r.Remove(ctx, "web", false); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

func TestProcessExit(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec := r.must(r.Launch(ctx, spec("job")))
	r.await("job", "ready", ready)
	g := r.world.Guest(rec.ID)
	g.Print(3)
	g.Exit(7)
	rec = r.await("job", "stopped", stopped)
	if rec.Reason != vm.ReasonExited || rec.ExitCode == nil || *rec.ExitCode != 7 || !g.Acked() {
		t.Errorf("got %+v, acked %v", rec, g.Acked())
	}
	if got := logOf(t, r, "job", guest.LogOptions{Tail: -1}); got != "line 1\nline 2\nline 3\n" {
		t.Errorf("log %q", got)
	}
}

func TestEndings(t *testing.T) {
	r := newRig(t)
	for name, tt := range map[string]struct {
		image  string
		end    func(id vm.ID)
		reason string
	}{
		"crash":    {"demo", func(id vm.ID) { r.world.Guest(id).End(hypervisor.Exit{Signal: 11, Code: -1}) }, vm.ReasonCrashed},
		"poweroff": {"disk", func(id vm.ID) { r.world.Guest(id).End(hypervisor.Exit{GuestShutdown: true}) }, vm.ReasonPoweredOff},
		"acpi":     {"disk", func(id vm.ID) { r.must(r.Stop(t.Context(), string(id), time.Second)) }, vm.ReasonStopped},
		"at once":  {"disk", func(id vm.ID) { r.must(r.Stop(t.Context(), string(id), 0)) }, vm.ReasonKilled},
		"stubborn": {"disk", func(id vm.ID) {
			r.world.Guest(id).ACPI = false
			r.must(r.Stop(t.Context(), string(id), 10*time.Millisecond))
		}, vm.ReasonKilled},
		"stubborn agent": {"demo", func(id vm.ID) {
			r.await(string(id), "ready", ready)
			r.world.Guest(id).Stubborn = true
			r.must(r.Stop(t.Context(), string(id), 10*time.Millisecond))
		}, vm.ReasonKilled},
		"exit without poweroff": {"demo", func(id vm.ID) {
			r.await(string(id), "ready", ready)
			r.world.Guest(id).Stubborn = true
			r.world.Guest(id).Exit(0)
		}, vm.ReasonExited},
	} {
		t.Run(name, func(t *testing.T) {
			s := spec(strings.ReplaceAll(name, " ", "-"))
			s.Image = tt.image
			rec := r.must(r.Launch(t.Context(), s))
			tt.end(rec.ID)
			if rec = r.await(s.Name, "stopped", stopped); rec.Reason != tt.reason {
				t.Errorf("got %s (%s), want %s", rec.Reason, rec.Message, tt.reason)
			}
			if err := r.Remove(t.Context(), s.Name, false); err != nil {
				t.Error(err)
			}
		})
	}
	r.clean()
}

func TestMissingEntrypoint(t *testing.T) {
	r := newRig(t)
	s := spec("bad")
	s.Process.Entrypoint = []string{"missing"}
	r.must(r.Launch(t.Context(), s))
	rec := r.await("bad", "stopped", stopped)
	if rec.Reason != vm.ReasonStartFailed || rec.ExitCode == nil || *rec.ExitCode != 127 || !strings.Contains(rec.Message, "no such file") {
		t.Errorf("got %+v", rec)
	}
}

func TestExec(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec := r.must(r.Launch(ctx, spec("web")))
	var out bytes.Buffer // exec waits for the guest by itself
	if code, err := r.Exec(ctx, "web", guest.Exec{Command: []string{"echo", "hi"}}, guest.Streams{Stdout: &out}); code != 0 || err != nil || out.String() != "hi\n" {
		t.Errorf("got %d, %v, %q", code, err, out.String())
	}
	_, err := r.Exec(ctx, "web", guest.Exec{Command: []string{"nope"}}, guest.Streams{})
	wantClass(t, "unknown command", err, errdefs.NotFound)
	out.Reset()
	if err := r.Attach(ctx, "web", guest.Attach{}, guest.Streams{Stdin: strings.NewReader("in"), Stdout: &out}); err != nil || out.String() != ":in" {
		t.Errorf("attach: %v, %q", err, out.String())
	}
	wantClass(t, "attach to a container that is not", r.Attach(ctx, "web", guest.Attach{Container: "x"}, guest.Streams{}), errdefs.NotFound)
	out.Reset()
	if err := r.Forward(ctx, "web", 80, guest.Streams{Stdin: strings.NewReader("in"), Stdout: &out}); err != nil || out.String() != "in" {
		t.Errorf("forward: %v, %q", err, out.String())
	}
	wantClass(t, "a port nobody listens on", r.Forward(ctx, "web", 81, guest.Streams{}), errdefs.Unavailable)
	wantClass(t, "no port", r.Forward(ctx, "web", 0, guest.Streams{}), errdefs.InvalidArgument)
	out.Reset()
	if s, err := r.Stats(ctx, "web"); err != nil || s.Processes != 1 {
		t.Errorf("stats: %+v, %v", s, err)
	}
	r.world.Guest(rec.ID).Drop() // a lost agent reconnects
	r.await("web", "ready", ready)
	if _, err := r.Exec(ctx, "web", guest.Exec{Command: []string{"echo", "hi"}}, guest.Streams{Stdout: &out}); err != nil && !errdefs.IsUnavailable(err) {
		t.Error(err)
	}
	r.must(r.Stop(ctx, "web", -1))
	_, err = r.Exec(ctx, "web", guest.Exec{Command: []string{"echo"}}, guest.Streams{})
	wantClass(t, "exec in a stopped VM", err, errdefs.FailedPrecondition)
	wantClass(t, "attach to a stopped VM", r.Attach(ctx, "web", guest.Attach{}, guest.Streams{}), errdefs.FailedPrecondition)
	wantClass(t, "a port of a stopped VM", r.Forward(ctx, "web", 80, guest.Streams{}), errdefs.FailedPrecondition)
	_, err = r.Console(ctx, "web")
	wantClass(t, "console of a stopped VM", err, errdefs.FailedPrecondition)
	d := spec("disk")
	d.Image = "disk"
	r.must(r.Launch(ctx, d))
	_, err = r.Exec(ctx, "disk", guest.Exec{Command: []string{"echo"}}, guest.Streams{})
	wantClass(t, "exec without agent", err, errdefs.Unavailable)
	if c, err := r.Console(ctx, "disk"); err != nil {
		t.Error(err)
	} else {
		c.Close()
	}
}

func logOf(t *testing.T, r *rig, ref string, opts guest.LogOptions) string {
	t.Helper()
	var b strings.Builder
	if err := r.Logs(t.Context(), ref, opts, func(e guest.LogEntry) error { b.Write(e.Data); return nil }); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestLogs(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec := r.must(r.Launch(ctx, spec("web")))
	lines, done := make(chan string, 100), make(chan error, 1)
	go func() {
		done <- r.Logs(ctx, "web", guest.LogOptions{Follow: true, Tail: -1}, func(e guest.LogEntry) error { lines <- string(e.Data); return nil })
	}()
	g := r.world.Guest(rec.ID)
	for i := 1; i <= 3; i++ { // live, over lost links, no line duplicated and none lost
		g.Print(1)
		if got := <-lines; got != fmt.Sprintf("line %d\n", i) {
			t.Fatalf("line %d is %q", i, got)
		}
		g.Drop()
	}
	g.Print(2)
	if err := r.Logs(ctx, "web", guest.LogOptions{Previous: true}, nil); !errdefs.IsNotFound(err) {
		t.Errorf("previous log of a first run: %v", err)
	}
	if got := []string{<-lines, <-lines}; got[1] != "line 5\n" {
		t.Errorf("last lines %q", got)
	}
	r.must(r.Restart(ctx, "web", 0))
	if err := <-done; err != nil {
		t.Errorf("follower: %v", err)
	}
	if got := logOf(t, r, "web", guest.LogOptions{Previous: true, Tail: 1}); got != "line 5\n" {
		t.Errorf("previous run: %q", got)
	}
	if got := logOf(t, r, "web", guest.LogOptions{Serial: true, Tail: -1}); got != "" {
		t.Errorf("serial: %q", got)
	}
}

func TestRestartOfTheDaemon(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec := r.must(r.Launch(ctx, spec("web")))
	gone := r.must(r.Launch(ctx, spec("gone")))
	done := r.must(r.Launch(ctx, spec("done")))
	off := r.must(r.Create(ctx, spec("off")))
	r.await("web", "ready", ready)
	r.await("done", "ready", ready)
	r.world.Guest(rec.ID).Print(2)
	r.stop()
	r.world.Guest(gone.ID).End(hypervisor.Exit{GuestShutdown: true})
	r.world.Guest(done.ID).Exit(3) // it waits for the acknowledgement
	r.world.Guest(rec.ID).Print(2)
	r.start()
	if got := r.must(r.Inspect(ctx, "web")); got.PID != rec.PID || got.State != vm.StateRunning || got.StartedAt != rec.StartedAt || got.Restarts != 0 {
		t.Errorf("adopted, compared with before: %s", diff.Of(rec, got))
	}
	if got := r.must(r.Inspect(ctx, "gone")); got.State != vm.StateStopped || got.Reason != vm.ReasonLost || got.ExitCode != nil {
		t.Errorf("ended meanwhile: %+v", got)
	}
	if got := r.await("done", "stopped", stopped); got.Reason != vm.ReasonExited || *got.ExitCode != 3 {
		t.Errorf("exited meanwhile: %+v", got)
	}
	if got := r.must(r.Inspect(ctx, "off")); got.State != vm.StateCreated || got.ID != off.ID {
		t.Errorf("created: %+v", got)
	}
	follow, cancel := context.WithCancel(ctx)
	n := 0
	_ = r.Logs(follow, "web", guest.LogOptions{Follow: true, Tail: -1}, func(e guest.LogEntry) error {
		if n++; e.Seq != uint64(n) {
			t.Errorf("entry %d has number %d", n, e.Seq)
		}
		if n == 4 {
			cancel()
		}
		return nil
	})
	cancel()
	if err := r.Reset(ctx); err != nil {
		t.Error(err)
	}
	r.clean()
}

// TestEndWhileAway makes the driver report how a VM ended that nobody watched.
func TestEndWhileAway(t *testing.T) {
	host, err := fake.NewHost("")
	if err != nil {
		t.Fatal(err)
	}
	var driver *fake.Driver
	r := newRig(t, func(r *rig) {
		driver = fake.New(fake.Config{Behave: func(hypervisor.Plan) fake.Behaviour {
			return fake.Behaviour{RunFor: 100 * time.Millisecond, End: fake.PowerOff}
		}}, host)
		r.vmm = driver
	})
	rec := r.must(r.Launch(t.Context(), plain("web")))
	r.stop()
	for {
		inst, err := driver.Adopt(t.Context(), rec.Handle)
		if errdefs.IsNotFound(err) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := inst.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		inst.Close()
	}
	r.start()
	if got := r.must(r.Inspect(t.Context(), "web")); got.State != vm.StateStopped || got.Reason != vm.ReasonPoweredOff {
		t.Errorf("got %+v", got)
	}
}

func TestWatch(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	r.must(r.Create(ctx, spec("a")))
	var wg, began sync.WaitGroup
	slow := make(chan struct{})
	began.Add(4)
	wg.Go(func() { // a watcher that does not accept its event delays nobody
		_ = r.Watch(ctx, -1, func(vm.Event) error { began.Done(); <-slow; return errors.New("enough") })
	})
	got := make([][]string, 3)
	for i := range got {
		wg.Go(func() {
			last := int64(0)
			_ = r.Watch(ctx, -1, func(e vm.Event) error {
				if last == 0 {
					began.Done()
				}
				if e.Revision <= last {
					t.Errorf("revision %d after %d", e.Revision, last)
				}
				last = e.Revision
				got[i] = append(got[i], fmt.Sprintf("%s %s %s", e.Type, e.Record.Spec.Name, e.Record.State))
				if e.Type == vm.EventDeleted {
					return errors.New("enough")
				}
				return nil
			})
		})
	}
	began.Wait()
	r.must(r.Create(ctx, spec("b")))
	mid := r.must(r.Inspect(ctx, "b")).Revision
	if err := r.Remove(ctx, "b", false); err != nil {
		t.Fatal(err)
	}
	close(slow)
	var replay []string
	_ = r.Watch(ctx, mid, func(e vm.Event) error {
		replay = append(replay, string(e.Type))
		if e.Type == vm.EventDeleted {
			return errors.New("enough")
		}
		return nil
	})
	if want := []string{"MODIFIED", "DELETED"}; !reflect.DeepEqual(replay, want) {
		t.Errorf("replay from %d: %v", mid, replay)
	}
	wantClass(t, "a revision that never was", r.Watch(ctx, 1<<40, nil), errdefs.FailedPrecondition)
	wg.Wait()
	for i := range got {
		if len(got[i]) < 2 || got[i][0] != "ADDED a created" || got[i][len(got[i])-1] != "DELETED b created" {
			t.Errorf("watcher %d saw %q", i, got[i])
		}
	}
}

func TestQueue(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec := r.must(r.Launch(ctx, spec("web")))
	r.await("web", "ready", ready)
	r.world.Guest(rec.ID).Stubborn = true
	stopping := make(chan error, 1)
	stopCtx, cancelStop := context.WithCancel(ctx)
	go func() { _, err := r.Stop(stopCtx, "web", time.Hour); stopping <- err }()
	r.await("web", "stopping", func(v vm.Record) bool { return v.Revision > rec.Revision+1 })
	queued, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	_, err := r.Restart(queued, "web", 0) // waits behind the stop
	wantClass(t, "queued", err, errdefs.DeadlineExceeded)
	r.must(r.Create(ctx, spec("other"))) // others continue
	cancelStop()
	wantClass(t, "canceled stop", <-stopping, errdefs.Canceled)
	if got := r.must(r.Inspect(ctx, "web")); got.State != vm.StateRunning {
		t.Errorf("after a canceled stop it is %s", got.State)
	}
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Error(err)
	}
}

func TestEndOfRun(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec := r.must(r.Launch(ctx, spec("web")))
	r.await("web", "ready", ready)
	r.world.Guest(rec.ID).Stubborn = true
	errs := make(chan error, 3)
	go func() { _, err := r.Stop(ctx, "web", time.Hour); errs <- err }()
	go func() { errs <- r.Watch(ctx, 0, func(vm.Event) error { return nil }) }()
	go func() {
		_, err := r.Exec(ctx, "web", guest.Exec{Command: []string{"sleep"}}, guest.Streams{})
		errs <- err
	}()
	r.await("web", "stopping", func(v vm.Record) bool { return v.Revision > rec.Revision+1 })
	e := r.Engine
	r.stop()
	for range 3 {
		wantClass(t, "interrupted", <-errs, errdefs.Unavailable)
	}
	_, err := e.Launch(ctx, spec("late"))
	wantClass(t, "after the end", err, errdefs.Unavailable)
	wantClass(t, "second Run", e.Run(ctx), errdefs.FailedPrecondition)
	r.world.Guest(rec.ID).Stubborn = false
	r.start() // the stop is finished
	if got := r.await("web", "stopped", stopped); got.Reason != vm.ReasonStopped {
		t.Errorf("got %+v", got)
	}
}

func TestManyInParallel(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			name := fmt.Sprint("vm", i)
			rec, err := r.Launch(ctx, spec(name))
			if err != nil {
				t.Error(err)
				return
			}
			switch i % 4 {
			case 0:
				_, err = r.Restart(ctx, name, 0)
			case 1:
				r.world.Guest(rec.ID).End(hypervisor.Exit{Signal: 9})
			case 2:
				_, err = r.Stop(ctx, name, time.Minute)
			}
			if err = errors.Join(err, r.Remove(ctx, name, true)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	r.clean()
}
