package podprovider

import (
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/vm"
)

func TestStatusOfSeveralContainers(t *testing.T) {
	at := time.Unix(1000, 0)
	ran := func(code int) *vm.ContainerExit {
		reason := vm.ContainerCompleted
		if code != 0 {
			reason = vm.ContainerError
		}
		return &vm.ContainerExit{Code: code, Reason: reason, StartedAt: at, FinishedAt: at}
	}
	over := func(code int) vm.ContainerStatus {
		x := ran(code)
		return vm.ContainerStatus{State: vm.ContainerTerminated, Reason: x.Reason, StartedAt: at, Exit: x}
	}
	runs := vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: at}
	waits := vm.ContainerStatus{State: vm.ContainerWaiting, Reason: vm.ContainerInitGoing}
	crashed := vm.ContainerStatus{State: vm.ContainerWaiting, Reason: vm.ContainerCrashLoop, StartedAt: at, Last: ran(3), Restarts: 2}
	asleep := runs
	asleep.Restarts, asleep.Last = 2, ran(3)
	for name, tc := range map[string]struct {
		state vm.State // of the VM
		code  int      // of a stopped one
		of    [3]vm.ContainerStatus
		want  string // phase, conditions, containers
	}{
		"not told yet":    {vm.StateRunning, 0, [3]vm.ContainerStatus{}, "Pending init=False ready=False i:ContainerCreating a:PodInitializing b:PodInitializing"},
		"init runs":       {vm.StateRunning, 0, [3]vm.ContainerStatus{runs, waits, waits}, "Pending init=False ready=False i:running a:PodInitializing b:PodInitializing"},
		"all run":         {vm.StateRunning, 0, [3]vm.ContainerStatus{over(0), runs, runs}, "Running init=True ready=True i:Completed a:running b:running"},
		"one crash-loops": {vm.StateRunning, 0, [3]vm.ContainerStatus{over(0), runs, crashed}, "Running init=True ready=False i:Completed a:running b:CrashLoopBackOff,2,last=3"},
		"one is done":     {vm.StateRunning, 0, [3]vm.ContainerStatus{over(0), runs, over(0)}, "Running init=True ready=False i:Completed a:running b:Completed"},
		"succeeded":       {vm.StateStopped, 0, [3]vm.ContainerStatus{over(0), over(0), over(0)}, "Succeeded init=True ready=False i:Completed a:Completed b:Completed"},
		"failed":          {vm.StateStopped, 4, [3]vm.ContainerStatus{over(0), over(0), over(4)}, "Failed init=True ready=False i:Completed a:Completed b:Error"},
		"asleep":          {vm.StateHibernated, 0, [3]vm.ContainerStatus{over(0), asleep, over(0)}, "Running init=True ready=False i:Completed a:Hibernated,2,last=3 b:Completed"},
		"init failed":     {vm.StateStopped, 2, [3]vm.ContainerStatus{over(2), waits, waits}, "Failed init=False ready=False i:Error a:PodInitializing b:PodInitializing"},
	} {
		t.Run(name, func(t *testing.T) {
			rec := &vm.Record{ID: vm.NewID(), State: tc.state, ImageType: vm.ImageOCI, AgentReady: true}
			if tc.state == vm.StateStopped {
				rec.ExitCode, rec.Reason = &tc.code, vm.ReasonExited
			}
			p := &corev1.Pod{Spec: corev1.PodSpec{
				InitContainers: []corev1.Container{{Name: "i"}}, Containers: []corev1.Container{{Name: "a"}, {Name: "b"}},
			}}
			for i, n := range []string{"i", "a", "b"} {
				rec.Containers = append(rec.Containers, vm.ContainerRecord{Name: n, Status: tc.of[i]})
			}
			s := view{pod: p, rec: rec, ready: true, ip: "10.0.0.2", asleep: tc.state == vm.StateHibernated}.status(corev1.PodStatus{}, at)
			got := []string{string(s.Phase)}
			for _, kind := range []corev1.PodConditionType{corev1.PodInitialized, corev1.PodReady} {
				for _, c := range s.Conditions {
					if c.Type == kind {
						got = append(got, map[corev1.PodConditionType]string{corev1.PodInitialized: "init=", corev1.PodReady: "ready="}[kind]+string(c.Status))
					}
				}
			}
			for _, c := range append(s.InitContainerStatuses, s.ContainerStatuses...) {
				got = append(got, c.Name+":"+brief(c))
			}
			if s := strings.Join(got, " "); s != tc.want {
				t.Errorf("\n got %s\nwant %s", s, tc.want)
			}
		})
	}
}

func brief(c corev1.ContainerStatus) string {
	switch {
	case c.State.Running != nil:
		return "running"
	case c.State.Terminated != nil:
		return c.State.Terminated.Reason
	case c.RestartCount > 0:
		return c.State.Waiting.Reason + "," + strconv.Itoa(int(c.RestartCount)) + ",last=" + strconv.Itoa(int(c.LastTerminationState.Terminated.ExitCode))
	}
	return c.State.Waiting.Reason
}
