//go:build e2e

package cocoonmanager_test

import (
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubevirtv1 "kubevirt.io/api/core/v1"
	poolv1 "kubevirt.io/api/pool/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// pools runs a pool whose managers are killed after each of their writes: it never has a machine too many, and each of its guests starts as
// often as it must.
func (r *rig) pools(t *testing.T, ns string, seen *births) {
	t.Helper()
	pool := &poolv1.VirtualMachinePool{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "pool"}}
	r.Kubectl(t, fmt.Sprintf(`
apiVersion: pool.kubevirt.io/v1beta1
kind: VirtualMachinePool
metadata: {name: pool, namespace: %s}
spec:
  replicas: 2
  maxUnavailable: 1
  selector: {matchLabels: {app: pool}}
  virtualMachineTemplate:
    metadata: {labels: {app: pool}}
    spec:
      runStrategy: Always
      template:
        metadata: {labels: {app: pool}}
        spec:
          domain: {devices: {}, memory: {guest: 128Mi}}
          terminationGracePeriodSeconds: 1
          volumes: [{name: root, containerDisk: {image: %s}}]
`, ns, fakenode.Image), "create", "-f", "-")
	numbers := func() string {
		if err := r.api.Get(t.Context(), client.ObjectKeyFromObject(pool), pool); err != nil {
			return err.Error()
		}
		return fmt.Sprintf("%d/%d", pool.Status.ReadyReplicas, pool.Status.Replicas)
	}
	machines := func() string {
		t.Helper()
		all := &kubevirtv1.VirtualMachineList{}
		if err := r.api.List(t.Context(), all, client.InNamespace(ns), client.MatchingLabels{"app": "pool"}); err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, vm := range all.Items {
			names = append(names, vm.Name)
		}
		return strings.Join(names, " ")
	}
	pods := func() int {
		seen.mu.Lock()
		defer seen.mu.Unlock()
		n := 0
		for pod, born := range seen.seen {
			if strings.HasPrefix(pod, "virt-launcher-pool-") {
				n += len(born)
			}
		}
		return n
	}
	kubetest.Eventually(t, "the pool", numbers, "2/2")
	if got, n := machines(), pods(); got != "pool-0 pool-1" || n != 2 {
		t.Errorf("a pool of 2 has %s, and had %d pods", got, n)
	}

	// One is deleted: the next one has its name.
	first := &kubevirtv1.VirtualMachine{}
	if err := r.api.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "pool-0"}, first); err != nil {
		t.Fatal(err)
	}
	r.Kubectl(t, "", "delete", "vm", "pool-0", "-n", ns, "--timeout=240s")
	kubetest.Eventually(t, "another machine", func() string {
		next := &kubevirtv1.VirtualMachine{}
		if err := r.api.Get(t.Context(), client.ObjectKeyFromObject(first), next); err != nil || next.UID == first.UID {
			return fmt.Sprint("none: ", err)
		}
		return fmt.Sprint(numbers(), " after ", pods(), " pods") // the numbers may be those of before
	}, "2/2 after 3 pods")

	// The template changes: each guest restarts once.
	r.Kubectl(t, "", "patch", "vmpool", "pool", "-n", ns, "--type=json", "-p", `[{"op":"add","path":"/spec/virtualMachineTemplate/spec/template/spec/hostname","value":"other"}]`)
	kubetest.Eventually(t, "the guests", func() string {
		all := &kubevirtv1.VirtualMachineInstanceList{}
		if err := r.api.List(t.Context(), all, client.InNamespace(ns), client.MatchingLabels{"app": "pool"}); err != nil {
			t.Fatal(err)
		}
		var said []string
		for _, vmi := range all.Items {
			said = append(said, vmi.Name+" "+vmi.Spec.Hostname)
		}
		return fmt.Sprint(strings.Join(said, " "), " ", numbers(), " after ", pods(), " pods")
	}, "pool-0 other pool-1 other 2/2 after 5 pods")
	r.Kubectl(t, "", "scale", "vmpool", "pool", "-n", ns, "--replicas=1")
	kubetest.Eventually(t, "the pool", func() string { return numbers() + " " + machines() }, "1/1 pool-0")
	r.Kubectl(t, "", "delete", "vmpool", "pool", "-n", ns)
	kubetest.Eventually(t, "its machines", machines, "")
}
