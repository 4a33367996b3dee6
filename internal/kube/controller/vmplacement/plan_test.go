package vmplacement

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/controller"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func claim(change ...func(*v1.VMPlacement)) *v1.VMPlacement {
	c := &v1.VMPlacement{
		ObjectMeta: metav1.ObjectMeta{Name: "vm", Namespace: "ns"}, Spec: v1.VMPlacementSpec{Release: v1.ReleaseWait},
		Status: v1.VMPlacementStatus{NodeName: "a", NodeUID: "u", PodUID: "p", ClaimedAt: &metav1.Time{Time: now.Add(-time.Hour)}},
	}
	for _, f := range change {
		f(c)
	}
	return c
}

func limit(seconds int64) func(*v1.VMPlacement) {
	return func(c *v1.VMPlacement) { c.Spec.WaitSeconds = &seconds }
}

// away marks the node as unavailable for d.
func away(d time.Duration) func(*v1.VMPlacement) {
	return func(c *v1.VMPlacement) {
		c.Status.Conditions = []metav1.Condition{{Type: v1.ConditionNodeAvailable, Status: metav1.ConditionFalse, LastTransitionTime: metav1.NewTime(now.Add(-d))}}
	}
}

func never(c *v1.VMPlacement) { c.Spec.Release = v1.ReleaseNever }

func node(status corev1.ConditionStatus) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "u"}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}}}
}

func pod(on, stamp string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns", UID: "p"}, Spec: corev1.PodSpec{NodeName: on}}
	if stamp != "" {
		p.Annotations = map[string]string{contract.KeyPlacedOn: stamp}
	}
	return p
}

func TestPlan(t *testing.T) {
	replaced := node(corev1.ConditionTrue)
	replaced.UID = "other"
	for name, c := range map[string]struct {
		view    view
		reason  string
		release string // a part of it
		again   time.Duration
		stale   int
	}{
		"no claim and no pod":                           {view{}, "", "", 0, 0},
		"node is ready":                                 {view{claim: claim(), node: node(corev1.ConditionTrue)}, "", "", 0, 0},
		"removed, no time limit":                        {view{claim: claim()}, v1.ReasonNodeRemoved, "", 0, 0},
		"replaced":                                      {view{claim: claim(), node: replaced}, v1.ReasonNodeReplaced, "", 0, 0},
		"not ready":                                     {view{claim: claim(), node: node(corev1.ConditionUnknown)}, v1.ReasonNodeNotReady, "", 0, 0},
		"removed, state in the registry":                {view{claim: claim(), durable: true}, v1.ReasonNodeRemoved, "registry", 0, 0},
		"not ready, state in the registry":              {view{claim: claim(), node: node(corev1.ConditionFalse), durable: true}, v1.ReasonNodeNotReady, "", 0, 0},
		"removed, state in the registry, release Never": {view{claim: claim(never), durable: true}, v1.ReasonNodeRemoved, "", 0, 0},
		"removed now, limit one minute":                 {view{claim: claim(limit(60))}, v1.ReasonNodeRemoved, "", time.Minute, 0},
		"removed, half of the limit is over":            {view{claim: claim(limit(60), away(30*time.Second))}, v1.ReasonNodeRemoved, "", 30 * time.Second, 0},
		"removed, limit is over":                        {view{claim: claim(limit(60), away(time.Minute))}, v1.ReasonNodeRemoved, "1m0s", 0, 0},
		"not ready, limit is over":                      {view{claim: claim(limit(60), away(time.Minute)), node: node(corev1.ConditionFalse)}, v1.ReasonNodeNotReady, "1m0s", 0, 0},
		"not ready, limit is over, pod on the node":     {view{claim: claim(limit(60), away(time.Hour)), node: node(corev1.ConditionFalse), pods: []*corev1.Pod{pod("a", "")}}, v1.ReasonNodeNotReady, "", 0, 0},
		"limit is zero":                                 {view{claim: claim(limit(0))}, v1.ReasonNodeRemoved, "0s", 0, 0},
		"bound without a claim":                         {view{pods: []*corev1.Pod{pod("", "a")}}, "", "", 0, 1},
		"bound and scheduled":                           {view{pods: []*corev1.Pod{pod("a", "a")}}, "", "", 0, 0},
		"bound to the claimed node":                     {view{claim: claim(), node: node(corev1.ConditionTrue), pods: []*corev1.Pod{pod("", "a")}}, "", "", 0, 0},
		"bound to another node than claimed":            {view{claim: claim(), node: node(corev1.ConditionTrue), pods: []*corev1.Pod{pod("", "b")}}, "", "", 0, 1},
	} {
		c.view.now = now
		a := plan(c.view)
		if a.reason != c.reason || (a.release == "") != (c.release == "") || !strings.Contains(a.release, c.release) || a.again != c.again || len(a.stale) != c.stale {
			t.Errorf("%s: %+v", name, a)
		}
		if c.view.claim == nil || c.view.claim.Status.NodeName == "" {
			continue
		}
		cond := meta.FindStatusCondition(a.status.Conditions, v1.ConditionNodeAvailable)
		if cond == nil || (cond.Status == metav1.ConditionTrue) != (c.reason == "") || c.reason != "" && cond.Reason != c.reason {
			t.Errorf("%s: condition %+v", name, cond)
		}
	}
}

// A node that was registered again on the same machine still holds the state. The claim takes the new UID.
func TestPlanFollowsTheMachine(t *testing.T) {
	n := node(corev1.ConditionTrue)
	n.UID, n.Status.NodeInfo.MachineID = "new", "m"
	a := plan(view{claim: claim(func(c *v1.VMPlacement) { c.Status.MachineID = "m" }), node: n, now: now})
	if a.reason != "" || a.status.NodeUID != "new" {
		t.Errorf("%+v", a)
	}
}

// tags are the tags of a registry, as VM:TAG. nil: the registry is unavailable.
type tags map[string]bool

func (t tags) Has(_ context.Context, of controller.VM, tag string) (bool, error) {
	if t == nil {
		return false, errors.New("away")
	}
	return t[of.Name+":"+tag], nil
}

func (t tags) HadOld(context.Context, controller.VM, string) (bool, error) { return false, nil }

func (t tags) Delete(context.Context, controller.VM, string) error {
	return errors.New("unexpected call of Delete")
}

// Only the hibernate tag of a VM releases its claim, because a snapshot under another tag may be older than the VM's state.
func TestHibernateTagReleasesClaim(t *testing.T) {
	for name, c := range map[string]struct {
		has     tags
		view    view
		release bool
		again   time.Duration
	}{
		"no tags":                             {has: tags{}, view: view{claim: claim()}},
		"hibernated":                          {has: tags{"vm:hibernate": true}, view: view{claim: claim()}, release: true},
		"saved before a deletion":             {has: tags{"vm:latest": true}, view: view{claim: claim()}},
		"another tag of the VM":               {has: tags{"vm:v1": true, "vm:": true}, view: view{claim: claim()}},
		"another VM is hibernated":            {has: tags{"vm-1:hibernate": true}, view: view{claim: claim()}},
		"release Never":                       {has: tags{"vm:hibernate": true}, view: view{claim: claim(never)}},
		"node is not ready but exists":        {has: tags{"vm:hibernate": true}, view: view{claim: claim(), node: node(corev1.ConditionFalse)}},
		"registry unavailable":                {view: view{claim: claim()}, again: registryPause},
		"registry unavailable, limit is over": {view: view{claim: claim(limit(60), away(time.Hour))}, release: true},
		"no claim":                            {has: tags{"vm:hibernate": true}},
	} {
		c.view.now = now
		r := &Reconciler{Registry: c.has}
		if a := r.decide(t.Context(), controller.VM{Namespace: "ns", Name: "vm"}, c.view); (a.release != "") != c.release || a.again != c.again {
			t.Errorf("%s: %+v", name, a)
		}
	}
	if a := (&Reconciler{}).decide(t.Context(), controller.VM{Namespace: "ns", Name: "vm"}, view{claim: claim(), now: now}); a.release != "" || a.reason != v1.ReasonNodeRemoved {
		t.Errorf("without a registry: %+v", a)
	}
}

// refusing is a client whose API server refuses to delete pods.
type refusing struct {
	client.Client
	why error
}

func (r refusing) Delete(context.Context, client.Object, ...client.DeleteOption) error { return r.why }

// A pod may change in a way that triggers no reconciliation while it is deleted: its scheduler writes another message. Then it is
// deleted in the next attempt.
func TestPodThatChangedIsRenewedLater(t *testing.T) {
	stamped := pod("", "a")
	stamped.OwnerReferences = []metav1.OwnerReference{{Kind: "StatefulSet", Name: "x", Controller: new(true)}}
	pods := schema.GroupResource{Resource: "pods"}
	for want, why := range map[bool]error{true: apierrors.NewConflict(pods, "p", errors.New("changed")), false: apierrors.NewNotFound(pods, "p")} {
		r := &Reconciler{Client: refusing{why: why}, Events: events.NewFakeRecorder(1)}
		if err := r.renew(t.Context(), stamped); (err != nil) != want {
			t.Errorf("after %v the reconciliation ends with %v", why, err)
		}
	}
}
