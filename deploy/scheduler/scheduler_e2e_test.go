//go:build e2e

package scheduler_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/placement"
)

// Each test covers one fault that such a plugin can have, with a real scheduler and API server.
func TestSticky(t *testing.T) {
	c := start(t)
	t.Run("without-KubeVirt", func(t *testing.T) { withoutKubeVirt(t, c) })
	c.kubevirt(t)
	for name, test := range map[string]func(*testing.T, *cluster){
		"claims of two nodes":      claimsOfTwoNodes,
		"node removed and back":    nodeRemovedAndBack,
		"node replaced":            nodeReplaced,
		"two pods of one VM":       twoPodsOfOneVM,
		"copies are free":          copiesAreFree,
		"no preemption":            noPreemption,
		"volumes are bound":        volumesAreBound,
		"one cache":                oneCache,
		"default way":              defaultWay,
		"pods of nobody":           podsOfNobody,
		"KubeVirt VM stays":        kubevirtStays,
		"nothing is read":          nothingIsRead,
		"clones go to snapshots":   clonesGoToSnapshots,
		"record before bind":       recordBeforeBind,
		"record against conflicts": recordAgainstConflicts,
		"migration targets go":     migrationTargetsGo,
		"copied VMs are free":      copiedVMsAreFree,
		"named by hand":            namedByHand,
	} {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) { test(t, c) })
	}
}

// If two nodes claim one VM at once, one gets it, and the other is told where the state is (fault 6).
func claimsOfTwoNodes(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "m-a", 10)
	r.node("b", "m-b", 10)
	for i := range 10 {
		pods := [2]*corev1.Pod{}
		for j, on := range []string{"a", "b"} {
			pods[j] = r.pod(fmt.Sprintf("p%d-%s", i, on), sticky(corev1.DefaultSchedulerName), func(p *corev1.Pod) {
				p.Annotations[contract.KeyName] = fmt.Sprint("vm-", i)
				p.Spec.NodeName = r.on(on)
			})
		}
		var wg sync.WaitGroup
		var errs [2]error
		for j, p := range pods {
			wg.Go(func() {
				errs[j] = placement.Claims{Custom: c.custom, Nodes: c.client, Node: p.Spec.NodeName}.Hold(t.Context(), p)
			})
		}
		wg.Wait()
		lost := slices.IndexFunc(errs[:], errdefs.IsFailedPrecondition)
		if lost < 0 || errs[1-lost] != nil {
			t.Fatalf("claim %d: %v", i, errs)
		}
		// A repeated attempt gets the same answer.
		if err := r.boot(pods[1-lost].Name); err != nil {
			t.Error(err)
		}
		if err := r.boot(pods[lost].Name); !errdefs.IsFailedPrecondition(err) {
			t.Error(err)
		}
		// Nobody can move the claim either: it can only be released.
		_, err := r.claims().Patch(t.Context(), fmt.Sprint("vm-", i), types.MergePatchType, []byte(`{"status":{"nodeName":"elsewhere"}}`), metav1.PatchOptions{}, "status")
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "status.nodeName") {
			t.Errorf("a claim is moved: %v", err)
		}
		r.remove(pods[0].Name)
		r.remove(pods[1].Name)
	}
}

// A VM whose node is removed waits, reports why, and resumes as soon as the node is back (fault 10).
func nodeRemovedAndBack(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "machine", 10)
	on := r.run("vm", sticky(contract.StickyScheduler))
	r.node("b", "other", 10)
	r.remove("vm")
	r.close(on)
	r.pod("vm", sticky(contract.StickyScheduler), func(p *corev1.Pod) { p.Spec.Tolerations = nil })
	r.waits("vm", "untolerated taint")
	r.drop(on)
	r.waits("vm", "was removed")
	r.waits("vm", "delete the VMPlacement "+r.vm("vm"))
	r.until("the claim says it", func() bool { return r.reason("vm") == "NodeRemoved" })
	r.until("the manager says it to the pod", func() bool { return strings.Contains(r.events("vm"), "NodeRemoved node "+r.on("a")) })
	r.node("a", "machine", 10) // registered again, on its machine
	if got := r.placed("vm"); got != on {
		t.Errorf("placed on %s, its state is on %s", got, on)
	}
	if err := r.boot("vm"); err != nil {
		t.Error(err)
	}
	r.until("the claim says it", func() bool { return r.reason("vm") == "NodeReady" })
}

// reason is the reason in the condition of a claim.
func (r *room) reason(pod string) string {
	r.t.Helper()
	claim := must[*unstructured.Unstructured](r.t)(r.claims().Get(r.t.Context(), r.vm(pod), metav1.GetOptions{}))
	conditions, _, _ := unstructured.NestedSlice(claim.Object, "status", "conditions")
	for _, one := range conditions {
		if m, ok := one.(map[string]any); ok && m["type"] == "NodeAvailable" {
			return fmt.Sprint(m["reason"])
		}
	}
	return ""
}

// Another machine with the same node name does not count. A VM that is released goes to any node, at once (fault 10).
func nodeReplaced(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "machine", 10)
	r.run("vm", sticky(contract.StickyScheduler))
	r.remove("vm")
	r.drop("a")
	r.node("a", "another", 10)
	r.pod("vm", sticky(contract.StickyScheduler))
	r.waits("vm", "another machine")
	if err := r.claims().Delete(t.Context(), r.vm("vm"), metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	r.placed("vm")
}

// Pods of one VM go to one node, even if they are created at the same time (fault 6).
func twoPodsOfOneVM(t *testing.T, c *cluster) {
	r := c.room(t)
	for i := range 5 {
		r.node(fmt.Sprint(i), "", 100)
	}
	for i := range 10 {
		shared := func(p *corev1.Pod) { p.Annotations[contract.KeyName] = fmt.Sprint("shared-", i) }
		names := make([]string, 4)
		var wg sync.WaitGroup
		for j := range names {
			names[j] = fmt.Sprintf("p%d-%d", i, j)
			wg.Go(func() { r.pod(names[j], sticky(contract.StickyScheduler), shared) })
		}
		wg.Wait()
		first := r.placed(names[0])
		for _, name := range names[1:] {
			if on := r.placed(name); on != first {
				t.Errorf("pods of one VM are on %s and %s", first, on)
			}
		}
	}
}

// Fields that a manifest can copy bind no pod to a node (fault 11).
func copiesAreFree(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "machine", 10)
	r.run("vm", sticky(contract.StickyScheduler))
	claim := must[*unstructured.Unstructured](t)(r.claims().Get(t.Context(), r.vm("vm"), metav1.GetOptions{}))
	r.drop("a")
	r.node("b", "other", 10)
	fresh := claim.DeepCopy() // kubectl get -o yaml | sed | kubectl create
	fresh.SetName(r.vm("copy"))
	fresh.SetResourceVersion("")
	fresh.SetUID("")
	must[*unstructured.Unstructured](t)(r.claims().Create(t.Context(), fresh, metav1.CreateOptions{}))
	if on := r.run("copy", sticky(contract.StickyScheduler)); on != "b" {
		t.Errorf("a copy is on %s", on)
	}
}

// A pod that waits for its node preempts no pod on another node (fault 7).
func noPreemption(t *testing.T, c *cluster) {
	r := c.room(t)
	must[*schedulingv1.PriorityClass](t)(c.client.SchedulingV1().PriorityClasses().Create(t.Context(),
		&schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: r.name}, Value: 1000}, metav1.CreateOptions{}))
	high := func(p *corev1.Pod) { p.Spec.PriorityClassName = r.name }
	r.node("a", "machine", 1)
	r.run("vm", sticky(contract.StickyScheduler), high)
	r.remove("vm")
	r.close("a")
	r.node("b", "other", 1)
	r.pod("bystander", func(p *corev1.Pod) { p.Spec.NodeSelector[corev1.LabelHostname] = r.on("b") })
	r.placed("bystander")
	r.pod("vm", sticky(contract.StickyScheduler), high, func(p *corev1.Pod) { p.Spec.Tolerations = nil })
	r.waits("vm", "untolerated taint")
	if p := r.get("vm"); p.Status.NominatedNodeName != "" {
		t.Errorf("the pod is promised node %s", p.Status.NominatedNodeName)
	}
	if p := r.get("bystander"); p.DeletionTimestamp != nil {
		t.Error("a pod on another node was thrown off")
	}
}

// A PersistentVolumeClaim that waits for its first consumer is bound, on the node of the pod (fault 8).
func volumesAreBound(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "", 10)
	r.node("b", "", 10)
	ctx := t.Context()
	size := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	must[*storagev1.StorageClass](t)(c.client.StorageV1().StorageClasses().Create(ctx, &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: r.name}, Provisioner: "kubernetes.io/no-provisioner", VolumeBindingMode: new(storagev1.VolumeBindingWaitForFirstConsumer),
	}, metav1.CreateOptions{}))
	must[*corev1.PersistentVolume](t)(c.client.CoreV1().PersistentVolumes().Create(ctx, &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: r.name},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: size, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: r.name,
			PersistentVolumeSource: corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: "/mnt"}},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{r.on("b")}}},
			}}}},
		},
	}, metav1.CreateOptions{}))
	must[*corev1.PersistentVolumeClaim](t)(c.client.CoreV1().PersistentVolumeClaims(r.name).Create(ctx, &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "disk"},
		Spec:       corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: &r.name, Resources: corev1.VolumeResourceRequirements{Requests: size}},
	}, metav1.CreateOptions{}))
	r.pod("vm", sticky(contract.StickyScheduler), func(p *corev1.Pod) {
		p.Spec.Volumes = []corev1.Volume{{Name: "disk", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "disk"}}}}
	})
	if on := r.placed("vm"); on != "b" {
		t.Errorf("placed on %s, the volume is on b", on)
	}
	if pvc := must[*corev1.PersistentVolumeClaim](t)(c.client.CoreV1().PersistentVolumeClaims(r.name).Get(ctx, "disk", metav1.GetOptions{})); pvc.Spec.VolumeName != r.name {
		t.Errorf("the claim has volume %q", pvc.Spec.VolumeName)
	}
}

// Pods of both profiles that are created at once do not overfill a node: the profiles share a cache (fault 9).
func oneCache(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "", 20)
	var wg sync.WaitGroup
	for i := range 40 {
		profile := []string{contract.StickyScheduler, corev1.DefaultSchedulerName}[i%2]
		wg.Go(func() { r.pod(fmt.Sprint("p-", i), sticky(profile)) })
	}
	wg.Wait()
	count := func() (bound, waiting int) {
		list := must[*corev1.PodList](t)(c.client.CoreV1().Pods(r.name).List(t.Context(), metav1.ListOptions{}))
		for _, p := range list.Items {
			if p.Spec.NodeName != "" {
				bound++
			} else if slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodScheduled }) {
				waiting++
			}
		}
		return bound, waiting
	}
	r.until("the node is full, and each other pod waits", func() bool { bound, waiting := count(); return bound >= 20 && bound+waiting == 40 })
	if bound, _ := count(); bound != 20 {
		t.Errorf("%d pods are on a node with room for 20", bound)
	}
}

// With the stock profile, the creator of the next pod binds it to the node by a node affinity. A pod that is bound to a node
// which is released is created again by its owner.
func defaultWay(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "machine", 10)
	set := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "cocoonset.cocoonstack.io/v1", "kind": "CocoonSet", "metadata": map[string]any{"name": "team"},
		"spec": map[string]any{"sticky": "wait", "nodePool": r.name, "agent": map[string]any{"mode": "run", "image": "base"}},
	}}
	pool := []byte(`{"metadata":{"labels":{"cocoonstack.io/pool":"` + r.name + `"}}}`)
	must[*corev1.Node](t)(c.client.CoreV1().Nodes().Patch(t.Context(), r.on("a"), types.MergePatchType, pool, metav1.PatchOptions{}))
	sets := c.custom.Resource(schema.GroupVersionResource{Group: "cocoonset.cocoonstack.io", Version: "v1", Resource: "cocoonsets"}).Namespace(r.name)
	must[*unstructured.Unstructured](t)(sets.Create(t.Context(), set, metav1.CreateOptions{}))
	there := func() bool {
		_, err := c.client.CoreV1().Pods(r.name).Get(t.Context(), "team-0", metav1.GetOptions{})
		return err == nil
	}
	r.until("the set has a pod", there)
	r.placed("team-0")
	if err := r.boot("team-0"); err != nil {
		t.Fatal(err)
	}
	r.until("the manager knows the claim", func() bool { return r.reason("team-0") == "NodeReady" })
	r.node("b", "other", 10)
	must[*corev1.Node](t)(c.client.CoreV1().Nodes().Patch(t.Context(), r.on("b"), types.MergePatchType, pool, metav1.PatchOptions{}))
	first := r.get("team-0")
	if first.Spec.SchedulerName != corev1.DefaultSchedulerName || first.Annotations[contract.KeyPlacedOn] != "" {
		t.Errorf("the first pod is bound: %+v", first.Spec.Affinity)
	}
	again := func(not types.UID) *corev1.Pod {
		t.Helper()
		r.until("the set has another pod", func() bool {
			p, err := c.client.CoreV1().Pods(r.name).Get(t.Context(), "team-0", metav1.GetOptions{})
			return err == nil && p.UID != not
		})
		return r.get("team-0")
	}
	kill := func() {
		if err := c.client.CoreV1().Pods(r.name).Delete(t.Context(), "team-0", metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		kill()
		next := again(first.UID)
		if on := r.placed("team-0"); on != "a" || next.Annotations[contract.KeyPlacedOn] != r.on("a") {
			t.Fatalf("placed on %s, bound to %q", on, next.Annotations[contract.KeyPlacedOn])
		}
		if err := r.boot("team-0"); err != nil {
			t.Fatal(err)
		}
		first = next
	}
	kill()
	r.drop("a")
	waiting := again(first.UID)
	r.until("the manager says why", func() bool { return strings.Contains(r.events("team-0"), "NodeRemoved node "+r.on("a")) })
	if err := r.claims().Delete(t.Context(), r.vm("team-0"), metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	again(waiting.UID)
	if on := r.placed("team-0"); on != "b" {
		t.Errorf("placed on %s", on)
	}
	if err := sets.Delete(t.Context(), "team", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
}

// The stock profile and ours work in a cluster without KubeVirt.
func withoutKubeVirt(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "", 10)
	r.pod("stock")
	r.pod("ours", plain)
	r.placed("stock")
	r.placed("ours")
}

// A clone goes where its snapshot is. If that node is full, it goes to a node with the same CPU class, even if others are emptier.
func clonesGoToSnapshots(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("has", "", 2)
	r.node("alike", "", 10)
	for i := range 3 {
		r.node(fmt.Sprint("other-", i), "", 100)
		r.change(fmt.Sprint("other-", i), `{"metadata":{"labels":{"cocoonstack.io/snapshot-cpu-class":"xeon"}}}`)
	}
	r.change("alike", `{"metadata":{"labels":{"cocoonstack.io/snapshot-cpu-class":"zen4"}}}`)
	r.change("has", `{"metadata":{"labels":{"cocoonstack.io/snapshot-cpu-class":"zen4"}},"status":{"images":[{"names":["team/base:v2"],"sizeBytes":1}]}}`)
	for i, want := range []string{"has", "has", "alike", "alike"} {
		name := fmt.Sprint("clone-", i)
		r.pod(name, plain, func(p *corev1.Pod) {
			p.Annotations = map[string]string{contract.KeyMode: string(contract.ModeClone), contract.KeyImage: "team/base:v2"}
		})
		if on := r.placed(name); on != want {
			t.Errorf("%s is on %s, want %s", name, on, want)
		}
	}
}
