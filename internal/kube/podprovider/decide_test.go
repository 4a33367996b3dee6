package podprovider

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// seen returns what is known of a pod with annotations and of its VM, on a node with a registry. state "" means no VM.
func seen(state vm.State, annotations ...string) sight {
	s := sight{pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{}}}, left: math.MaxInt64}
	s.node = abilities{snapshots: true, remote: true}
	for i := 0; i < len(annotations); i += 2 {
		s.pod.Annotations[annotations[i]] = annotations[i+1]
	}
	if state != "" {
		s.rec = &vm.Record{ID: "id", State: state, AgentReady: state == vm.StateRunning, StartedAt: time.Unix(1, 0), StoppedAt: time.Unix(2, 0)}
	}
	return s
}

func TestDecide(t *testing.T) {
	hibernated := []string{contract.KeyHibernate, "true"}
	managed := []string{contract.KeyManaged, "true"}
	with := func(s sight, change func(*sight)) sight { change(&s); return s }
	soon := 3 * time.Second
	for name, tt := range map[string]struct {
		s    sight
		want action
		next turn
	}{
		"no VM":                       {seen(""), actCreate, whenWoken},
		"being deleted":               {with(seen(vm.StateRunning), func(s *sight) { s.leaving, s.ended = true, true }), actRemove, whenWoken},
		"ended":                       {with(seen(vm.StateStopped), func(s *sight) { s.ended = true }), actRest, whenWoken},
		"judged":                      {with(seen(""), func(s *sight) { s.judged = true }), actReport, whenWoken},
		"static":                      {with(seen(""), func(s *sight) { s.static = true }), actAttend, whenWoken},
		"gone":                        {with(seen(vm.StateRunning), func(s *sight) { s.lost = true }), actGiveUp, whenWoken},
		"gone before it ran":          {with(seen(vm.StateCreating), func(s *sight) { s.lost, s.rec.StartedAt = true, time.Time{} }), actForget, whenWoken},
		"gone, hibernated":            {with(seen(vm.StateHibernated), func(s *sight) { s.lost = true }), actForget, whenWoken},
		"gone, hibernated here only":  {with(seen(vm.StateHibernated), func(s *sight) { s.lost, s.node.remote = true, false }), actGiveUp, whenWoken},
		"out of time":                 {with(seen(vm.StateRunning), func(s *sight) { s.left = 0 }), actExpire, whenWoken},
		"out of time without VM":      {with(seen(""), func(s *sight) { s.left = -1 }), actExpire, whenWoken},
		"being created":               {seen(vm.StateCreating), actShow, whenWoken},
		"created":                     {seen(vm.StateCreated), actStart, whenWoken},
		"running":                     {seen(vm.StateRunning), actKeep, whenWoken},
		"to be killed":                {with(seen(vm.StateRunning), func(s *sight) { s.kill = true }), actStopForKill, whenWoken},
		"to hibernate":                {seen(vm.StateRunning, hibernated...), actHibernate, whenWoken},
		"to hibernate, later":         {with(seen(vm.StateRunning, hibernated...), func(s *sight) { s.waits.hibernate = soon }), actKeep, after(soon)},
		"to hibernate, without agent": {with(seen(vm.StateRunning, hibernated...), func(s *sight) { s.rec.AgentReady = false }), actKeep, whenWoken},
		"to hibernate, still another": {with(seen(vm.StateRunning, hibernated...), func(s *sight) { s.rec.Cloned, s.rec.Resume = true, &vm.Resume{Clone: true} }), actKeep, whenWoken},
		"to hibernate, not possible":  {with(seen(vm.StateRunning, hibernated...), func(s *sight) { s.node = abilities{} }), actKeep, whenWoken},
		"hibernated":                  {seen(vm.StateHibernated, hibernated...), actStore, whenWoken},
		"hibernated, stored later":    {with(seen(vm.StateHibernated, hibernated...), func(s *sight) { s.waits.hibernate = soon }), actShow, after(soon)},
		"hibernated and stored":       {with(seen(vm.StateHibernated, hibernated...), func(s *sight) { s.stored = true }), actShow, whenWoken},
		"to wake":                     {with(seen(vm.StateHibernated), func(s *sight) { s.stored = true }), actWake, whenWoken},
		"to wake, later":              {with(seen(vm.StateHibernated), func(s *sight) { s.waits.wake = soon }), actShow, after(soon)},
		"to wake, not possible":       {with(seen(vm.StateHibernated), func(s *sight) { s.node = abilities{} }), actShow, whenWoken},
		"stopped":                     {seen(vm.StateStopped), actSchedule, whenWoken},
		"stopped, started later":      {with(seen(vm.StateStopped), func(s *sight) { s.waits.scheduled, s.waits.start = true, soon }), actShow, after(soon)},
		"stopped, start is due":       {with(seen(vm.StateStopped), func(s *sight) { s.waits.scheduled = true }), actRestart, whenWoken},
		"broken":                      {seen(vm.StateError), actSchedule, whenWoken},
		"managed, stopped":            {seen(vm.StateStopped, managed...), actRestartManaged, whenWoken},
		"stopped for good":            {with(seen(vm.StateStopped), func(s *sight) { s.pod.Spec.RestartPolicy = corev1.RestartPolicyNever }), actFinish, whenWoken},
		"succeeded":                   {exits(seen(vm.StateStopped), 0), actFinish, whenWoken},
		"failed":                      {exits(seen(vm.StateStopped), 1), actSchedule, whenWoken},
		"killed by us":                {with(exits(seen(vm.StateStopped), 0), func(s *sight) { s.killed = s.rec.StartedAt }), actSchedule, whenWoken},
		"ended by somebody":           {with(exits(seen(vm.StateStopped), 0), func(s *sight) { s.rec.Reason = vm.ReasonStopped }), actSchedule, whenWoken},
	} {
		if got, next := decide(tt.s); got != tt.want || next != tt.next {
			t.Errorf("%s: action %d, turn %d; want %d, %d", name, got, next, tt.want, tt.next)
		}
	}
}

// exits makes the VM of s end with a code, under a policy that restarts only what fails.
func exits(s sight, code int) sight {
	s.pod.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
	s.rec.ExitCode, s.rec.Reason = &code, vm.ReasonExited
	return s
}

// model is a pod, its VM and the node, as far as decisions change them.
type model struct {
	sight
	gone bool // the VM of the deleted pod is removed
	r    *rand.Rand
}

// event lets something happen to the pod, the VM or the node.
func (w *model) event() string {
	running := w.rec != nil && w.rec.State == vm.StateRunning
	switch n := w.r.IntN(12); {
	case n == 0:
		w.pod.Annotations[contract.KeyHibernate] = fmt.Sprint(w.r.IntN(2) == 0)
		return "hibernate=" + w.pod.Annotations[contract.KeyHibernate]
	case n == 1 && running:
		code := w.r.IntN(2)
		w.rec.State, w.rec.ExitCode, w.rec.Reason, w.rec.StoppedAt = vm.StateStopped, &code, vm.ReasonExited, time.Unix(w.r.Int64N(1e6), 0)
		w.waits.scheduled = false
		return fmt.Sprint("exit ", code)
	case n == 2 && running:
		w.rec.AgentReady = !w.rec.AgentReady
		return "the agent comes or goes"
	case n == 3 && running:
		w.kill = true
		return "a probe fails"
	case n == 4 && w.rec != nil && w.r.IntN(4) == 0:
		w.lost = true
		return "the VM is gone"
	case n == 5 && w.r.IntN(8) == 0:
		w.left = 0
		return "the deadline passes"
	case n == 6 && w.r.IntN(8) == 0:
		w.leaving = true
		return "the pod is deleted"
	case n == 7:
		w.waits = waits{hibernate: time.Second, wake: time.Second, start: time.Second, scheduled: w.waits.scheduled}
		return "something failed"
	case n == 8:
		w.stored = false
		return "the registry forgets"
	}
	return ""
}

// pass lets the waits be over.
func (w *model) pass() { w.waits = waits{scheduled: w.waits.scheduled} }

// do does an action. It returns false if it leaves everything as it is.
func (w *model) do(what action) bool {
	start := func(state vm.State) {
		w.rec.State, w.rec.AgentReady, w.rec.StartedAt = state, true, time.Unix(w.r.Int64N(1e6), 0)
		w.kill, w.waits.scheduled = false, false
	}
	switch what {
	case actRemove:
		w.gone = true
		return false
	case actCreate:
		w.rec = &vm.Record{ID: "id"}
		start(vm.StateRunning)
	case actForget:
		w.rec, w.lost = nil, false
	case actGiveUp, actExpire:
		w.judged, w.lost = true, false
	case actStart, actRestart, actRestartManaged:
		start(vm.StateRunning)
	case actStopForKill:
		w.killed = w.rec.StartedAt
		w.rec.State, w.rec.StoppedAt = vm.StateStopped, time.Unix(w.r.Int64N(1e6), 0)
		w.kill, w.waits.scheduled = false, false
	case actHibernate:
		w.rec.State, w.rec.Snapshot, w.stored = vm.StateHibernated, "snap", false
	case actStore:
		w.stored = true
	case actWake:
		start(vm.StateRunning)
	case actSchedule:
		w.waits.scheduled = true
	case actFinish:
		w.ended = true
	case actRest, actReport, actShow, actAttend:
		return false
	case actKeep:
		came := !w.rec.AgentReady
		w.rec.AgentReady = true // a guest that is kept comes up in the end
		return came
	}
	return true
}

// reached reports whether the pod has what it wants.
func (w *model) reached() bool {
	switch {
	case w.leaving:
		return w.gone
	case w.ended, w.judged:
		return true
	case w.rec == nil:
		return false
	case contract.Hibernate(w.pod.Annotations):
		return w.rec.State == vm.StateHibernated && w.stored
	}
	return w.rec.State == vm.StateRunning && w.rec.AgentReady && !w.kill
}

// TestDecideReachesTheWish lets anything happen in any order, with actions that are done or not, and then nothing more: a
// few actions later the pod has what it wants, and nothing is left to do.
func TestDecideReachesTheWish(t *testing.T) {
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := &model{sight: seen(""), r: r}
		w.pod.Spec.RestartPolicy = []corev1.RestartPolicy{corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever}[r.IntN(3)]
		if r.IntN(4) == 0 {
			w.pod.Annotations[contract.KeyManaged] = "true"
		}
		var story []string
		for range 40 {
			if what := w.event(); what != "" {
				story = append(story, what)
			}
			if what, _ := decide(w.sight); r.IntN(2) == 0 { // otherwise it fails
				story = append(story, fmt.Sprint("action ", what))
				w.do(what)
			}
		}
		steps := 0
		for ; steps < 20; steps++ {
			w.pass()
			what, _ := decide(w.sight)
			story = append(story, fmt.Sprint("then ", what))
			if !w.do(what) {
				break
			}
		}
		if steps == 20 || !w.reached() {
			t.Fatalf("seed %d: after %d more actions the pod is %+v, its VM %+v: %q", seed, steps, w.sight, w.rec, story)
		}
	}
}
