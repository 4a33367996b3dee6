package cocoonset

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func aSet(change func(*v1.CocoonSet)) *v1.CocoonSet {
	s := &v1.CocoonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "team", Namespace: "ns", UID: "set", Generation: 3},
		Spec: v1.CocoonSetSpec{
			SnapshotPolicy: contract.SnapshotAlways, NodePool: "default", HibernatePolicy: v1.HibernateRetain,
			Agent: v1.AgentSpec{Image: "base", Mode: "clone", ForkPolicy: v1.ForkMainNode, Replicas: 1},
		},
	}
	if change != nil {
		change(s)
	}
	return s
}

type podOption func(*corev1.Pod)

// has returns the pod of one member of set. The pod runs on node n1 unless an option says otherwise.
func has(set *v1.CocoonSet, name string, options ...podOption) *corev1.Pod {
	for _, m := range members(set) {
		if m.name() != name {
			continue
		}
		pod := m.pod.DeepCopy()
		pod.UID, pod.Spec.NodeName, pod.Status.Phase = types.UID(name), "n1", corev1.PodRunning
		pod.CreationTimestamp = metav1.Time{Time: now.Add(-time.Hour)}
		for _, o := range options {
			o(pod)
		}
		return pod
	}
	panic("the set has no member " + name)
}

func ready(pod *corev1.Pod) {
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	pod.Annotations[contract.KeyLifecycleState] = string(contract.LifecycleReady)
	pod.Annotations[contract.KeyLifecycleObserved] = pod.Annotations[contract.KeyGeneration]
}

func failed(pod *corev1.Pod) {
	pod.Annotations[contract.KeyLifecycleState] = string(contract.LifecycleFailed)
	pod.Annotations[contract.KeyLifecycleMessage] = "no such snapshot"
}

func going(pod *corev1.Pod) { pod.DeletionTimestamp = &metav1.Time{Time: now} }

// marked adds the set's request to hibernate.
func marked(pod *corev1.Pod) {
	pod.Annotations[contract.KeyHibernate] = "true"
	pod.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: fieldOwner, Operation: metav1.ManagedFieldsOperationApply, FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{"f:` + contract.KeyHibernate + `":{}}}}`)}}
}

func asleep(pod *corev1.Pod) {
	marked(pod)
	pod.Annotations[contract.KeyLifecycleState] = string(contract.LifecycleHibernated)
	pod.Annotations[contract.KeyLifecycleObserved] = pod.Annotations[contract.KeyGeneration]
}

// annotated adds an annotation.
func annotated(key, value string) podOption {
	return func(pod *corev1.Pod) { pod.Annotations[key] = value }
}

func id(vm string) podOption { return annotated(contract.KeyID, vm) }

var (
	forked    = annotated(contract.KeyForkFromID, "vm-1")
	offering  = annotated(contract.KeyOfferFork, "true")
	elsewhere = podOption(func(pod *corev1.Pod) { pod.Spec.NodeName = "n2" })
)

// describe returns, in one line, the actions of a plan and the status of the set.
func describe(a actions) string {
	var do []string
	for _, pod := range a.create {
		text := "create " + pod.Name
		if from := pod.Annotations[contract.KeyForkFromID]; from != "" {
			text += " of " + from
		}
		if pod.Annotations[contract.KeyRestoreFromHibernate] != "" {
			text += " restored"
		}
		if af := pod.Spec.Affinity; af != nil && af.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
			text += " on " + af.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchFields[0].Values[0]
		}
		if af := pod.Spec.Affinity; af != nil && af.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution != nil {
			text += " near " + af.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution[0].Preference.MatchFields[0].Values[0]
		}
		do = append(do, text)
	}
	for _, r := range a.remove {
		do = append(do, map[bool]string{false: "remove ", true: "release "}[r.keep]+r.pod.Name)
	}
	if a.offer != nil {
		do = append(do, "offer "+a.offer.Name)
	}
	for _, m := range a.mark {
		do = append(do, map[bool]string{false: "wake ", true: "hibernate "}[m.hibernate]+m.pod.Name+" "+m.generation)
	}
	if a.again > 0 {
		do = append(do, "again "+a.again.String())
	}
	for _, n := range a.events {
		do = append(do, n.reason)
	}
	return strings.Join(do, ", ") + fmt.Sprintf(" | %s %d/%d %d/%d", a.status.Phase, a.status.ReadyAgents, a.status.DesiredAgents, a.status.ReadyToolboxes, a.status.DesiredToolboxes)
}

func TestPlan(t *testing.T) {
	plain := aSet(nil)
	suspended := aSet(func(s *v1.CocoonSet) { s.Spec.Suspend = true })
	released := aSet(func(s *v1.CocoonSet) {
		s.Spec.Suspend, s.Spec.HibernatePolicy, s.Spec.Agent.Replicas = true, v1.HibernateRelease, 0
	})
	woken := aSet(func(s *v1.CocoonSet) {
		s.Spec.HibernatePolicy, s.Spec.Agent.Replicas, s.Status.SuspendedOn, s.Status.Phase = v1.HibernateRelease, 0, "n1", v1.SetSuspended
	})
	moved := aSet(func(s *v1.CocoonSet) { s.Spec.NodeName = "n2" })
	moving := aSet(func(s *v1.CocoonSet) { s.Spec.NodeName, s.Status.Phase = "n2", v1.SetMigrating })
	static := aSet(func(s *v1.CocoonSet) {
		s.Spec.Agent.Replicas = 0
		s.Spec.Toolboxes = []v1.ToolboxSpec{{Name: "win", Mode: contract.ModeStatic, StaticIP: "10.0.0.9", StaticVMID: "w", VNCPort: 5900}}
	})
	freely := aSet(func(s *v1.CocoonSet) { s.Spec.Agent.ForkPolicy = v1.ForkPreferMainNode })
	again := func(n int32, ago time.Duration) *v1.CocoonSet {
		return aSet(func(s *v1.CocoonSet) {
			s.Status.ObservedGeneration = s.Generation
			s.Status.Agents = []v1.AgentStatus{{Slot: 1, Rebuilds: n, LastRebuild: &metav1.Time{Time: now.Add(-ago)}}}
		})
	}
	for _, c := range []struct {
		name    string
		set     *v1.CocoonSet
		pods    []*corev1.Pod
		durable []string
		want    string
	}{
		{"no pods", plain, nil, nil, "create team-0 | Pending 0/2 0/0"},
		{"main is not ready", plain, []*corev1.Pod{has(plain, "team-0")}, nil, " | Pending 0/2 0/0"},
		{"main is ready", plain, []*corev1.Pod{has(plain, "team-0", ready)}, nil, "create team-1 on n1 | Scaling 1/2 0/0"},
		{"forks may go to other nodes", freely, []*corev1.Pod{has(freely, "team-0", ready, id("vm-1"))}, nil, "create team-1 of vm-1 near n1 | Scaling 1/2 0/0"},
		{"a fork waits on another node for main's state", freely, []*corev1.Pod{has(freely, "team-0", ready, id("vm-1")), has(freely, "team-1", elsewhere, forked)}, nil, "offer team-0 | Scaling 1/2 0/0"},
		{"main's state is offered", freely, []*corev1.Pod{has(freely, "team-0", ready, id("vm-1"), offering), has(freely, "team-1", elsewhere, forked)}, nil, " | Scaling 1/2 0/0"},
		{"a fork waits on main's node", freely, []*corev1.Pod{has(freely, "team-0", ready, id("vm-1")), has(freely, "team-1", forked)}, nil, " | Scaling 1/2 0/0"},
		{"a fork runs on another node", freely, []*corev1.Pod{has(freely, "team-0", ready, id("vm-1")), has(freely, "team-1", ready, elsewhere, forked, id("vm-2"))}, nil, " | Running 2/2 0/0"},
		{"main was recreated", freely, []*corev1.Pod{has(freely, "team-0", ready, id("vm-3")), has(freely, "team-1", elsewhere, forked)}, nil, "remove team-1 | Scaling 1/2 0/0"},
		{"main was recreated after the fork", freely, []*corev1.Pod{has(freely, "team-0", ready, id("vm-3")), has(freely, "team-1", ready, elsewhere, forked, id("vm-2"))}, nil, " | Running 2/2 0/0"},
		{"all ready", plain, []*corev1.Pod{has(plain, "team-0", ready), has(plain, "team-1", ready)}, nil, " | Running 2/2 0/0"},
		{"a pod is being deleted", plain, []*corev1.Pod{has(plain, "team-0", ready), has(plain, "team-1", ready, going)}, nil, " | Scaling 1/2 0/0"},
		{"too many pods", aSet(func(s *v1.CocoonSet) { s.Spec.Agent.Replicas = 0 }), []*corev1.Pod{has(plain, "team-0", ready), has(plain, "team-1", ready)}, nil, "remove team-1 | Scaling 1/1 0/0"},
		{"another image", aSet(func(s *v1.CocoonSet) { s.Spec.Agent.Image, s.Spec.Agent.Replicas = "new", 0 }), []*corev1.Pod{has(plain, "team-0", ready)}, nil, "remove team-0 | Scaling 1/1 0/0"},
		{"main failed", plain, []*corev1.Pod{has(plain, "team-0", failed)}, nil, "MainAgentFailed | Failed 0/2 0/0"},
		{"main failed and the spec was corrected", aSet(func(s *v1.CocoonSet) { s.Spec.Agent.Image = "new" }), []*corev1.Pod{has(plain, "team-0", failed)}, nil, "remove team-0 | Pending 0/2 0/0"},
		{"static toolbox", static, []*corev1.Pod{has(static, "team-0", ready)}, nil, "create team-win | Scaling 1/1 0/1"},

		{"a fork failed", plain, []*corev1.Pod{has(plain, "team-0", ready), has(plain, "team-1", failed)}, nil, "remove team-1, SubAgentRebuilding | Scaling 1/2 0/0"},
		{"the fork is recreated after a delay", again(2, 0), []*corev1.Pod{has(plain, "team-0", ready)}, nil, "again 1s | Scaling 1/2 0/0"},
		{"the delay has passed", again(2, time.Second), []*corev1.Pod{has(plain, "team-0", ready)}, nil, "create team-1 on n1 | Scaling 1/2 0/0"},
		{"a failure counts once although the cache is stale", again(1, 0), []*corev1.Pod{has(plain, "team-0", ready), has(plain, "team-1", failed)}, nil, "remove team-1 | Scaling 1/2 0/0"},
		{"no attempts are left", again(4, 2*time.Hour), []*corev1.Pod{has(plain, "team-0", ready), has(plain, "team-1", failed)}, nil, "SubAgentDeadLetter | Scaling 1/2 0/0"},

		{"to be suspended", suspended, []*corev1.Pod{has(suspended, "team-0", ready), has(suspended, "team-1", ready)}, nil, "hibernate team-0 3, hibernate team-1 3 | Suspending 2/2 0/0"},
		{"one VM is hibernated", suspended, []*corev1.Pod{has(suspended, "team-0", asleep), has(suspended, "team-1", marked)}, []string{"vk-ns-team-0"}, " | Suspending 0/2 0/0"},
		{"hibernated, not in the registry", suspended, []*corev1.Pod{has(suspended, "team-0", asleep), has(suspended, "team-1", asleep)}, []string{"vk-ns-team-0"}, "again 2s | Suspending 0/2 0/0"},
		{"hibernated and durable", suspended, []*corev1.Pod{has(suspended, "team-0", asleep), has(suspended, "team-1", asleep)}, []string{"vk-ns-team-0", "vk-ns-team-1"}, " | Suspended 0/2 0/0"},
		{"a static machine does not hibernate", aSet(func(s *v1.CocoonSet) { s.Spec = *static.Spec.DeepCopy(); s.Spec.Suspend = true }), []*corev1.Pod{has(static, "team-0", asleep), has(static, "team-win", ready)}, []string{"vk-ns-team-0"}, " | Suspended 0/1 1/1"},
		{"too many pods while suspended", released, []*corev1.Pod{has(released, "team-0", asleep), has(plain, "team-1", ready)}, []string{"vk-ns-team-0"}, "remove team-1 | Suspending 0/1 0/0"},
		{"pods are released when all states are durable", released, []*corev1.Pod{has(released, "team-0", asleep)}, []string{"vk-ns-team-0"}, "release team-0 | Suspended 0/1 0/0"},
		{"pods are not released before that", released, []*corev1.Pod{has(released, "team-0", asleep)}, nil, "again 2s | Suspending 0/1 0/0"},
		{"released", released, nil, []string{"vk-ns-team-0"}, " | Suspended 0/1 0/0"},
		{"main failed and cannot hibernate", suspended, []*corev1.Pod{has(suspended, "team-0", marked, failed), has(suspended, "team-1", asleep)}, []string{"vk-ns-team-1"}, "MainAgentFailed | Failed 0/2 0/0"},
		{"VMs wake", plain, []*corev1.Pod{has(plain, "team-0", asleep), has(plain, "team-1", asleep)}, nil, "wake team-0 3, wake team-1 3 | Pending 0/2 0/0"},
		{"woken after a release", woken, nil, []string{"vk-ns-team-0"}, "create team-0 restored near n1 | Waking 0/1 0/0"},
		{"hibernated by another owner", plain, []*corev1.Pod{has(plain, "team-0", ready), has(plain, "team-1", func(p *corev1.Pod) { asleep(p); p.ManagedFields = nil })}, nil, " | Scaling 1/2 0/0"},

		{"VMs hibernate to move", moved, []*corev1.Pod{has(moved, "team-0", ready), has(moved, "team-1", ready)}, nil, "hibernate team-0 3, hibernate team-1 3 | Migrating 2/2 0/0"},
		{"pods are released to move when all states are durable", moving, []*corev1.Pod{has(moving, "team-0", asleep), has(moving, "team-1", asleep)}, []string{"vk-ns-team-0", "vk-ns-team-1"}, "release team-0, release team-1 | Migrating 0/2 0/0"},
		{"pods are created on the new node", moving, nil, []string{"vk-ns-team-0", "vk-ns-team-1"}, "create team-0 restored on n2, create team-1 restored on n2 | Migrating 0/2 0/0"},
		{"moved", moving, []*corev1.Pod{has(moving, "team-0", ready, elsewhere), has(moving, "team-1", ready, elsewhere)}, nil, " | Running 2/2 0/0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := view{set: c.set, pods: c.pods, durable: map[string]bool{}, now: now}
			for _, name := range c.durable {
				v.durable[name] = true
			}
			if got := describe(plan(v)); got != c.want {
				t.Errorf("the plan is\n%s\nwant\n%s", got, c.want)
			}
			for _, name := range c.durable {
				if !slices.Contains(asks(v), name) {
					t.Errorf("asks does not return %s", name)
				}
			}
		})
	}
}

// An unavailable registry does not block a set that needs no data from it.
func TestRunningSetNeedsNoRegistry(t *testing.T) {
	set := aSet(nil)
	pods := []*corev1.Pod{has(set, "team-0", ready), has(set, "team-1", func(p *corev1.Pod) { asleep(p); p.ManagedFields = nil })}
	if names := asks(view{set: set, pods: pods, now: now}); len(names) != 0 {
		t.Errorf("asks returns %v, want no VM", names)
	}
}

// The condition of a suspended set names the VMs without state, so that nobody assumes that they are saved.
func TestSuspendedNamesVMsWithoutState(t *testing.T) {
	set := aSet(func(s *v1.CocoonSet) { s.Spec.Suspend = true })
	a := plan(view{set: set, pods: []*corev1.Pod{has(set, "team-0", asleep)}, durable: map[string]bool{"vk-ns-team-0": true}, now: now})
	c := meta.FindStatusCondition(a.status.Conditions, v1.ConditionReady)
	if a.status.Phase != v1.SetSuspended || c == nil || !strings.Contains(c.Message, "vk-ns-team-1") || strings.Contains(c.Message, "vk-ns-team-0") {
		t.Errorf("%s, %+v", a.status.Phase, c)
	}
}

// The condition of a suspending set says for which VMs it waits, and why.
func TestSuspendingSaysWhy(t *testing.T) {
	set := aSet(func(s *v1.CocoonSet) { s.Spec.Suspend = true })
	for want, v := range map[string]view{
		"vk-ns-team-1 failed: no such snapshot":                                   {pods: []*corev1.Pod{has(set, "team-0", asleep), has(set, "team-1", marked, failed)}},
		"vk-ns-team-0: the registry is full":                                      {pods: []*corev1.Pod{has(set, "team-0", marked, annotated(contract.KeyLifecycleMessage, "the registry is full"))}},
		"vk-ns-team-0 is hibernated, but its state is not in":                     {pods: []*corev1.Pod{has(set, "team-0", asleep)}},
		"vk-ns-team-0 is hibernated on its node, but the manager has no registry": {pods: []*corev1.Pod{has(set, "team-0", asleep)}, noRegistry: true},
	} {
		v.set, v.now = set, now
		a := plan(v)
		if c := meta.FindStatusCondition(a.status.Conditions, v1.ConditionReady); c == nil || !strings.Contains(c.Message, want) || a.status.Phase != v1.SetSuspending {
			t.Errorf("%s: %s, %+v", want, a.status.Phase, c)
		}
	}
}

// After the pods of a plan are created, the next plan is empty, because the API server's defaults are no drift.
func TestDefaultsAreNoDrift(t *testing.T) {
	set := aSet(func(s *v1.CocoonSet) {
		storage := resource.MustParse("20Gi")
		s.Spec.Agent.Storage = &storage
		s.Spec.Agent.Resources = corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Gi")}}
		s.Spec.Agent.EnvFrom = []corev1.EnvFromSource{}
	})
	pod := has(set, "team-0")
	pod.Spec.ServiceAccountName = "default"
	pod.Spec.Containers[0].EnvFrom = nil
	pod.Spec.Containers[0].Resources.Requests[corev1.ResourceMemory] = resource.MustParse("1024Mi")
	pod.Spec.Tolerations = append(pod.Spec.Tolerations, corev1.Toleration{Key: "another"})
	pod.Spec.Containers[0].Resources.Limits[corev1.ResourceCPU] = resource.MustParse("1") // from a LimitRange
	pod.Spec.NodeSelector["team"] = "blue"                                                // from the namespace
	if drifted(members(set)[0].pod, pod) {
		t.Error("defaults of the cluster count as drift")
	}
	for name, change := range map[string]func(*v1.CocoonSet){
		"image": func(s *v1.CocoonSet) { s.Spec.Agent.Image = "other" },
		"memory": func(s *v1.CocoonSet) {
			s.Spec.Agent.Resources.Limits[corev1.ResourceMemory] = resource.MustParse("2Gi")
		},
		"pool":            func(s *v1.CocoonSet) { s.Spec.NodePool = "other" },
		"account":         func(s *v1.CocoonSet) { s.Spec.Agent.ServiceAccountName = "other" },
		"no memory limit": func(s *v1.CocoonSet) { s.Spec.Agent.Resources.Limits = nil },
		"env":             func(s *v1.CocoonSet) { s.Spec.Agent.EnvFrom = []corev1.EnvFromSource{{Prefix: "x"}} },
		"probe":           func(s *v1.CocoonSet) { s.Spec.Agent.ProbePort = 80 },
		"storage":         func(s *v1.CocoonSet) { q := resource.MustParse("30Gi"); s.Spec.Agent.Storage = &q },
	} {
		other := set.DeepCopy()
		change(other)
		if !drifted(members(other)[0].pod, pod) {
			t.Errorf("a change of %s does not count as drift", name)
		}
	}
}

// Pods of earlier managers do not record the requested resources. The resources of their container decide whether they
// drifted.
func TestPodsOfEarlierManagers(t *testing.T) {
	set := aSet(func(s *v1.CocoonSet) {
		s.Spec.Agent.Resources = corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Gi")}}
	})
	pod := has(set, "team-0")
	delete(pod.Annotations, contract.KeyResources)
	if drifted(members(set)[0].pod, pod) {
		t.Error("a pod with the wanted resources counts as drifted")
	}
	pod.Spec.Containers[0].Resources.Limits[corev1.ResourceMemory] = resource.MustParse("2Gi")
	if !drifted(members(set)[0].pod, pod) {
		t.Error("a change of size does not count as drift")
	}
}

// The toolbox, not a node, defines the address of a static VM. A pod with another address or id is replaced.
func TestStaticVMGetsAnotherAddress(t *testing.T) {
	set := aSet(func(s *v1.CocoonSet) {
		s.Spec.Agent.Replicas = 0
		s.Spec.Toolboxes = []v1.ToolboxSpec{{Name: "win", Mode: contract.ModeStatic, StaticIP: "10.0.0.9", StaticVMID: "w", VNCPort: 5900}}
	})
	pods := []*corev1.Pod{has(set, "team-0", ready), has(set, "team-win", ready)}
	if got := describe(plan(view{set: set, pods: pods, now: now})); got != " | Running 1/1 1/1" {
		t.Error(got)
	}
	for name, change := range map[string]func(*v1.ToolboxSpec){
		"address": func(b *v1.ToolboxSpec) { b.StaticIP = "10.0.0.10" },
		"id":      func(b *v1.ToolboxSpec) { b.StaticVMID = "v" },
		"screen":  func(b *v1.ToolboxSpec) { b.VNCPort = 0 },
	} {
		other := set.DeepCopy()
		change(&other.Spec.Toolboxes[0])
		if got := describe(plan(view{set: other, pods: pods, now: now})); !strings.HasPrefix(got, "remove team-win |") {
			t.Errorf("another %s: %s", name, got)
		}
	}
}

// Names of sets and namespaces may contain dashes. The cleanup covers only the names of the set's own pods.
func TestNamesToCleanUp(t *testing.T) {
	set := aSet(func(s *v1.CocoonSet) {
		s.Spec.Toolboxes = []v1.ToolboxSpec{{Name: "db", Image: "i", Mode: contract.ModeRun}, {Name: "win", Mode: contract.ModeStatic}}
	})
	earlier := has(aSet(func(s *v1.CocoonSet) { s.Spec.Agent.Replicas = 4 }), "team-4")
	if got := vmNames(set, []*corev1.Pod{earlier}); !slices.Equal(got, []string{"vk-ns-team-0", "vk-ns-team-1", "vk-ns-team-4", "vk-ns-team-db"}) {
		t.Errorf("cleared away are %v", got)
	}
}

// A user who can write to a set and its pods cannot make it delete registry data of other VMs. VMs that the set no longer
// wants are recorded while their state is in the registry.
func TestCleanUpIsLimitedToOwnVMs(t *testing.T) {
	set := aSet(func(s *v1.CocoonSet) {
		s.Annotations = map[string]string{contract.KeyDeleteVMNames: "vk-prod-db-0,vk-ns-team-7,vk-ns-team,,vk-ns-teams-0"}
	})
	foreign := has(set, "team-1", annotated(contract.KeyName, "vk-prod-web-0"))
	if got := own(set, vmNames(set, []*corev1.Pod{foreign})); !slices.Equal(got, []string{"vk-ns-team-0", "vk-ns-team-1", "vk-ns-team-7"}) {
		t.Errorf("cleared away are %v", got)
	}
	more := aSet(func(s *v1.CocoonSet) { s.Spec.Agent.Replicas = 3 })
	a := plan(view{set: set, pods: []*corev1.Pod{has(more, "team-0", ready), has(more, "team-2", ready), has(more, "team-3", asleep)}, now: now})
	if !slices.Equal(a.hibernated, []string{"vk-ns-team-3"}) {
		t.Errorf("recorded names: %v", a.hibernated)
	}
}

// writes records the writes to pods.
type writes struct {
	client.Client
	to []string
}

func (w *writes) Patch(_ context.Context, o client.Object, patch client.Patch, _ ...client.PatchOption) error {
	text, err := patch.Data(o)
	w.to = append(w.to, string(text))
	o.SetResourceVersion("8")
	return err
}

func (w *writes) Delete(_ context.Context, _ client.Object, options ...client.DeleteOption) error {
	var o client.DeleteOptions
	o.ApplyOptions(options)
	version := "any"
	if v := o.Preconditions.ResourceVersion; v != nil {
		version = *v
	}
	w.to = append(w.to, "delete "+string(*o.Preconditions.UID)+" "+version)
	return nil
}

func (w *writes) Apply(_ context.Context, _ runtime.ApplyConfiguration, _ ...client.ApplyOption) error {
	w.to = append(w.to, "apply")
	return nil
}

// The pod of a hibernated VM is removed without a new snapshot only if the pod is unchanged since it was read, because a VM
// that wakes meanwhile must be saved again.
func TestReleasedPodIsUnchanged(t *testing.T) {
	set := aSet(nil)
	pod := has(set, "team-0", asleep)
	pod.ResourceVersion = "7"
	w := &writes{}
	r := &Reconciler{Client: w}
	turn := func(a actions) {
		t.Helper()
		a.status = set.Status
		if _, err := r.carryOut(t.Context(), set, a); err != nil {
			t.Fatal(err)
		}
	}
	turn(actions{remove: []removal{{pod: pod, keep: true}}})
	pod.Annotations[contract.KeyKeepSnapshot] = "true"
	turn(actions{mark: []marking{{pod: pod, generation: "4"}}})
	turn(actions{remove: []removal{{pod: pod}}})
	want := []string{
		`{"metadata":{"annotations":{"vm.cocoonstack.io/keep-snapshot-on-delete":"true"},"resourceVersion":"7","uid":"team-0"}}`, "delete team-0 8",
		`{"metadata":{"annotations":{"vm.cocoonstack.io/keep-snapshot-on-delete":null},"uid":"team-0"}}`, "apply",
		"delete team-0 any",
	}
	if !slices.Equal(w.to, want) {
		t.Errorf("writes are\n%s\nwant\n%s", strings.Join(w.to, "\n"), strings.Join(want, "\n"))
	}
}

// A sticky set binds its pods to the node that holds their state, and deletes the claim when the registry has the state.
func TestStickySet(t *testing.T) {
	set := aSet(func(s *v1.CocoonSet) { s.Spec.Sticky, s.Spec.Agent.Replicas = "wait", 0 })
	vmName := members(set)[0].vmName()
	claims := map[string]*v1.VMPlacement{vmName: {ObjectMeta: metav1.ObjectMeta{Name: vmName}, Status: v1.VMPlacementStatus{NodeName: "n7"}}}
	a := plan(view{set: set, claims: claims, now: now})
	if len(a.create) != 1 || a.create[0].Annotations[contract.KeyPlacedOn] != "n7" || a.create[0].Annotations[contract.KeySticky] != "wait" || a.create[0].Spec.Affinity == nil {
		t.Errorf("created %+v", a.create)
	}
	// If the user names a node, the VM goes to that node, because its state is in the registry. The old claim ends.
	set.Spec.NodeName = "n2"
	set.Status.Phase = v1.SetMigrating
	a = plan(view{set: set, claims: claims, durable: map[string]bool{vmName: true}, now: now})
	if len(a.create) != 1 || a.create[0].Annotations[contract.KeyPlacedOn] != "" || !slices.Equal(a.free, []string{vmName}) {
		t.Errorf("created %+v, released %q", a.create, a.free)
	}
	pod := has(set, "team-0", ready, func(p *corev1.Pod) {
		p.Annotations[contract.KeyHibernate], p.Annotations[contract.KeyLifecycleState] = "true", string(contract.LifecycleHibernated)
		p.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: fieldOwner, Operation: metav1.ManagedFieldsOperationApply, FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{"f:vm.cocoonstack.io/hibernate":{}}}}`)}}
	})
	a = plan(view{set: set, pods: []*corev1.Pod{pod}, claims: claims, durable: map[string]bool{vmName: true}, now: now})
	if len(a.remove) != 1 || !a.remove[0].keep || !slices.Equal(a.free, []string{vmName}) {
		t.Errorf("removed %+v, released %q", a.remove, a.free)
	}
	for _, m := range members(aSet(func(s *v1.CocoonSet) { s.Spec.Sticky = "never" })) {
		if got := m.pod.Annotations[contract.KeySticky]; (got == "never") != (m.role == v1.RoleMain) {
			t.Errorf("%s: %q", m.name(), got)
		}
	}
}

// refusing is a client whose API server refuses to change pods.
type refusing struct {
	client.Client
	why error
}

func (r refusing) Patch(context.Context, client.Object, client.Patch, ...client.PatchOption) error {
	return r.why
}

// A pod that is to be removed may change in a way that triggers no reconciliation. Then it is removed in the next attempt.
func TestPodThatChangedIsRemovedLater(t *testing.T) {
	set := aSet(nil)
	old := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "team-0", Namespace: "ns", UID: "p"}}
	pods := schema.GroupResource{Resource: "pods"}
	for want, why := range map[bool]error{true: apierrors.NewConflict(pods, "team-0", errors.New("changed")), false: apierrors.NewNotFound(pods, "team-0")} {
		r := &Reconciler{Client: refusing{why: why}}
		if _, err := r.carryOut(t.Context(), set, actions{status: set.Status, remove: []removal{{pod: old, keep: true}}}); (err != nil) != want {
			t.Errorf("after %v the reconciliation ends with %v", why, err)
		}
	}
}
