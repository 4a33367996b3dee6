package virtualmachineinstancereplicaset

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func after(d time.Duration) time.Time { return epoch.Add(d) }

// webSet is a set that wants n instances with the label app=web.
func webSet(n int32) *v1.VirtualMachineInstanceReplicaSet {
	guest := resource.MustParse("128Mi")
	set := &v1.VirtualMachineInstanceReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "set"}}
	set.Spec.Replicas = &n
	set.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	set.Spec.Template = &v1.VirtualMachineInstanceTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}}}
	set.Spec.Template.Spec.Domain.Memory = &v1.Memory{Guest: &guest}
	set.Spec.Template.Spec.Volumes = []v1.Volume{{Name: "root", VolumeSource: v1.VolumeSource{ContainerDisk: &v1.ContainerDiskSource{Image: "a"}}}}
	return set
}

// instance describes an instance of webSet: its phases with the seconds at which they began, and words. "Running@5 ready".
func instance(name, text string) *v1.VirtualMachineInstance {
	vmi := kubevirt.Instance(webSet(0), kind, webSet(0).Spec.Template, name, epoch)
	vmi.UID, vmi.CreationTimestamp = types.UID(name), metav1.NewTime(epoch)
	for _, word := range strings.Fields(text) {
		phase, at, _ := strings.Cut(word, "@")
		seconds := 0
		_, _ = fmt.Sscan(at, &seconds)
		switch phase {
		case "ready":
			vmi.Status.Conditions = []v1.VirtualMachineInstanceCondition{{Type: v1.VirtualMachineInstanceReady, Status: corev1.ConditionTrue}}
		case "deleted":
			vmi.DeletionTimestamp = &metav1.Time{Time: after(time.Duration(seconds) * time.Second)}
		case "free":
			vmi.OwnerReferences = nil
		case "theirs":
			vmi.OwnerReferences[0].UID = "other"
		case "db":
			vmi.Labels["app"] = "db"
		case "patient":
			grace := int64(120)
			vmi.Spec.TerminationGracePeriodSeconds = &grace
		case "other-spec":
			vmi.Spec.Hostname = "h"
		case "made":
			vmi.CreationTimestamp = metav1.NewTime(after(time.Duration(seconds) * time.Second))
		default:
			if phase != string(v1.Pending) {
				vmi.Status.NodeName = "n"
			}
			kubevirt.SetPhase(&vmi.Status, v1.VirtualMachineInstancePhase(phase), after(time.Duration(seconds)*time.Second))
		}
	}
	return vmi
}

func look(set *v1.VirtualMachineInstanceReplicaSet, now time.Time, all ...*v1.VirtualMachineInstance) seen {
	selector, err := kubevirt.Selector(set)
	if err != nil {
		panic(err)
	}
	return seen{set: set, selector: selector, all: all, now: now}
}

// brief is a step in a line: +adopted ^released -deleted, the number to create, the wait, and the status.
func brief(s step) string {
	var words []string
	for sign, all := range map[string][]*v1.VirtualMachineInstance{"+": s.adopt, "^": s.release, "-": s.remove} {
		for _, vmi := range all {
			words = append(words, sign+vmi.Name)
		}
	}
	slices.Sort(words)
	words = append(words, fmt.Sprintf("create=%d", s.create))
	if s.wait > 0 {
		words = append(words, "wait="+s.wait.String())
	}
	words = append(words, fmt.Sprintf("status=%d/%d", s.status.ReadyReplicas, s.status.Replicas))
	for _, c := range s.status.Conditions {
		words = append(words, fmt.Sprintf("%s=%s/%s", c.Type, c.Status, c.Reason))
	}
	return strings.Join(words, " ")
}

func TestDecide(t *testing.T) {
	running := func(name string) *v1.VirtualMachineInstance { return instance(name, "Running@0 ready") }
	paused, deleted, none := webSet(2), webSet(2), webSet(2)
	paused.Spec.Paused, deleted.DeletionTimestamp, none.Spec.Replicas = true, &metav1.Time{Time: epoch}, nil
	for what, tc := range map[string]struct {
		set  *v1.VirtualMachineInstanceReplicaSet
		all  []*v1.VirtualMachineInstance
		want string
	}{
		"nothing yet":            {webSet(2), nil, "create=2 status=0/0"},
		"one by default":         {none, nil, "create=1 status=0/0"},
		"less than none":         {webSet(-1), nil, "create=0 status=0/0"},
		"many":                   {webSet(100), nil, "create=20 status=0/0"},
		"all there":              {webSet(2), []*v1.VirtualMachineInstance{running("a"), instance("b", "Running@0")}, "create=0 status=1/2"},
		"one is missing":         {webSet(2), []*v1.VirtualMachineInstance{running("a")}, "create=1 status=1/1"},
		"one shuts down":         {webSet(2), []*v1.VirtualMachineInstance{running("a"), instance("b", "Running@0 ready deleted@3600")}, "create=0 wait=1m0s status=1/1"},
		"with a grace period":    {webSet(2), []*v1.VirtualMachineInstance{running("a"), instance("b", "Running@0 ready patient deleted@3500")}, "create=0 wait=50s status=1/1"},
		"one is about to go":     {webSet(2), []*v1.VirtualMachineInstance{running("a"), instance("b", "Failed@0 deleted@3600")}, "create=0 wait=1m0s status=1/1"},
		"one never goes":         {webSet(2), []*v1.VirtualMachineInstance{running("a"), instance("b", "Running@0 ready deleted@3540")}, "create=1 status=1/1"},
		"one crashed":            {webSet(2), []*v1.VirtualMachineInstance{running("a"), instance("b", "Running@0 Failed@60")}, "-b create=0 status=1/1"},
		"one shut itself down":   {webSet(2), []*v1.VirtualMachineInstance{running("a"), instance("b", "Running@0 Succeeded@60")}, "-b create=0 status=1/1"},
		"one crashed, one lacks": {webSet(3), []*v1.VirtualMachineInstance{running("a"), instance("b", "Running@0 Failed@60")}, "-b create=1 status=1/1"},
		"nobody wants it":        {webSet(1), []*v1.VirtualMachineInstance{running("a"), instance("b", "Failed@60")}, "-b create=0 status=1/1"},
		"not on a node first":    {webSet(2), []*v1.VirtualMachineInstance{instance("a", "Pending@0"), instance("b", "Running@0 made@9"), running("c")}, "-a create=0 status=1/3"},
		"not ready next":         {webSet(1), []*v1.VirtualMachineInstance{instance("a", "Running@0"), instance("b", "Running@0 ready made@9"), running("c")}, "-a -b create=0 status=2/3"},
		"then the newest":        {webSet(1), []*v1.VirtualMachineInstance{instance("a", "Running@0 ready made@1"), instance("b", "Running@0 ready made@2"), running("c")}, "-a -b create=0 status=3/3"},
		"going ones count not":   {webSet(1), []*v1.VirtualMachineInstance{running("a"), instance("b", "Running@0 deleted@3600")}, "create=0 status=1/1"},
		"to nothing":             {webSet(0), []*v1.VirtualMachineInstance{running("a"), running("b")}, "-a -b create=0 status=2/2"},
		"an orphan":              {webSet(2), []*v1.VirtualMachineInstance{instance("a", "Running@0 ready free")}, "+a create=1 status=1/1"},
		"an orphan too many":     {webSet(0), []*v1.VirtualMachineInstance{instance("a", "Running@0 ready free")}, "+a -a create=0 status=1/1"},
		"a finished orphan":      {webSet(1), []*v1.VirtualMachineInstance{instance("a", "Failed@0 free")}, "create=1 status=0/0"},
		"an orphan that goes":    {webSet(1), []*v1.VirtualMachineInstance{instance("a", "Running@0 free deleted")}, "create=1 status=0/0"},
		"another's":              {webSet(1), []*v1.VirtualMachineInstance{instance("a", "Running@0 ready theirs")}, "create=1 status=0/0"},
		"another orphan":         {webSet(1), []*v1.VirtualMachineInstance{instance("a", "Running@0 ready free db")}, "create=1 status=0/0"},
		"other labels":           {webSet(1), []*v1.VirtualMachineInstance{instance("a", "Running@0 ready db")}, "^a create=1 status=0/0"},
		"other labels, going":    {webSet(1), []*v1.VirtualMachineInstance{instance("a", "Running@0 ready db deleted")}, "create=1 status=0/0"},
		"paused":                 {paused, []*v1.VirtualMachineInstance{instance("a", "Running@0 Failed@60")}, "create=0 status=0/0 ReplicaPaused=True/Paused"},
		"paused, adopts":         {paused, []*v1.VirtualMachineInstance{instance("a", "Running@0 free")}, "+a create=0 status=0/1 ReplicaPaused=True/Paused"},
		"a deleted set":          {deleted, []*v1.VirtualMachineInstance{running("a"), instance("b", "Running@0 free"), instance("c", "Running@0 db")}, "create=0 status=1/1"},
	} {
		if got := brief(decide(look(tc.set, after(time.Hour), tc.all...))); got != tc.want {
			t.Errorf("%s:\n got %s\nwant %s", what, got, tc.want)
		}
	}
	if got := decide(look(webSet(1), epoch)).status.LabelSelector; got != "app=web" {
		t.Errorf("the selector for autoscalers: %s", got)
	}
	all := webSet(1)
	all.Spec.Selector = &metav1.LabelSelector{}
	if got := decide(look(all, epoch, instance("a", "Running@0 free"))); len(got.adopt) > 0 || got.status.LabelSelector != "" {
		t.Errorf("a set without a selector: %s, %q", brief(got), got.status.LabelSelector)
	}
}

func TestRefusal(t *testing.T) {
	x := look(webSet(2), epoch, instance("a", "Running@0 Failed@0"))
	x.refusal = "no"
	s := decide(x)
	if got, want := brief(s), "create=0 status=0/0 ReplicaFailure=True/NotSupported"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	x.set.Status, x.now = s.status, after(time.Minute)
	if again := decide(x); !slices.Equal(again.status.Conditions, s.status.Conditions) {
		t.Errorf("the same refusal is written again: %v", again.status.Conditions)
	}
	x.refusal, x.all = "", nil
	if got, want := brief(decide(x)), "create=2 status=0/0"; got != want {
		t.Errorf("after the change: %s, want %s", got, want)
	}
}

// An instance that ends at once is replaced after a pause, which doubles. The pauses follow from the status: a manager that starts anew goes on.
func TestStartPauses(t *testing.T) {
	set := webSet(1)
	now := time.Duration(0)
	var pauses []time.Duration
	for range 8 {
		failed := instance("a", fmt.Sprintf("Failed@%d", int(now.Seconds())))
		s := decide(look(set, after(now), failed))
		if len(s.remove) > 0 || s.wait == 0 {
			t.Fatalf("no pause: %s", brief(s))
		}
		pauses = append(pauses, s.wait.Round(time.Second))
		set.Status = s.status
		if s := decide(look(set, after(now+s.wait-time.Second), failed)); s.writes() {
			t.Errorf("replaced before the end of the pause: %s", brief(s))
		}
		now += s.wait
		if s = decide(look(set, after(now), failed)); brief(s) != "-a create=0 status=0/0 ReplicaFailure=True/FailedStart" {
			t.Fatalf("after the pause: %s", brief(s))
		}
		set.Status = s.status
		if s = decide(look(set, after(now))); brief(s) != "create=1 status=0/0 ReplicaFailure=True/FailedStart" {
			t.Fatalf("once it is gone: %s", brief(s))
		}
	}
	if got, want := fmt.Sprint(pauses), "[10s 10s 20s 40s 1m20s 2m40s 5m0s 5m0s]"; got != want {
		t.Errorf("pauses: %s, want %s", got, want)
	}

	// Another template is tried at once.
	failed := instance("a", fmt.Sprintf("Failed@%d other-spec", int(now.Seconds())))
	if s := decide(look(set, after(now), failed)); len(s.remove) != 1 {
		t.Errorf("another template: %s", brief(s))
	}
	// The failures are forgotten once the instance has run for a while.
	began := int(now.Seconds())
	started := instance("a", fmt.Sprintf("Running@%d ready", began))
	s := decide(look(set, after(now+20*time.Second), started))
	if brief(s) != "create=0 wait=10s status=1/1 ReplicaFailure=True/FailedStart" {
		t.Errorf("an instance that has just started: %s", brief(s))
	}
	s = decide(look(set, after(now+settled), started))
	if brief(s) != "create=0 status=1/1" {
		t.Errorf("an instance that has started: %s", brief(s))
	}
	// One that ends soon after its start counts as one that did not start.
	short := instance("a", fmt.Sprintf("Running@%d Succeeded@%d", began, began+3))
	if s := decide(look(set, after(now+3*time.Second), short)); s.wait == 0 || len(s.remove) > 0 {
		t.Errorf("an instance that ran for 3 s: %s", brief(s))
	}
	// Nobody waits for a set of nothing.
	set.Spec.Replicas = new(int32)
	if got := brief(decide(look(set, after(now), failed))); got != "-a create=0 status=0/0" {
		t.Errorf("scaled to nothing: %s", got)
	}
}

// What the API server refuses is tried again after pauses.
func TestRefusedCreations(t *testing.T) {
	set := webSet(3)
	now := time.Duration(0)
	var pauses []time.Duration
	for range 7 {
		s := decide(look(set, after(now), instance("a", "Failed@0")))
		if s.create == 0 {
			t.Fatalf("nothing is tried: %s", brief(s))
		}
		s.fail(ReasonCreateFailed, "quota", after(now), after(now))
		set.Status = s.status
		s = decide(look(set, after(now), instance("b", fmt.Sprintf("Failed@%d", int(now.Seconds())))))
		if s.create > 0 || s.failure().Reason != ReasonCreateFailed {
			t.Fatalf("tried at once: %s", brief(s))
		}
		s = decide(look(set, after(now)))
		pauses = append(pauses, s.wait)
		now += s.wait
	}
	if got, want := fmt.Sprint(pauses), "[5s 5s 10s 20s 40s 1m0s 1m0s]"; got != want {
		t.Errorf("pauses: %s, want %s", got, want)
	}
	set.Spec.Replicas = new(int32)
	if s := decide(look(set, after(now))); s.failure() != nil {
		t.Errorf("nothing is to be created: %s", brief(s))
	}
}
