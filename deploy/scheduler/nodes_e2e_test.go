//go:build e2e

package scheduler_test

import (
	"encoding/json"
	"fmt"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// 20 VMs on three virtual nodes, with the rights that they are shipped with, are started ten times each: none moves.
func TestVMsStay(t *testing.T) {
	const vms, starts = 20, 10
	k := kubetest.Up(t, "--with", "scheduler")
	k.Kubectl(t, "", "apply", "--server-side", "-f", "../namespace.yaml", "-f", "../vk-cocoon/rbac.yaml")
	client := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(k.Config))
	r := (&cluster{rest: k.Config, client: client, custom: must[*dynamic.DynamicClient](t)(dynamic.NewForConfig(k.Config))}).room(t)
	kubeconfig := k.ServiceAccount(t, "vk-cocoon", nil)
	label := must[[]byte](t)(json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]string{"room": r.name}}}))
	for i := range 3 {
		name := r.on(fmt.Sprint(i))
		fakenode.Start(t, fakenode.Options{Name: name, Kubeconfig: kubeconfig})
		r.until("the node is there", func() bool {
			_, err := client.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, label, metav1.PatchOptions{})
			return err == nil
		})
	}
	pod := r.spec("", sticky(contract.StickyScheduler))
	pod.Labels, pod.Spec.Containers[0].Image, pod.Spec.TerminationGracePeriodSeconds = map[string]string{"app": "vms"}, fakenode.Image, new(int64(1))
	set := &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "vm"},
		Spec: appsv1.StatefulSetSpec{
			Replicas: new(int32(vms)), PodManagementPolicy: appsv1.ParallelPodManagement, Selector: &metav1.LabelSelector{MatchLabels: pod.Labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels, Annotations: pod.Annotations}, Spec: pod.Spec},
		},
	}
	must[*appsv1.StatefulSet](t)(client.AppsV1().StatefulSets(r.name).Create(t.Context(), set, metav1.CreateOptions{}))
	home, seen, moves := map[string]string{}, map[types.UID]bool{}, 0
	for range starts {
		var running []corev1.Pod
		r.until("all VMs run", func() bool {
			running = nil
			for _, p := range must[*corev1.PodList](t)(client.CoreV1().Pods(r.name).List(t.Context(), metav1.ListOptions{})).Items {
				if p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil && !seen[p.UID] {
					running = append(running, p)
				}
			}
			return len(running) == vms
		})
		for _, p := range running {
			seen[p.UID] = true
			if home[p.Name] == "" {
				home[p.Name] = p.Spec.NodeName
			} else if home[p.Name] != p.Spec.NodeName {
				moves++
			}
		}
		if err := client.CoreV1().Pods(r.name).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	used := map[string]bool{}
	for _, on := range home {
		used[on] = true
	}
	if moves != 0 || len(used) < 2 || len(home) != vms {
		t.Errorf("%d moves in %d starts of %d VMs on %d nodes", moves, len(seen), len(home), len(used))
	}
	t.Logf("%d starts, %d moves, %d nodes", len(seen), moves, len(used))
}
