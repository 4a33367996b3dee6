package podprovider

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// ends is a Runtime whose event streams end one after the other, as the test specifies.
type ends struct {
	Runtime
	all    []end
	asked  []time.Duration // when, since the first request
	began  time.Time
	cancel context.CancelFunc
}

type end struct {
	err   error
	heard bool // an event came before
}

func (e *ends) List(context.Context) ([]vm.Record, error) { return nil, nil }

func (e *ends) Watch(ctx context.Context, _ int64, fn func(vm.Event) error) error {
	if e.began.IsZero() {
		e.began = time.Now()
	}
	e.asked = append(e.asked, time.Since(e.began))
	if len(e.all) == 0 {
		e.cancel()
		return ctx.Err()
	}
	next := e.all[0]
	e.all = e.all[1:]
	if next.heard {
		if err := fn(vm.Event{Type: vm.EventModified}); err != nil {
			return err
		}
	}
	return next.err
}

// TestPausesBetweenEventStreams follows a Runtime whose streams end again and again. The pause is two seconds after a stream
// that ended without an error. After errors it grows from one second to at most a minute.
func TestPausesBetweenEventStreams(t *testing.T) {
	gone := errdefs.Unavailablef("gone")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		runtime := &ends{cancel: cancel, all: []end{
			{err: gone},
			{err: gone},
			{err: gone},
			{err: gone},
			{err: gone},
			{err: gone},
			{err: gone},
			{err: gone},
			{err: gone, heard: true},
			{},
			{},
			{err: gone},
		}}
		p, err := New(Config{Node: convert.Node{Name: "node"}}, Deps{Runtime: runtime, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		p.follow(ctx, 0)
		var pauses []int
		for i := range runtime.asked[1:] {
			pauses = append(pauses, int((runtime.asked[i+1] - runtime.asked[i]).Seconds()))
		}
		if want := []int{1, 2, 4, 8, 16, 32, 60, 60, 1, 2, 2, 1}; !slices.Equal(pauses, want) {
			t.Errorf("the pauses were %d seconds, want %d", pauses, want)
		}
	})
}

// TestAChangeOfARunningVMIsNone sends changes of the record of a VM that keeps running. The provider calls nothing and writes
// nothing.
func TestAChangeOfARunningVMIsNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		expect(t, w.after(10*time.Second), "Running running ready")
		rec, err := w.engine.Inspect(t.Context(), vmName)
		if err != nil {
			t.Fatal(err)
		}
		writes := w.writes()
		for range 3 {
			w.engine.change(rec.ID, func(r *vm.Record) { r.Message = "inspected" })
			expect(t, w.after(time.Second), "Running running ready")
		}
		if got := w.writes(); got != writes {
			t.Errorf("%d writes of the pod", got-writes)
		}
		for _, call := range []string{"start", "remove"} {
			if n := w.engine.called(call); n > 0 {
				t.Errorf("%d calls of %s", n, call)
			}
		}
	})
}

// TestWrongClockIsTold: an Event says that a guest's clock is wrong, and another that it is right again. The pod stays ready.
func TestWrongClockIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		w.after(10 * time.Second)
		rec, err := w.engine.Inspect(t.Context(), vmName)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // the second change sends no Event
			w.engine.change(rec.ID, func(r *vm.Record) { r.Reason, r.Message = vm.ReasonClockWrong, "it is fast" })
			if p := w.after(time.Second); !ready(p) {
				t.Error("the pod is not ready")
			}
		}
		w.engine.change(rec.ID, func(r *vm.Record) { r.Reason, r.Message = "", "" })
		w.after(time.Second)
		if told := w.told(); strings.Count(told, "it is fast") != 1 || strings.Count(told, eventClockWell) != 1 {
			t.Errorf("events: %s", told)
		}
	})
}

// TestMissingDriversAreTold: one Event says that a Windows guest runs without the drivers of its node, and none that its disk works again.
func TestMissingDriversAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		w.after(10 * time.Second)
		rec, err := w.engine.Inspect(t.Context(), vmName)
		if err != nil {
			t.Fatal(err)
		}
		w.engine.change(rec.ID, func(r *vm.Record) { r.Reason, r.Message = vm.ReasonNoDrivers, "no such file" })
		if p := w.after(time.Second); !ready(p) {
			t.Error("the pod is not ready")
		}
		w.engine.change(rec.ID, func(r *vm.Record) { r.Reason, r.Message = "", "" })
		w.after(time.Second)
		if told := w.told(); strings.Count(told, "Warning DriversMissing VM "+vmName+": no such file") != 1 || strings.Contains(told, eventDiskWell) {
			t.Errorf("events: %s", told)
		}
	})
}

// TestDiskFullShows: the pod of a VM that is paused because the host's disk is full is not ready until the VM continues. An
// Event and a condition say why.
func TestDiskFullShows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod())
		if p := w.after(10 * time.Second); condition(p, podstatus.ConditionDiskFault).Type != "" {
			t.Error("a pod without a disk fault has the condition")
		}
		rec, err := w.engine.Inspect(t.Context(), vmName)
		if err != nil {
			t.Fatal(err)
		}
		state := func(p *corev1.Pod) corev1.PodCondition {
			for _, c := range p.Status.Conditions {
				if c.Type == podstatus.ConditionDiskFault {
					return c
				}
			}
			return corev1.PodCondition{}
		}
		w.engine.change(rec.ID, func(r *vm.Record) { r.Reason, r.Message = vm.ReasonDiskFull, "no room" })
		p := w.after(time.Second)
		if c := state(p); ready(p) || c.Status != corev1.ConditionTrue || c.Reason != vm.ReasonDiskFull || c.Message != "no room" {
			t.Errorf("ready %t, %+v", ready(p), c)
		}
		w.engine.change(rec.ID, func(r *vm.Record) { r.Reason, r.Message = "", "" })
		p = w.after(time.Second)
		if c := state(p); !ready(p) || c.Status != corev1.ConditionFalse {
			t.Errorf("ready %t, %+v", ready(p), c)
		}
		if told := w.told(); strings.Count(told, vm.ReasonDiskFull) != 1 || strings.Count(told, eventDiskWell) != 1 {
			t.Errorf("events: %s", told)
		}
	})
}
