//go:build bench

package bench

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/placement"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

const removedNodes = 20 // of each profile

// removed measures how soon a user sees why a VM waits after its node is removed from the cluster, one node at a time.
func removed(t *testing.T, results *table) {
	p := newPlacing(t, kubetest.Start(t, "--with", "manager,scheduler"))
	if err := p.node(t, stickyNodes); err != nil { // it stays: without any node, schedulers stop early
		t.Fatal(err)
	}
	var claim, event, condition samples
	for i := range 2 * removedNodes {
		profile := []string{contract.StickyScheduler, corev1.DefaultSchedulerName}[i%2]
		if err := p.node(t, i); err != nil {
			t.Fatal(err)
		}
		pod := p.pod("removed", i, profile)
		pod.UID = "before"
		if err := (placement.Claims{Custom: p.custom, Nodes: p.kube, Node: nodeName(i)}).Hold(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
		until(t, time.Minute, "the manager knows the claim", func() bool { return p.reason(t, pod) == v1.ReasonNodeReady })
		began := time.Now()
		if err := p.kube.CoreV1().Nodes().Delete(t.Context(), nodeName(i), metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		claim = append(claim, until(t, time.Minute, "the claim says why", func() bool { return p.reason(t, pod) == v1.ReasonNodeRemoved }).Sub(began))
		pod.UID = ""
		must(p.kube.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{}))(t)
		event = append(event, until(t, time.Minute, "an Event of the pod says why", func() bool {
			options := metav1.ListOptions{FieldSelector: "reason=" + v1.ReasonNodeRemoved + ",involvedObject.name=" + pod.Name}
			return len(must(p.kube.CoreV1().Events(namespace).List(t.Context(), options))(t).Items) > 0
		}).Sub(began))
		if profile == contract.StickyScheduler {
			condition = append(condition, until(t, time.Minute, "the pod says why", func() bool {
				return strings.Contains(unscheduled(must(p.kube.CoreV1().Pods(namespace).Get(t.Context(), pod.Name, metav1.GetOptions{}))(t)), "was removed")
			}).Sub(began))
		}
	}
	for _, r := range []struct {
		what string
		took samples
	}{{"the claim's condition", claim}, {"an Event of the waiting pod", event}, {"the pod's own condition (stickyvm)", condition}} {
		worst := r.took.quantile(1)
		results.add(row{
			what: "node removed until it is said by " + r.what + ": p50 (A), worst (B)", a: ms(r.took.median()), b: ms(worst),
			figure: fmt.Sprintf("%.1f s", worst.Seconds()), goal: "< 5 s", n: len(r.took), missed: worst >= 5*time.Second,
		})
	}
}

// reason is the reason in the condition of the claim of pod's VM, "" if there is none.
func (p *placing) reason(t *testing.T, pod *corev1.Pod) string {
	t.Helper()
	o := must(p.custom.Resource(placement.Resource).Namespace(namespace).Get(t.Context(), placement.NameOf(pod), metav1.GetOptions{}))(t)
	claim := &v1.VMPlacement{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, claim); err != nil {
		t.Fatal(err)
	}
	for _, c := range claim.Status.Conditions {
		if c.Type == v1.ConditionNodeAvailable {
			return c.Reason
		}
	}
	return ""
}

// unscheduled is the scheduler's message for a pod that waits.
func unscheduled(pod *corev1.Pod) string {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return c.Message
		}
	}
	return ""
}
