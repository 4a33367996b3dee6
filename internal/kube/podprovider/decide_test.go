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

// seen returns the observation of a pod with annotations and of its VM, on a node with a registry. state "" means no VM.
func seen(state vm.State, annotations ...string) observation {
	s := observation{left: math.MaxInt64, pod: &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{}}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}}},
	}}
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
	with := func(s observation, change func(*observation)) observation { change(&s); return s }
	soon := 3 * time.Second
	for name, tt := range map[string]struct {
		s    observation
		want action
		next turn
	}{
		"no VM":                                    {seen(""), actCreate, whenWoken},
		"being deleted":                            {with(seen(vm.StateRunning), func(s *observation) { s.leaving, s.ended = true, true }), actRemove, whenWoken},
		"ended":                                    {with(seen(vm.StateStopped), func(s *observation) { s.ended = true }), actNone, whenWoken},
		"has a verdict":                            {with(seen(""), func(s *observation) { s.judged = true }), actReport, whenWoken},
		"static":                                   {with(seen(""), func(s *observation) { s.static = true }), actMonitorMachine, whenWoken},
		"VM lost":                                  {with(seen(vm.StateRunning), func(s *observation) { s.lost = true }), actGiveUp, whenWoken},
		"VM lost before it ran":                    {with(seen(vm.StateCreating), func(s *observation) { s.lost, s.rec.StartedAt = true, time.Time{} }), actForget, whenWoken},
		"VM lost, hibernated":                      {with(seen(vm.StateHibernated), func(s *observation) { s.lost = true }), actForget, whenWoken},
		"VM lost, hibernated without a registry":   {with(seen(vm.StateHibernated), func(s *observation) { s.lost, s.node.remote = true, false }), actGiveUp, whenWoken},
		"deadline exceeded":                        {with(seen(vm.StateRunning), func(s *observation) { s.left = 0 }), actExpire, whenWoken},
		"a port of another pod":                    {with(seen(""), func(s *observation) { s.clash = true }), actReject, whenWoken},
		"a port of another pod, but it has a VM":   {with(seen(vm.StateRunning), func(s *observation) { s.clash = true }), actKeep, whenWoken},
		"deadline exceeded, no VM":                 {with(seen(""), func(s *observation) { s.left = -1 }), actExpire, whenWoken},
		"being created":                            {seen(vm.StateCreating), actShow, whenWoken},
		"created":                                  {seen(vm.StateCreated), actStart, whenWoken},
		"running":                                  {seen(vm.StateRunning), actKeep, whenWoken},
		"to resize":                                {with(seen(vm.StateRunning), func(s *observation) { s.resize, s.adds = true, true }), actResize, whenWoken},
		"to resize, retry is not due":              {with(seen(vm.StateRunning), func(s *observation) { s.resize, s.waits.resize = true, soon }), actKeep, after(soon)},
		"to resize later, container to add":        {with(seen(vm.StateRunning), func(s *observation) { s.resize, s.waits.resize, s.adds = true, soon, true }), actAddContainers, whenWoken},
		"to resize, without agent":                 {with(seen(vm.StateRunning), func(s *observation) { s.resize, s.rec.AgentReady = true, false }), actKeep, whenWoken},
		"to resize, to hibernate":                  {with(seen(vm.StateRunning, hibernated...), func(s *observation) { s.resize = true }), actHibernate, whenWoken},
		"containers to add":                        {with(seen(vm.StateRunning), func(s *observation) { s.adds = true }), actAddContainers, whenWoken},
		"containers to add, retry is not due":      {with(seen(vm.StateRunning), func(s *observation) { s.adds, s.waits.add = true, soon }), actKeep, after(soon)},
		"containers to add, without agent":         {with(seen(vm.StateRunning), func(s *observation) { s.adds, s.rec.AgentReady = true, false }), actKeep, whenWoken},
		"containers to add, to hibernate":          {with(seen(vm.StateRunning, hibernated...), func(s *observation) { s.adds = true }), actHibernate, whenWoken},
		"containers to add, stopped":               {with(seen(vm.StateStopped), func(s *observation) { s.adds = true }), actSchedule, whenWoken},
		"volumes to plug":                          {with(seen(vm.StateRunning), func(s *observation) { s.plug = true }), actPlug, whenWoken},
		"volumes to plug, retry is not due":        {with(seen(vm.StateRunning), func(s *observation) { s.plug, s.waits.plug = true, soon }), actKeep, after(soon)},
		"volumes to plug, container to add":        {with(seen(vm.StateRunning), func(s *observation) { s.plug, s.adds = true, true }), actAddContainers, whenWoken},
		"volumes to plug, paused":                  {with(seen(vm.StateRunning, contract.KeyPaused, "true"), func(s *observation) { s.rec.Paused, s.plug = vm.PausedOnRequest, true }), actKeep, whenWoken},
		"volumes to plug, to hibernate":            {with(seen(vm.StateRunning, hibernated...), func(s *observation) { s.plug = true }), actHibernate, whenWoken},
		"networks to attach":                       {with(seen(vm.StateRunning), func(s *observation) { s.connect = true }), actConnect, whenWoken},
		"networks to attach, retry is not due":     {with(seen(vm.StateRunning), func(s *observation) { s.connect, s.waits.connect = true, soon }), actKeep, after(soon)},
		"networks to attach, volume to plug":       {with(seen(vm.StateRunning), func(s *observation) { s.connect, s.plug = true, true }), actPlug, whenWoken},
		"volumes to plug, stopped":                 {with(seen(vm.StateStopped), func(s *observation) { s.plug = true }), actSchedule, whenWoken},
		"kill requested":                           {with(seen(vm.StateRunning), func(s *observation) { s.kill = true }), actStopForKill, whenWoken},
		"to pause":                                 {seen(vm.StateRunning, contract.KeyPaused, "true"), actPause, whenWoken},
		"to pause, retry is not due":               {with(seen(vm.StateRunning, contract.KeyPaused, "true"), func(s *observation) { s.waits.pause = soon }), actKeep, after(soon)},
		"to pause, kill requested":                 {with(seen(vm.StateRunning, contract.KeyPaused, "true"), func(s *observation) { s.kill = true }), actStopForKill, whenWoken},
		"to pause, stopped":                        {seen(vm.StateStopped, contract.KeyPaused, "true"), actSchedule, whenWoken},
		"paused":                                   {with(seen(vm.StateRunning, contract.KeyPaused, "true"), func(s *observation) { s.rec.Paused, s.adds, s.resize = vm.PausedOnRequest, true, true }), actKeep, whenWoken},
		"to reboot":                                {with(seen(vm.StateRunning), func(s *observation) { s.reboot = true }), actReboot, whenWoken},
		"to reboot, paused":                        {with(seen(vm.StateRunning), func(s *observation) { s.reboot, s.rec.Paused = true, vm.PausedOnRequest }), actUnpause, whenWoken},
		"to dump":                                  {with(seen(vm.StateRunning, hibernated...), func(s *observation) { s.dump = true }), actDump, after(0)},
		"to dump, paused":                          {with(seen(vm.StateRunning, contract.KeyPaused, "true"), func(s *observation) { s.dump, s.rec.Paused = true, vm.PausedOnRequest }), actDump, after(0)},
		"to dump, retry is not due":                {with(seen(vm.StateRunning), func(s *observation) { s.dump, s.waits.dump = true, soon }), actKeep, after(soon)},
		"to dump, stopped":                         {with(seen(vm.StateStopped), func(s *observation) { s.dump = true }), actSchedule, whenWoken},
		"to unpause":                               {with(seen(vm.StateRunning), func(s *observation) { s.rec.Paused = vm.PausedAtStart }), actUnpause, whenWoken},
		"to hibernate":                             {seen(vm.StateRunning, hibernated...), actHibernate, whenWoken},
		"to hibernate, retry is not due":           {with(seen(vm.StateRunning, hibernated...), func(s *observation) { s.waits.hibernate = soon }), actKeep, after(soon)},
		"to hibernate, without agent":              {with(seen(vm.StateRunning, hibernated...), func(s *observation) { s.rec.AgentReady = false }), actKeep, whenWoken},
		"to hibernate, clone without its identity": {with(seen(vm.StateRunning, hibernated...), func(s *observation) { s.rec.Cloned, s.rec.Resume = true, &vm.Resume{Clone: true} }), actKeep, whenWoken},
		"to hibernate, node keeps no snapshots":    {with(seen(vm.StateRunning, hibernated...), func(s *observation) { s.node = abilities{} }), actKeep, whenWoken},
		"hibernated":                               {seen(vm.StateHibernated, hibernated...), actStore, whenWoken},
		"hibernated, retry is not due":             {with(seen(vm.StateHibernated, hibernated...), func(s *observation) { s.waits.hibernate = soon }), actShow, after(soon)},
		"hibernated and stored":                    {with(seen(vm.StateHibernated, hibernated...), func(s *observation) { s.stored = true }), actShow, whenWoken},
		"to wake":                                  {with(seen(vm.StateHibernated), func(s *observation) { s.stored = true }), actWake, whenWoken},
		"to wake, retry is not due":                {with(seen(vm.StateHibernated), func(s *observation) { s.waits.wake = soon }), actShow, after(soon)},
		"to wake, node keeps no snapshots":         {with(seen(vm.StateHibernated), func(s *observation) { s.node = abilities{} }), actShow, whenWoken},
		"stopped":                                  {seen(vm.StateStopped), actSchedule, whenWoken},
		"stopped, start is not due":                {with(seen(vm.StateStopped), func(s *observation) { s.waits.scheduled, s.waits.start = true, soon }), actShow, after(soon)},
		"stopped, start is due":                    {with(seen(vm.StateStopped), func(s *observation) { s.waits.scheduled = true }), actRestart, whenWoken},
		"in state error":                           {seen(vm.StateError), actSchedule, whenWoken},
		"managed, stopped":                         {seen(vm.StateStopped, managed...), actRestartManaged, whenWoken},
		"stopped, restart policy Never":            {with(seen(vm.StateStopped), func(s *observation) { s.pod.Spec.RestartPolicy = corev1.RestartPolicyNever }), actFinish, whenWoken},
		"succeeded":                                {exits(seen(vm.StateStopped), 0), actFinish, whenWoken},
		"failed":                                   {exits(seen(vm.StateStopped), 1), actSchedule, whenWoken},
		"stopped for a probe":                      {with(exits(seen(vm.StateStopped), 0), func(s *observation) { s.killed = s.rec.StartedAt }), actSchedule, whenWoken},
		"one keeps on, ended by themselves":        {keepsOn(seen(vm.StateStopped), 1), actFinish, whenWoken},
		"one keeps on, VM lost":                    {with(keepsOn(seen(vm.StateStopped), 1), func(s *observation) { s.rec.ExitCode, s.rec.State = nil, vm.StateError }), actSchedule, whenWoken},
		"one keeps on, stopped for a probe":        {with(keepsOn(seen(vm.StateStopped), 0), func(s *observation) { s.killed = s.rec.StartedAt }), actSchedule, whenWoken},
		"one keeps on, boots itself":               {with(keepsOn(seen(vm.StateStopped), 0), func(s *observation) { s.rec.Containers = nil }), actSchedule, whenWoken},
		"none keeps on, VM lost": {with(keepsOn(seen(vm.StateStopped), 1), func(s *observation) {
			s.rec.ExitCode = nil
			*s.pod.Spec.Containers[0].RestartPolicy = corev1.ContainerRestartPolicyNever
		}), actFinish, whenWoken},
		"stopped from outside": {with(exits(seen(vm.StateStopped), 0), func(s *observation) { s.rec.Reason = vm.ReasonStopped }), actSchedule, whenWoken},
	} {
		if got, next := decide(tt.s); got != tt.want || next != tt.next {
			t.Errorf("%s: action %d, turn %d; want %d, %d", name, got, next, tt.want, tt.next)
		}
	}
}

// exits makes the VM of s end with a code, under restart policy OnFailure.
func exits(s observation, code int) observation {
	s.pod.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
	s.rec.ExitCode, s.rec.Reason = &code, vm.ReasonExited
	return s
}

// keepsOn makes the VM of s end with a code under the restart policy Never, although its container has the policy Always.
func keepsOn(s observation, code int) observation {
	s = exits(s, code)
	s.pod.Spec.RestartPolicy = corev1.RestartPolicyNever
	s.pod.Spec.Containers[0].RestartPolicy = new(corev1.ContainerRestartPolicyAlways)
	s.rec.Containers = []vm.ContainerRecord{{Name: s.pod.Spec.Containers[0].Name, Root: true}}
	return s
}

// model is a pod, its VM and the node. Actions and events change it.
type model struct {
	observation
	gone bool // the VM of the deleted pod is removed
	r    *rand.Rand
}

// event lets a random event happen to the pod, the VM or the node.
func (w *model) event() string {
	running := w.rec != nil && w.rec.State == vm.StateRunning
	switch n := w.r.IntN(16); {
	case n == 11:
		w.plug, w.connect = true, true
		return "the pod gets a volume"
	case n == 14:
		w.dump = true
		return "somebody asks for a dump"
	case n == 13:
		w.reboot = true
		return "somebody asks for a reboot"
	case n == 12:
		w.pod.Annotations[contract.KeyPaused] = fmt.Sprint(w.r.IntN(2) == 0)
		return "paused=" + w.pod.Annotations[contract.KeyPaused]
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
		return "the agent connects or disconnects"
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
		w.waits = waits{hibernate: time.Second, wake: time.Second, start: time.Second, add: time.Second, resize: time.Second, plug: time.Second, connect: time.Second, dump: time.Second, pause: time.Second, scheduled: w.waits.scheduled}
		return "something failed"
	case n == 9:
		w.adds = true
		return "the pod gets an ephemeral container"
	case n == 10:
		w.resize = true
		return "the pod is resized"
	case n == 8:
		w.stored = false
		return "the state is no longer in the registry"
	}
	return ""
}

// pass ends the waits.
func (w *model) pass() { w.waits = waits{scheduled: w.waits.scheduled} }

// do executes an action. It returns false if the action changes nothing.
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
	case actGiveUp, actExpire, actReject:
		w.judged, w.lost = true, false
	case actStart, actRestart, actRestartManaged:
		start(vm.StateRunning)
	case actStopForKill:
		w.killed = w.rec.StartedAt
		w.rec.State, w.rec.StoppedAt = vm.StateStopped, time.Unix(w.r.Int64N(1e6), 0)
		w.kill, w.waits.scheduled = false, false
	case actAddContainers:
		w.adds = false
	case actResize:
		w.resize = false
	case actPlug:
		w.plug = false
	case actConnect:
		w.connect = false
	case actReboot:
		w.reboot = false
	case actDump:
		w.dump = false
	case actPause:
		w.rec.Paused = vm.PausedOnRequest
	case actUnpause:
		w.rec.Paused = ""
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
	case actNone, actReport, actShow, actMonitorMachine:
		return false
	case actKeep:
		came := !w.rec.AgentReady
		w.rec.AgentReady = true // the guest comes up
		return came
	}
	return true
}

// reached reports whether the pod and its VM are in the wanted state.
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
	if contract.Paused(w.pod.Annotations) { // it gets nothing before it is unpaused
		return w.rec.State == vm.StateRunning && w.rec.Paused != "" && !w.kill
	}
	return w.rec.State == vm.StateRunning && w.rec.Paused == "" && w.rec.AgentReady && !w.kill && !w.adds && !w.resize && !w.plug && !w.connect
}

// TestDecideReachesWantedState lets random events happen, with actions that succeed or fail. After the last event, a few
// actions bring the pod to the wanted state, and no action is left.
func TestDecideReachesWantedState(t *testing.T) {
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := &model{observation: seen(""), r: r}
		w.pod.Spec.RestartPolicy = []corev1.RestartPolicy{corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever}[r.IntN(3)]
		if r.IntN(4) == 0 {
			w.pod.Annotations[contract.KeyManaged] = "true"
		}
		var story []string
		for range 40 {
			if what := w.event(); what != "" {
				story = append(story, what)
			}
			if what, _ := decide(w.observation); r.IntN(2) == 0 { // otherwise it fails
				story = append(story, fmt.Sprint("action ", what))
				w.do(what)
			}
		}
		steps := 0
		for ; steps < 20; steps++ {
			w.pass()
			what, _ := decide(w.observation)
			story = append(story, fmt.Sprint("then ", what))
			if !w.do(what) {
				break
			}
		}
		if steps == 20 || !w.reached() {
			t.Fatalf("seed %d: after %d more actions the pod is %+v, its VM %+v: %q", seed, steps, w.observation, w.rec, story)
		}
	}
}
