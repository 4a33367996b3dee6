package virtualmachine

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func machine(strategy v1.VirtualMachineRunStrategy, change ...func(*v1.VirtualMachine)) *v1.VirtualMachine {
	vm := &v1.VirtualMachine{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "ns", UID: "vm", Generation: 3},
		Spec:       v1.VirtualMachineSpec{RunStrategy: &strategy, Template: &v1.VirtualMachineInstanceTemplateSpec{}},
		Status:     v1.VirtualMachineStatus{RunStrategy: strategy},
	}
	for _, f := range change {
		f(vm)
	}
	return vm
}

// fresh is a machine that the controller has not seen yet.
func fresh(vm *v1.VirtualMachine) { vm.Status = v1.VirtualMachineStatus{} }

func asks(actions ...string) func(*v1.VirtualMachine) {
	return func(vm *v1.VirtualMachine) {
		for _, a := range actions {
			action, uid, _ := strings.Cut(a, " ")
			r := v1.VirtualMachineStateChangeRequest{Action: v1.StateChangeRequestAction(action)}
			if uid != "" {
				r.UID = ptr[types.UID](uid)
			}
			vm.Status.StateChangeRequests = append(vm.Status.StateChangeRequests, r)
		}
	}
}

func ptr[T ~string](s string) *T { t := T(s); return &t }

func failed(times int, after time.Duration) func(*v1.VirtualMachine) {
	return func(vm *v1.VirtualMachine) {
		t := metav1.NewTime(now.Add(after))
		vm.Status.StartFailure = &v1.VirtualMachineStartFailure{ConsecutiveFailCount: times, LastFailedVMIUID: "old", RetryAfterTimestamp: &t}
	}
}

// in is an instance that has gone through the phases.
func in(phases ...v1.VirtualMachineInstancePhase) *v1.VirtualMachineInstance {
	vmi := &v1.VirtualMachineInstance{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "ns", UID: "i"}}
	for _, p := range phases {
		kubevirt.SetPhase(&vmi.Status, p, now)
	}
	return vmi
}

func with(vmi *v1.VirtualMachineInstance, kind v1.VirtualMachineInstanceConditionType, status corev1.ConditionStatus, reason string) *v1.VirtualMachineInstance {
	vmi.Status.Conditions = append(vmi.Status.Conditions, v1.VirtualMachineInstanceCondition{Type: kind, Status: status, Reason: reason})
	return vmi
}

func leaving(vmi *v1.VirtualMachineInstance) *v1.VirtualMachineInstance {
	vmi.DeletionTimestamp = &metav1.Time{Time: now}
	return vmi
}

func deleted(vm *v1.VirtualMachine) { vm.DeletionTimestamp = &metav1.Time{Time: now} }

func TestDecide(t *testing.T) {
	running := in(v1.Pending, v1.Running)
	crashed := in(v1.Pending, v1.Running, v1.Failed)
	never := in(v1.Pending, v1.Failed)
	done := in(v1.Pending, v1.Running, v1.Succeeded)
	for name, c := range map[string]struct {
		vm   *v1.VirtualMachine
		vmi  *v1.VirtualMachineInstance
		want string // what happens, printable status, requests that are left
	}{
		"always, none":             {machine(v1.RunStrategyAlways), nil, "start Starting []"},
		"always, running":          {machine(v1.RunStrategyAlways), running, " Running []"},
		"always, crashed":          {machine(v1.RunStrategyAlways), crashed, "stop Stopped []"},
		"always, powered off":      {machine(v1.RunStrategyAlways), done, "stop Stopped []"},
		"always, never ran":        {machine(v1.RunStrategyAlways), never, "stop CrashLoopBackOff []"},
		"always, waits":            {machine(v1.RunStrategyAlways, failed(2, 7*time.Second)), nil, "wait 7s CrashLoopBackOff []"},
		"always, has waited":       {machine(v1.RunStrategyAlways, failed(2, -time.Second)), nil, "start Starting []"},
		"always, restart":          {machine(v1.RunStrategyAlways, asks("Stop i", "Start")), running, "stop Stopping [Stop Start]"},
		"always, restarts":         {machine(v1.RunStrategyAlways, asks("Stop i", "Start")), leaving(in(v1.Running)), " Stopping [Stop Start]"},
		"always, restarted":        {machine(v1.RunStrategyAlways, asks("Stop old", "Start")), nil, "start Starting []"},
		"always, stop of another":  {machine(v1.RunStrategyAlways, asks("Stop old")), running, " Running []"},
		"running: true":            {machine("", func(vm *v1.VirtualMachine) { yes := true; vm.Spec.RunStrategy, vm.Spec.Running = nil, &yes }), nil, "start Starting []"},
		"both":                     {machine(v1.RunStrategyAlways, func(vm *v1.VirtualMachine) { yes := true; vm.Spec.Running = &yes }), nil, " Stopped []"},
		"halted, none":             {machine(v1.RunStrategyHalted, asks("Start")), nil, " Stopped []"},
		"halted, running":          {machine(v1.RunStrategyHalted), running, "stop Stopping []"},
		"halted, leaving":          {machine(v1.RunStrategyHalted), leaving(in(v1.Running)), " Stopping []"},
		"manual, none":             {machine(v1.RunStrategyManual, fresh), nil, " Stopped []"},
		"manual, asked":            {machine(v1.RunStrategyManual, asks("Start")), nil, "start Starting []"},
		"manual, started":          {machine(v1.RunStrategyManual, asks("Start")), in(v1.Pending), " Starting []"},
		"manual, crashed":          {machine(v1.RunStrategyManual), crashed, " Stopped []"},
		"manual, asked again":      {machine(v1.RunStrategyManual, asks("Start")), done, "stop Stopped [Start]"},
		"manual, stop":             {machine(v1.RunStrategyManual, asks("Stop i")), running, "stop Stopping [Stop]"},
		"manual, stopped":          {machine(v1.RunStrategyManual, asks("Stop i")), nil, " Stopped []"},
		"rerun, first":             {machine(v1.RunStrategyRerunOnFailure, fresh), nil, "start Starting []"},
		"rerun, crashed":           {machine(v1.RunStrategyRerunOnFailure), crashed, "stop Stopped [Start]"},
		"rerun, after the crash":   {machine(v1.RunStrategyRerunOnFailure, asks("Start")), nil, "start Starting []"},
		"rerun, powered off":       {machine(v1.RunStrategyRerunOnFailure), done, " Stopped []"},
		"rerun, stopped":           {machine(v1.RunStrategyRerunOnFailure, asks("Stop i")), nil, " Stopped []"},
		"once, first":              {machine(v1.RunStrategyOnce, fresh), nil, "start Starting []"},
		"once, again":              {machine(v1.RunStrategyOnce), nil, " Stopped []"},
		"once, done":               {machine(v1.RunStrategyOnce), done, " Stopped []"},
		"deleted":                  {machine(v1.RunStrategyAlways, deleted), running, "stop Terminating []"},
		"no room":                  {machine(v1.RunStrategyAlways), with(in(v1.Scheduling), "PodScheduled", "False", "Unschedulable"), " ErrorUnschedulable []"},
		"no image":                 {machine(v1.RunStrategyAlways), with(in(v1.Scheduled), v1.VirtualMachineInstanceSynchronized, "False", "ImagePullBackOff"), " ImagePullBackOff []"},
		"paused":                   {machine(v1.RunStrategyAlways), with(in(v1.Running), v1.VirtualMachineInstancePaused, "True", ""), " Paused []"},
		"restored":                 {machine(v1.RunStrategyManual, asks("Start"), func(vm *v1.VirtualMachine) { vm.Status.RestoreInProgress = ptr[string]("back") }), nil, " Stopped [Start]"},
		"receives":                 {machine(v1.RunStrategyWaitAsReceiver), nil, " Stopped []"},
		"once, waits and is later": {machine(v1.RunStrategyOnce, fresh, failed(1, time.Second)), nil, "wait 1s CrashLoopBackOff []"},
	} {
		s := decide(seen{vm: c.vm, template: c.vm.Spec.Template, vmi: c.vmi, now: now})
		what := ""
		switch {
		case s.start && s.stop:
			what = "both"
		case s.start:
			what = "start"
		case s.stop:
			what = "stop"
		case s.wait > 0:
			what = "wait " + s.wait.String()
		}
		left := []string{}
		for _, r := range s.status.StateChangeRequests {
			left = append(left, string(r.Action))
		}
		if got := fmt.Sprintf("%s %s %v", what, s.status.PrintableStatus, left); got != c.want {
			t.Errorf("%s: %s; want %s", name, got, c.want)
		}
		if again := decide(seen{vm: c.vm, template: c.vm.Spec.Template, vmi: c.vmi, now: now}); again.start != s.start || again.stop != s.stop {
			t.Errorf("%s: the decision changes the objects", name)
		}
		if wait := s.status.RunStrategy == v1.RunStrategyOnce && !s.start && c.vm.Status.RunStrategy == ""; wait {
			t.Errorf("%s: the machine will never start", name)
		}
	}
}

// The pauses grow as KubeVirt's do, an instance counts once, and one that ran ends the count.
func TestPauses(t *testing.T) {
	vm := machine(v1.RunStrategyAlways)
	var pauses []string
	for n := range 8 {
		vmi := in(v1.Pending, v1.Failed)
		vmi.UID = types.UID(fmt.Sprint(n))
		for range 2 {
			vm.Status = decide(seen{vm: vm, template: vm.Spec.Template, vmi: vmi, now: now, jitter: 1}).status
		}
		pauses = append(pauses, vm.Status.StartFailure.RetryAfterTimestamp.Sub(now).String())
	}
	if got, want := strings.Join(pauses, " "), "15s 1m0s 2m15s 4m0s 5m0s 5m0s 5m0s 5m0s"; got != want {
		t.Errorf("%s; want %s", got, want)
	}
	if n := vm.Status.StartFailure.ConsecutiveFailCount; n != 8 {
		t.Errorf("%d failures in a row", n)
	}
	if s := decide(seen{vm: vm, template: vm.Spec.Template, vmi: in(v1.Running), now: now}); s.status.StartFailure != nil {
		t.Errorf("an instance runs: %+v", s.status.StartFailure)
	}
}

func TestConditions(t *testing.T) {
	vm := machine(v1.RunStrategyAlways)
	find := func(s step, kind v1.VirtualMachineConditionType) string {
		for _, c := range s.status.Conditions {
			if c.Type == kind {
				return string(c.Status) + " " + c.Reason
			}
		}
		return ""
	}
	s := decide(seen{vm: vm, template: vm.Spec.Template, now: now})
	if find(s, v1.VirtualMachineReady) != "False GuestNotRunning" || s.status.Ready || s.status.Created {
		t.Errorf("none yet: %+v", s.status)
	}
	// The instance that it has just got tells nothing new.
	vm.Status = s.status
	vm.Status.Created = true
	if s := decide(seen{vm: vm, template: vm.Spec.Template, vmi: in(v1.Pending), now: now.Add(time.Minute)}); !apiequality.Semantic.DeepEqual(s.status, vm.Status) {
		t.Errorf("one that waits: %s", diff.Of(vm.Status, s.status))
	}
	if s := decide(seen{vm: machine(v1.RunStrategyHalted), template: vm.Spec.Template, now: now}); find(s, v1.VirtualMachineReady) != "False VMINotExists" {
		t.Errorf("none: %+v", s.status)
	}
	ready := with(in(v1.Running), v1.VirtualMachineInstanceReady, "True", "")
	vm.Status = s.status
	if s = decide(seen{vm: vm, template: vm.Spec.Template, vmi: ready, now: now.Add(time.Hour)}); find(s, v1.VirtualMachineReady) != "True " || !s.status.Ready || !s.status.Created || s.status.ObservedGeneration != 3 {
		t.Errorf("ready: %+v", s.status)
	}
	if find(s, v1.VirtualMachineRestartRequired) != "" {
		t.Errorf("nothing has changed: %+v", s.status)
	}
	vm.Spec.Template.Spec.Volumes = append(vm.Spec.Template.Spec.Volumes, v1.Volume{Name: "data"})
	vm.Spec.Template.Spec.Domain.Devices.Disks = append(vm.Spec.Template.Spec.Domain.Devices.Disks, v1.Disk{Name: "data"})
	if s = decide(seen{vm: vm, template: vm.Spec.Template, vmi: ready, now: now}); find(s, v1.VirtualMachineRestartRequired) != "True RestartRequired" {
		t.Errorf("the template has one more volume: %+v", s.status)
	}
	ready.Status.VolumeStatus = []v1.VolumeStatus{{Name: "data", HotplugVolume: &v1.HotplugVolumeStatus{}}}
	if s = decide(seen{vm: vm, template: vm.Spec.Template, vmi: ready, now: now}); find(s, v1.VirtualMachineRestartRequired) != "" {
		t.Errorf("the volume was added to the instance, too: %+v", s.status)
	}
	vm.Spec.Template.Spec.Hostname = "other"
	if s = decide(seen{vm: vm, template: vm.Spec.Template, vmi: ready, now: now}); find(s, v1.VirtualMachineRestartRequired) != "True RestartRequired" {
		t.Errorf("the template has changed: %+v", s.status)
	}
	vm.Status = decide(seen{vm: vm, template: vm.Spec.Template, now: now, refusal: "spec.x: Forbidden", reason: "NotSupported"}).status
	if s = decide(seen{vm: vm, template: vm.Spec.Template, now: now, refusal: "spec.x: Forbidden", reason: "NotSupported"}); find(s, v1.VirtualMachineFailure) != "True NotSupported" || s.start || s.status.PrintableStatus != v1.VirtualMachineStatusStopped {
		t.Errorf("refused: %+v", s)
	}
	if s = decide(seen{vm: vm, template: vm.Spec.Template, now: now}); find(s, v1.VirtualMachineFailure) != "" || !s.start {
		t.Errorf("no longer refused: %+v", s)
	}
}

// A refused machine forgets nothing: it starts once it has been changed.
func TestRefusedKeepsItsRequests(t *testing.T) {
	for name, vm := range map[string]*v1.VirtualMachine{
		"asked": machine(v1.RunStrategyManual, asks("Start")), "once": machine(v1.RunStrategyOnce, fresh), "rerun": machine(v1.RunStrategyRerunOnFailure, fresh),
	} {
		s := decide(seen{vm: vm, template: vm.Spec.Template, now: now, refusal: "no"})
		if s.start {
			t.Errorf("%s: it starts", name)
		}
		vm.Status = s.status
		if s = decide(seen{vm: vm, template: vm.Spec.Template, now: now}); !s.start {
			t.Errorf("%s: it does not start: %+v", name, s.status)
		}
	}
}

// A machine that is off and is asked to start paused becomes one that always runs, and its next instance starts paused. The instance
// differs from the template in that only, which asks for no restart.
func TestStartPaused(t *testing.T) {
	paused := func(vm *v1.VirtualMachine) {
		vm.Status.StateChangeRequests = []v1.VirtualMachineStateChangeRequest{{Action: v1.StartRequest, Data: map[string]string{"paused": "true"}}}
	}
	off, no := machine(v1.RunStrategyHalted, paused), false
	old := machine("", paused, func(vm *v1.VirtualMachine) { vm.Spec.RunStrategy, vm.Spec.Running = nil, &no })
	for name, vm := range map[string]*v1.VirtualMachine{"runStrategy": off, "running": old} {
		if !switchesOn(vm, nil) || switchesOn(vm, in(v1.Succeeded)) {
			t.Errorf("%s: it is switched on while there is an instance, or is not", name)
		}
		switchOn(vm)
		if is, err := vm.RunStrategy(); err != nil || is != v1.RunStrategyAlways || switchesOn(vm, nil) {
			t.Errorf("%s: it is %s, %v", name, is, err)
		}
		s := decide(seen{vm: vm, now: now})
		made := instance(vm, vm.Spec.Template, kubevirt.Base{}, now)
		if !s.start || made.Spec.StartStrategy == nil || *made.Spec.StartStrategy != v1.StartStrategyPaused {
			t.Errorf("%s: it starts: %v, %+v", name, s.start, made.Spec.StartStrategy)
		}
		vm.Status = s.status
		kubevirt.SetPhase(&made.Status, v1.Running, now)
		with(made, v1.VirtualMachineInstancePaused, "True", "PausedByUser")
		s = decide(seen{vm: vm, template: vm.Spec.Template, vmi: made, now: now})
		var kinds []string
		for _, c := range s.status.Conditions {
			kinds = append(kinds, string(c.Type)+" "+c.Reason)
		}
		if !strings.Contains(strings.Join(kinds, ","), "Paused PausedByUser") || strings.Contains(strings.Join(kinds, ","), "RestartRequired") || s.status.PrintableStatus != v1.VirtualMachineStatusPaused {
			t.Errorf("%s: conditions %q, %s", name, kinds, s.status.PrintableStatus)
		}
		vm.Status = s.status
		made.Status.Conditions = nil
		if s = decide(seen{vm: vm, template: vm.Spec.Template, vmi: made, now: now}); s.status.PrintableStatus != v1.VirtualMachineStatusRunning || instance(vm, vm.Spec.Template, kubevirt.Base{}, now).Spec.StartStrategy != nil {
			t.Errorf("%s: unpaused it is %s", name, s.status.PrintableStatus)
		}
		for _, c := range s.status.Conditions {
			if c.Type == v1.VirtualMachinePaused {
				t.Errorf("%s: unpaused it has %+v", name, c)
			}
		}
	}
	if switchesOn(machine(v1.RunStrategyHalted, asks("Start")), nil) || switchesOn(machine(v1.RunStrategyHalted, paused, deleted), nil) || switchesOn(machine(v1.RunStrategyManual, paused), nil) {
		t.Error("a machine is switched on that nobody asked to start paused, or that is deleted, or that is not off")
	}
}

// A machine starts when its volumes are complete, or wait for its pod. What it waits for is in its status, in KubeVirt's order.
func TestVolumes(t *testing.T) {
	unschedulable := in(v1.Pending, v1.Scheduling)
	unschedulable.Status.Conditions = []v1.VirtualMachineInstanceCondition{{Type: v1.VirtualMachineInstanceConditionType(corev1.PodScheduled), Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
	noClaim := in(v1.Pending)
	noClaim.Status = kubevirt.Wait(noClaim, kubevirt.ReasonNoClaim, "it does not exist", now)
	of := func(phase v1beta1.DataVolumePhase, running string) data {
		var d data
		d.add(&v1beta1.DataVolume{Status: v1beta1.DataVolumeStatus{Phase: phase, Conditions: []v1beta1.DataVolumeCondition{{Type: v1beta1.DataVolumeRunning, Status: corev1.ConditionFalse, Reason: running}}}})
		return d
	}
	for name, c := range map[string]struct {
		strategy v1.VirtualMachineRunStrategy
		vmi      *v1.VirtualMachineInstance
		data     data
		want     string // starts, printable status
	}{
		"complete":                   {v1.RunStrategyAlways, nil, of(v1beta1.Succeeded, "Completed"), "true Starting"},
		"waits for its pod":          {v1.RunStrategyAlways, nil, of(v1beta1.WaitForFirstConsumer, ""), "true WaitingForVolumeBinding"},
		"waits, has a pod":           {v1.RunStrategyAlways, in(v1.Pending, v1.Scheduling), of(v1beta1.WaitForFirstConsumer, ""), "false WaitingForVolumeBinding"},
		"waits, off":                 {v1.RunStrategyHalted, nil, of(v1beta1.WaitForFirstConsumer, ""), "false Stopped"},
		"is imported":                {v1.RunStrategyAlways, nil, of(v1beta1.ImportInProgress, ""), "false Provisioning"},
		"is imported, off":           {v1.RunStrategyHalted, nil, of(v1beta1.ImportInProgress, ""), "false Provisioning"},
		"is new":                     {v1.RunStrategyAlways, nil, of("", ""), "false Provisioning"},
		"has a pod, is imported":     {v1.RunStrategyAlways, in(v1.Pending, v1.Scheduling), of(v1beta1.ImportInProgress, ""), "false Provisioning"},
		"cannot be imported":         {v1.RunStrategyAlways, nil, of(v1beta1.ImportInProgress, "Error"), "false DataVolumeError"},
		"failed":                     {v1.RunStrategyAlways, unschedulable, of(v1beta1.Failed, ""), "false DataVolumeError"},
		"unschedulable, is imported": {v1.RunStrategyAlways, unschedulable, of(v1beta1.ImportInProgress, ""), "false ErrorUnschedulable"},
		"no claim":                   {v1.RunStrategyAlways, noClaim, of(v1beta1.Failed, ""), "false ErrorPvcNotFound"},
		"runs":                       {v1.RunStrategyAlways, in(v1.Pending, v1.Running), of(v1beta1.Failed, ""), "false Running"},
	} {
		vm := machine(c.strategy)
		s := decide(seen{vm: vm, template: vm.Spec.Template, vmi: c.vmi, data: c.data, now: now})
		if got := fmt.Sprint(s.start, " ", s.status.PrintableStatus); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	once := machine(v1.RunStrategyOnce, fresh)
	held := decide(seen{vm: once, template: once.Spec.Template, data: of(v1beta1.ImportInProgress, ""), now: now})
	once.Status = held.status
	if s := decide(seen{vm: once, template: once.Spec.Template, data: of(v1beta1.Succeeded, ""), now: now}); held.start || !s.start {
		t.Errorf("a machine that runs once: %v, then %v", held.start, s.start)
	}
	asked := machine(v1.RunStrategyManual, asks("Start"))
	if s := decide(seen{vm: asked, template: asked.Spec.Template, data: of(v1beta1.ImportInProgress, ""), now: now}); s.start || len(s.status.StateChangeRequests) != 1 {
		t.Errorf("a request to start is lost: %+v", s)
	}
}

// A new machine tells that it starts if that takes long. One that has told something before tells it at once.
func TestSilence(t *testing.T) {
	for what, tc := range map[string]struct {
		vm    *v1.VirtualMachine
		vmi   *v1.VirtualMachineInstance
		after time.Duration
		want  time.Duration
	}{
		"starts":       {machine(v1.RunStrategyAlways, fresh), nil, 0, kubevirt.Quiet},
		"has started":  {machine(v1.RunStrategyAlways, fresh), in(v1.Pending), time.Second, kubevirt.Quiet - time.Second},
		"takes long":   {machine(v1.RunStrategyAlways, fresh), in(v1.Pending), kubevirt.Quiet, 0},
		"runs":         {machine(v1.RunStrategyAlways, fresh), in(v1.Running), 0, 0},
		"has failed":   {machine(v1.RunStrategyAlways, fresh), in(v1.Failed), 0, 0},
		"told before":  {machine(v1.RunStrategyAlways), in(v1.Pending), 0, 0},
		"runs once":    {machine(v1.RunStrategyOnce, fresh), nil, 0, 0},
		"is to be off": {machine(v1.RunStrategyHalted, fresh), nil, 0, 0},
	} {
		if tc.vmi != nil {
			tc.vmi.CreationTimestamp = metav1.NewTime(now)
		}
		at := now.Add(tc.after)
		s := decide(seen{vm: tc.vm, template: tc.vm.Spec.Template, vmi: tc.vmi, now: at})
		if got := silence(tc.vm, tc.vmi, s, at); got != tc.want {
			t.Errorf("%s: %s, want %s", what, got, tc.want)
		}
	}
}
