package placement

import (
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func held(node string) *v1.VMPlacement {
	return &v1.VMPlacement{Status: v1.VMPlacementStatus{NodeName: node, NodeUID: "u-" + "a", MachineID: "m"}}
}

func sticky() *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns", Annotations: map[string]string{contract.KeySticky: "wait"}}}
}

func required(pod *corev1.Pod) []corev1.NodeSelectorTerm {
	if pod.Spec.Affinity == nil || pod.Spec.Affinity.NodeAffinity == nil || pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil
	}
	return pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
}

func TestStamp(t *testing.T) {
	pod := sticky()
	if Stamp(pod, nil) {
		t.Error("a pod without a claim is changed")
	}
	if !Stamp(pod, held("a")) || Stamp(pod, held("a")) {
		t.Error("the first stamp must change the pod, the second must not")
	}
	if d := diff.Of([]corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{on("a")}}}, required(pod)); d != "" || pod.Annotations[contract.KeyPlacedOn] != "a" {
		t.Errorf("annotations %v, terms %s", pod.Annotations, d)
	}
	// A copy whose claim names another node, and a copy whose claim was released.
	if !Stamp(pod, held("b")) {
		t.Error("a claim of another node does not change the pod")
	}
	if d := diff.Of([]corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{on("b")}}}, required(pod)); d != "" {
		t.Errorf("terms %s", d)
	}
	if !Stamp(pod, nil) || required(pod) != nil || pod.Annotations[contract.KeyPlacedOn] != "" {
		t.Errorf("terms %+v", required(pod))
	}
	// A stamp keeps the user's own requirements. Only they remain after the stamp is removed.
	zone := corev1.NodeSelectorRequirement{Key: "zone", Operator: corev1.NodeSelectorOpExists}
	own := []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{zone}}, {MatchFields: []corev1.NodeSelectorRequirement{on("c")}}}
	pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: own}}}
	before := pod.DeepCopy()
	Stamp(pod, held("a"))
	if got := required(pod); len(got) != 2 || len(got[0].MatchExpressions) != 1 || !reflect.DeepEqual(got[0].MatchFields, []corev1.NodeSelectorRequirement{on("a")}) || len(got[1].MatchFields) != 2 {
		t.Errorf("terms %+v", got)
	}
	Stamp(pod, nil)
	if got := required(pod); len(got) != 2 || len(got[0].MatchFields) > 0 || !reflect.DeepEqual(got[1], required(before)[1]) {
		t.Errorf("terms %+v", got)
	}
	for name, change := range map[string]func(*corev1.Pod, *v1.VMPlacement){
		"not sticky":             func(p *corev1.Pod, _ *v1.VMPlacement) { delete(p.Annotations, contract.KeySticky) },
		"invalid annotation":     func(p *corev1.Pod, _ *v1.VMPlacement) { p.Annotations[contract.KeySticky] = "yes" },
		"sticky scheduler":       func(p *corev1.Pod, _ *v1.VMPlacement) { p.Spec.SchedulerName = contract.StickyScheduler },
		"claim is being deleted": func(_ *corev1.Pod, c *v1.VMPlacement) { c.DeletionTimestamp = new(metav1.Now()) },
	} {
		pod, claim := sticky(), held("a")
		change(pod, claim)
		if Stamp(pod, claim) || required(pod) != nil {
			t.Errorf("%s: bound to %+v", name, required(pod))
		}
	}
}

func TestHold(t *testing.T) {
	now := metav1.Now()
	me := Node{Name: "a", UID: "u-a", MachineID: "m"}
	for name, c := range map[string]struct {
		was  v1.VMPlacementStatus
		node Node
		ok   bool
	}{
		"not claimed":                        {v1.VMPlacementStatus{}, me, true},
		"claimed by this node":               {held("a").Status, me, true},
		"node registered again":              {held("a").Status, Node{Name: "a", UID: "u-new", MachineID: "m"}, true},
		"another machine with the same name": {held("a").Status, Node{Name: "a", UID: "u-new", MachineID: "m2"}, false},
		"same name, machine ids unknown":     {v1.VMPlacementStatus{NodeName: "a", NodeUID: "u-old"}, Node{Name: "a", UID: "u-new"}, false},
		"claimed by another node":            {held("b").Status, me, false},
	} {
		got, err := hold(c.was, "vm", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", UID: "pod"}}, c.node, now)
		switch {
		case c.ok && err != nil, !c.ok && !errdefs.IsFailedPrecondition(err):
			t.Errorf("%s: %v", name, err)
		case c.ok && (got.NodeName != c.node.Name || got.NodeUID != c.node.UID || got.PodUID != "pod" || got.PodName != "p"):
			t.Errorf("%s: %+v", name, got)
		case !c.ok && diff.Of(c.was, got) != "":
			t.Errorf("%s: Hold is refused but changes the claim: %s", name, diff.Of(c.was, got))
		}
	}
}

func TestUnavailable(t *testing.T) {
	node := func(change func(*corev1.Node)) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "u-a"}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}}
		n.Status.NodeInfo.MachineID = "m"
		change(n)
		return n
	}
	for name, c := range map[string]struct {
		node *corev1.Node
		want string
	}{
		"ready":                 {node(func(*corev1.Node) {}), ""},
		"node registered again": {node(func(n *corev1.Node) { n.UID = "u-new" }), ""},
		"removed":               {nil, v1.ReasonNodeRemoved},
		"replaced":              {node(func(n *corev1.Node) { n.UID, n.Status.NodeInfo.MachineID = "u-new", "m2" }), v1.ReasonNodeReplaced},
		"away":                  {node(func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown }), v1.ReasonNodeNotReady},
	} {
		if reason, text := Unavailable(held("a"), c.node); reason != c.want || (text == "") != (c.want == "") {
			t.Errorf("%s: %q, %q", name, reason, text)
		}
	}
}
