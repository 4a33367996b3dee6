package podstatus

import (
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"cocoonstack.io/cocoon/internal/testkit/diff"
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
		state vm.State // state of the VM
		code  int      // exit code of a stopped VM
		of    [3]vm.ContainerStatus
		want  string // phase, conditions and containers
	}{
		"not told yet":    {vm.StateRunning, 0, [3]vm.ContainerStatus{}, "Pending init=False ready=False i:PodInitializing a:PodInitializing b:PodInitializing"},
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
			v := View{Pod: p, Record: rec, Reach: Reach{Ready: true}, IP: "10.0.0.2", Asleep: tc.state == vm.StateHibernated}
			s := v.Status(corev1.PodStatus{}, at)
			if later := v.Status(s, at.Add(time.Hour)); !equality.Semantic.DeepEqual(later, s) {
				t.Errorf("the status of the same view changes: %s", diff.Of(s, later))
			}
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

func TestStatusOfOneContainer(t *testing.T) {
	at := time.Unix(1000, 0)
	well := func(v *View) { v.Reach.Ready = true }
	for name, tc := range map[string]struct {
		rec    vm.Record // without a state: no VM exists
		change func(*View)
		want   string // phase and reason, container, and why the pod is not ready
	}{
		"no VM yet":   {want: "Pending c:ContainerCreating containers with unready status: [c]"},
		"waits":       {change: func(v *View) { v.Pause = Pause{Reason: "ErrImagePull"} }, want: "Pending c:ErrImagePull containers with unready status: [c]"},
		"refused":     {change: func(v *View) { v.Pause = Pause{Reason: "CreateContainerConfigError", Refused: "PodNotSupported"} }, want: "Pending/PodNotSupported c:CreateContainerConfigError containers with unready status: [c]"},
		"evicted":     {change: func(v *View) { v.Verdict = &Verdict{Reason: "VMGone"} }, want: "Failed/VMGone"},
		"runs":        {rec: vm.Record{State: vm.StateRunning}, change: well, want: "Running c:running"},
		"no answer":   {rec: vm.Record{State: vm.StateRunning}, change: func(v *View) { v.Reach.Why = "no answer" }, want: "Running c:running containers with unready status: [c]: no answer"},
		"disk full":   {rec: vm.Record{State: vm.StateRunning, Reason: vm.ReasonDiskFull, Message: "no room"}, change: well, want: "Running c:running containers with unready status: [c]: no room"},
		"disk error":  {rec: vm.Record{State: vm.StateRunning, Reason: vm.ReasonDiskError}, change: well, want: "Running c:running"},
		"powered off": {rec: vm.Record{State: vm.StateStopped, Reason: vm.ReasonPoweredOff}, want: "Succeeded c:Completed"},
		"lost":        {rec: vm.Record{State: vm.StateError}, want: "Failed c:Error"},
		"cut":         {rec: vm.Record{State: vm.StateStopped, Reason: vm.ReasonStopped}, change: func(v *View) { v.Cut = true }, want: "Failed/VMStopped c:VMStopped"},
		"again":       {rec: vm.Record{State: vm.StateError}, change: func(v *View) { v.Again = true }, want: "Running c:ContainerCreating containers with unready status: [c]"},
		"elsewhere":   {change: func(v *View) { v.Asleep = true }, want: "Running c:Hibernated containers with unready status: [c]: the VM is hibernated"},
	} {
		t.Run(name, func(t *testing.T) {
			v := View{Pod: &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}}}}}
			if tc.rec.State != "" {
				tc.rec.ImageType = vm.ImageDisk
				v.Record = &tc.rec
			}
			if tc.change != nil {
				tc.change(&v)
			}
			s := v.Status(corev1.PodStatus{}, at)
			got := string(s.Phase)
			if s.Reason != "" {
				got += "/" + s.Reason
			}
			for _, c := range s.ContainerStatuses {
				got += " " + c.Name + ":" + brief(c)
			}
			for _, c := range s.Conditions {
				if c.Type == corev1.PodReady && c.Message != "" {
					got += " " + c.Message
				}
			}
			if got != tc.want {
				t.Errorf("\n got %s\nwant %s", got, tc.want)
			}
		})
	}
}

// The name of an image is known later than the container that runs it, and is in the status once it is known, also after the node
// has forgotten it.
func TestImageOfAnEphemeralContainer(t *testing.T) {
	pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}}}}
	c := corev1.EphemeralContainer{}
	c.Name, c.Image = "debugger", "busybox"
	pod.Spec.EphemeralContainers = []corev1.EphemeralContainer{c}
	rec := vm.Record{ID: "v1", State: vm.StateRunning, ImageType: vm.ImageOCI, Ephemeral: []vm.Ephemeral{{Record: vm.ContainerRecord{
		Name: "debugger", ImageDigest: "sha256:a", Status: vm.ContainerStatus{State: vm.ContainerRunning},
	}}}}
	var status corev1.PodStatus
	for _, step := range []struct{ known, want string }{
		{"", "busybox"},
		{"busybox:latest", "busybox:latest"},
		{"", "busybox:latest"},
	} {
		v := View{Pod: pod, Record: &rec, Images: map[string]Image{"debugger": {Name: step.known, ID: "sha256:a"}}}
		status = v.Status(status, time.Unix(1000, 0))
		if got := status.EphemeralContainerStatuses; len(got) != 1 || got[0].Image != step.want {
			t.Errorf("known as %q: %+v, want the image %s", step.known, got, step.want)
		}
	}
}

// The user of a container is told as soon as the container has started: as its guest tells, or where the pod says it alone.
func TestUserOfAContainer(t *testing.T) {
	strict := &vm.Security{StrictGroups: true, Groups: []int64{4000, 3000, 2000}}
	const told = "SIGUSR1" // marks the case
	for name, tc := range map[string]struct {
		process vm.Process
		started time.Time
		want    *corev1.LinuxContainerUser
	}{
		"all is said":         {vm.Process{User: "1000:3000", Security: strict}, time.Unix(1, 0), &corev1.LinuxContainerUser{UID: 1000, GID: 3000, SupplementalGroups: []int64{3000, 4000, 2000}}},
		"not started":         {vm.Process{User: "1000:3000", Security: strict}, time.Time{}, nil},
		"groups of the image": {vm.Process{User: "1000:3000", Security: &vm.Security{}}, time.Unix(1, 0), nil},
		"user of the image":   {vm.Process{User: ":3000", Security: strict}, time.Unix(1, 0), nil},
		"group of the image":  {vm.Process{User: "1000", Security: strict}, time.Unix(1, 0), nil},
		"a name":              {vm.Process{User: "nobody:3000", Security: strict}, time.Unix(1, 0), nil},
		"earlier record":      {vm.Process{User: "1000:3000"}, time.Unix(1, 0), nil},
		"the guest tells":     {vm.Process{User: "web", StopSignal: told}, time.Unix(1, 0), &corev1.LinuxContainerUser{UID: 7, GID: 8, SupplementalGroups: []int64{8, 9}}},
	} {
		status := vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: tc.started}
		if tc.process.StopSignal == told {
			status.User = &vm.ContainerUser{UID: 7, GID: 8, Groups: []int64{8, 9}}
		}
		rec := &vm.Record{State: vm.StateRunning, ImageType: vm.ImageOCI, Containers: []vm.ContainerRecord{{Name: "a", Process: tc.process, Status: status}}}
		v := View{Pod: &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "a"}}}}, Record: rec}
		var got *corev1.LinuxContainerUser
		if u := v.Status(corev1.PodStatus{}, time.Unix(2, 0)).ContainerStatuses[0].User; u != nil {
			got = u.Linux
		}
		if d := diff.Of(tc.want, got); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}

// The status of a container that mounts the files of an image says which image that is, once its guest knows the container.
func TestStatusOfImageVolumes(t *testing.T) {
	mounts := []corev1.VolumeMount{{Name: "share", MountPath: "/share"}, {Name: "files", MountPath: "/files"}}
	pod := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", VolumeMounts: mounts}, {Name: "d", VolumeMounts: mounts[:1]}}}}
	running := vm.ContainerStatus{State: vm.ContainerRunning}
	rec := vm.Record{ID: "v1", State: vm.StateRunning, ImageType: vm.ImageOCI, AgentReady: true, Containers: []vm.ContainerRecord{{Name: "c"}, {Name: "d"}}}
	v := View{Pod: pod, Record: &rec, Images: map[string]Image{VolumeKey("files"): {Name: "demo", ID: "demo@sha256:a"}}}
	for _, c := range v.Status(corev1.PodStatus{}, time.Unix(1000, 0)).ContainerStatuses {
		if len(c.VolumeMounts) > 0 {
			t.Errorf("before the guest is up: %+v", c.VolumeMounts)
		}
	}
	rec.Containers[0].Status, rec.Containers[1].Status = running, running
	all := v.Status(corev1.PodStatus{}, time.Unix(1000, 0)).ContainerStatuses
	want := []corev1.VolumeMountStatus{
		{Name: "share", MountPath: "/share"},
		{Name: "files", MountPath: "/files", ReadOnly: true, VolumeStatus: &corev1.VolumeStatus{Image: &corev1.ImageVolumeStatus{ImageRef: "demo@sha256:a"}}},
	}
	if !reflect.DeepEqual(all[0].VolumeMounts, want) || len(all[1].VolumeMounts) > 0 {
		t.Errorf("got %+v and %+v", all[0].VolumeMounts, all[1].VolumeMounts)
	}
}
