//go:build e2e

package cocoonmanager_test

import (
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubevirtv1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// replicaSets runs a set whose managers are killed after each of their writes: it never has an instance too many.
func (r *rig) replicaSets(t *testing.T, ns string, seen *births) {
	t.Helper()
	set := &kubevirtv1.VirtualMachineInstanceReplicaSet{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "farm"}}
	r.Kubectl(t, fmt.Sprintf(`
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstanceReplicaSet
metadata: {name: farm, namespace: %s}
spec:
  replicas: 2
  selector: {matchLabels: {app: farm}}
  template:
    metadata: {labels: {app: farm}}
    spec:
      domain: {devices: {}, memory: {guest: 128Mi}}
      terminationGracePeriodSeconds: 1
      volumes: [{name: root, containerDisk: {image: %s}}]
`, ns, fakenode.Image), "create", "-f", "-")
	numbers := func() string {
		if err := r.api.Get(t.Context(), client.ObjectKeyFromObject(set), set); err != nil {
			return err.Error()
		}
		var conditions []string
		for _, c := range set.Status.Conditions {
			conditions = append(conditions, " "+c.Reason)
		}
		return fmt.Sprintf("%d/%d%s", set.Status.ReadyReplicas, set.Status.Replicas, strings.Join(conditions, ""))
	}
	instances := func() []kubevirtv1.VirtualMachineInstance {
		t.Helper()
		all := &kubevirtv1.VirtualMachineInstanceList{}
		if err := r.api.List(t.Context(), all, client.InNamespace(ns), client.MatchingLabels{"app": "farm"}); err != nil {
			t.Fatal(err)
		}
		return all.Items
	}
	pods := func() int {
		seen.mu.Lock()
		defer seen.mu.Unlock()
		n := 0
		for pod := range seen.seen {
			if strings.HasPrefix(pod, "virt-launcher-farm-") {
				n++
			}
		}
		return n
	}
	patch := func(text string) {
		t.Helper()
		if err := r.api.Patch(t.Context(), set.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(text))); err != nil {
			t.Fatal(err)
		}
	}
	kubetest.Eventually(t, "the set", numbers, "2/2")
	if n := pods(); n != 2 {
		t.Errorf("a set of 2 had %d pods", n)
	}

	// One instance is deleted, and one crashes as soon as it runs, which is replaced after a pause.
	first := instances()[0]
	if err := r.api.Delete(t.Context(), &first); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "another instance", func() string {
		for _, vmi := range instances() {
			if vmi.Name == first.Name && vmi.UID != first.UID {
				return fmt.Sprint(vmi.Status.Phase, " ", numbers()) // the numbers may be those of before
			}
		}
		return "the same"
	}, "Running 2/2")
	r.node.Crash(t, kubevirt.VMName(&first))
	kubetest.Eventually(t, "the set", numbers, "1/1 FailedStart")
	kubetest.Eventually(t, "the set", func() string { return numbers()[:3] }, "2/2")
	if n := pods(); n != 4 {
		t.Errorf("with two replacements, a set of 2 had %d pods", n)
	}

	// An instance whose labels no longer match stays, and is replaced; the set takes it back later, and deletes one.
	second := instances()[1]
	r.Kubectl(t, "", "label", "vmi", second.Name, "-n", ns, "app=lab", "--overwrite")
	kubetest.Eventually(t, "a set that has lost an instance", func() string { return fmt.Sprint(len(instances()), " ", numbers()[:3]) }, "2 2/2")
	if err := r.api.Get(t.Context(), client.ObjectKeyFromObject(&second), &second); err != nil || metav1.GetControllerOf(&second) != nil || !second.DeletionTimestamp.IsZero() {
		t.Errorf("the released instance: %v %v", second.OwnerReferences, err)
	}
	patch(`{"spec":{"paused":true}}`)
	kubetest.Eventually(t, "a paused set", func() string { return fmt.Sprint(strings.Contains(numbers(), "Paused")) }, "true")
	r.Kubectl(t, "", "label", "vmi", second.Name, "-n", ns, "app=farm", "--overwrite")
	kubetest.Eventually(t, "a paused set that adopts", func() string { return fmt.Sprint(len(instances()), " ", numbers()[:3]) }, "3 3/3")
	patch(`{"spec":{"paused":false}}`)
	kubetest.Eventually(t, "the set", func() string { return fmt.Sprint(len(instances()), " ", numbers()[:3]) }, "2 2/2")
	if n := pods(); n != 5 {
		t.Errorf("with three replacements, a set of 2 had %d pods", n)
	}

	r.Kubectl(t, "", "scale", "vmirs", "farm", "-n", ns, "--replicas=1")
	kubetest.Eventually(t, "the set", func() string { return fmt.Sprint(len(instances()), " ", numbers()[:3]) }, "1 1/1")
	r.Kubectl(t, "", "delete", "vmirs", "farm", "-n", ns, "--cascade=orphan")
	if left := instances(); len(left) != 1 || !left[0].DeletionTimestamp.IsZero() {
		t.Errorf("left by an orphaning deletion: %v", left)
	}
	r.Kubectl(t, "", "delete", "vmi", "-l", "app=farm", "-n", ns, "--timeout=240s")
}
