//go:build e2e

package scheduler_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/placement"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// 20 VMs on three virtual nodes, with the shipped rights and with their own identities, are started ten times each: none moves.
func TestVMsStay(t *testing.T) {
	const vms, starts = 20, 10
	k := kubetest.Up(t, "--with", "scheduler")
	client := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(k.Config))
	r := (&cluster{rest: k.Config, client: client, custom: must[*dynamic.DynamicClient](t)(dynamic.NewForConfig(k.Config))}).room(t)
	label := must[[]byte](t)(json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]string{"room": r.name}}}))
	nodes := map[string]*fakenode.Node{}
	for i := range 3 {
		name := r.on(fmt.Sprint(i))
		nodes[name] = fakenode.Start(t, fakenode.Options{Name: name, Identity: k.Identity(t, name)})
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
	for start := range starts {
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
		if start == starts-1 {
			break // these stay, for the next part
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
	t.Run("clones-follow", func(t *testing.T) { clonesFollow(t, r, nodes) })
	t.Run("to-themselves", func(t *testing.T) { nodesKeepToThemselves(t, k, r) })
}

// When a node takes a snapshot, clones of it go to that node, because the node reports the snapshot.
func clonesFollow(t *testing.T, r *room, nodes map[string]*fakenode.Node) {
	home := r.get("vm-0").Spec.NodeName
	nodes[home].Save(t, r.vm("vm-0"), "base:v1")
	nodes[home].Stop(t)
	nodes[home].Start(t) // it asks the engine at start, and then once a minute
	r.until("the node says what it has", func() bool {
		n := must[*corev1.Node](t)(r.client.CoreV1().Nodes().Get(t.Context(), home, metav1.GetOptions{}))
		return len(n.Status.Images) == 1 && n.Status.Images[0].Names[0] == r.name+"/base:v1"
	})
	const clones = 3
	for i := range clones {
		r.pod(fmt.Sprint("clone-", i), plain, func(p *corev1.Pod) {
			p.Annotations = map[string]string{contract.KeyMode: string(contract.ModeClone)}
			p.Spec.Containers[0].Image = "base:v1"
		})
	}
	for i := range clones {
		name := fmt.Sprint("clone-", i)
		r.until("the clone runs", func() bool { return r.get(name).Status.Phase == corev1.PodRunning })
		if on := r.get(name).Spec.NodeName; on != home {
			t.Errorf("%s is on %s, the snapshot is on %s", name, on, home)
		}
	}
}

// With its credentials, a node can write only its own objects. The allowed writes to itself have happened earlier in the test.
func nodesKeepToThemselves(t *testing.T, k *kubetest.Cluster, r *room) {
	k.Wide(t)
	one, other := r.on("0"), r.on("1")
	theirs := must[*corev1.Node](t)(r.client.CoreV1().Nodes().Get(t.Context(), other, metav1.GetOptions{}))
	mine := must[*corev1.Node](t)(r.client.CoreV1().Nodes().Get(t.Context(), one, metav1.GetOptions{}))
	victim := r.pod("victim", func(p *corev1.Pod) { p.Spec.NodeName, p.Spec.Containers[0].Image = other, fakenode.Image })
	own := r.pod("own", func(p *corev1.Pod) { p.Spec.NodeName, p.Spec.Containers[0].Image = one, fakenode.Image })
	patch := []byte(`{"status":{"message":"x"}}`)
	claim := func(as *rest.Config, vm string, status map[string]any) error {
		claims := must[*dynamic.DynamicClient](t)(dynamic.NewForConfig(as)).Resource(placement.Resource).Namespace(r.name)
		o, err := claims.Get(t.Context(), vm, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			o = &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"name": vm}, "spec": map[string]any{}}}
			o.SetGroupVersionKind(v1.GroupVersion.WithKind("VMPlacement"))
			o, err = claims.Create(t.Context(), o, metav1.CreateOptions{})
		}
		if err != nil {
			return err
		}
		o.Object["status"] = status
		_, err = claims.UpdateStatus(t.Context(), o, metav1.UpdateOptions{})
		return err
	}
	bound := must[*rest.Config](t)(clientcmd.BuildConfigFromFlags("", k.NodeAccount(t, "vk-cocoon", one)))
	identity := must[*rest.Config](t)(clientcmd.BuildConfigFromFlags("", k.Identity(t, one)))
	for name, as := range map[string]*rest.Config{"bound-token": bound, "own-identity": identity} {
		kube := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(as))
		for what, try := range map[string]func() error{
			"claims for another node": func() error {
				return claim(as, name+"-1", map[string]any{"nodeName": other, "nodeUID": string(theirs.UID)})
			},
			"writes another's claim": func() error {
				if err := claim(r.rest, name+"-2", map[string]any{"nodeName": other, "nodeUID": string(theirs.UID)}); err != nil {
					t.Fatal(err)
				}
				return claim(as, name+"-2", map[string]any{"nodeName": other, "nodeUID": string(theirs.UID), "machineID": "mine"})
			},
			"writes another's pod": func() error {
				_, err := kube.CoreV1().Pods(r.name).Patch(t.Context(), victim.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
				return err
			},
			"deletes another's pod": func() error {
				return kube.CoreV1().Pods(r.name).Delete(t.Context(), victim.Name, metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
			},
			"writes another node": func() error {
				_, err := kube.CoreV1().Nodes().Patch(t.Context(), other, types.MergePatchType, []byte(`{"metadata":{"labels":{"x":"y"}}}`), metav1.PatchOptions{})
				return err
			},
			"writes another's status": func() error {
				_, err := kube.CoreV1().Nodes().Patch(t.Context(), other, types.MergePatchType, []byte(`{"status":{"images":[]}}`), metav1.PatchOptions{}, "status")
				return err
			},
			"makes another node": func() error {
				_, err := kube.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name + "-more"}}, metav1.CreateOptions{})
				return err
			},
			"renews another's lease": func() error {
				lease, err := kube.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(t.Context(), other, metav1.GetOptions{})
				if err == nil {
					_, err = kube.CoordinationV1().Leases(corev1.NamespaceNodeLease).Update(t.Context(), lease, metav1.UpdateOptions{})
				}
				return err
			},
		} {
			var err error
			r.until("it is refused: "+name+" "+what, func() bool { err = try(); return apierrors.IsForbidden(err) }) // policies take effect after a moment
		}
		if err := claim(as, name+"-3", map[string]any{"nodeName": one, "nodeUID": string(mine.UID), "podName": own.Name}); err != nil {
			t.Errorf("%s: a node cannot claim for itself: %v", name, err)
		}
	}
	// A node must not claim a VM that none of its pods is for: the VM's next pod would go there, with its Secrets.
	for _, pod := range []string{"", victim.Name, "none"} {
		status := map[string]any{"nodeName": one, "nodeUID": string(mine.UID), "podName": pod}
		if err := claim(identity, "lured", status); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "has no pod "+pod) {
			t.Errorf("a claim for pod %q: %v", pod, err)
		}
	}
	// A token that names neither a node nor a pod is limited only by the account's rights.
	loose := must[*rest.Config](t)(clientcmd.BuildConfigFromFlags("", k.ServiceAccount(t, "vk-cocoon", nil)))
	if err := claim(loose, "loose", map[string]any{"nodeName": other, "nodeUID": string(theirs.UID)}); err != nil {
		t.Errorf("a token that is bound to nothing: %v", err)
	}
	if err := claim(bound, "uid", map[string]any{"nodeName": one, "nodeUID": "made-up"}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "status.nodeUID") {
		t.Errorf("a node of another UID: %v", err)
	}
}
