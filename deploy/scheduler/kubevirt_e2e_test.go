//go:build e2e

package scheduler_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"cocoonstack.io/cocoon/api/contract"
)

// Pods without an owner, of a controller, or of an instance without a VM are placed like any other pod (faults 1 and 2).
func podsOfNobody(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "", 10)
	r.pod("nobodys", plain)
	owner := must[*corev1.ConfigMap](t)(c.client.CoreV1().ConfigMaps(r.name).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "owner"}}, metav1.CreateOptions{}))
	r.pod("controlled", ownedBy("v1", "ConfigMap", "owner", owner.UID))
	r.pod("others", ownedBy("example.com/v1", "VirtualMachineInstance", "x", "2"))
	r.pod("lone", r.lone("lone"))
	for _, name := range []string{"nobodys", "controlled", "others", "lone"} {
		r.placed(name)
	}
}

func (r *room) lone(name string) podOption { return r.instance(name, nil) }

// The scenario of the seed: the node is recorded on the VirtualMachine, and the record outlives pods and instances.
func kubevirtStays(t *testing.T, c *cluster) {
	r := c.room(t)
	for i := range 3 {
		r.node(fmt.Sprint(i), "", 100)
	}
	of := r.machine("fedora", nil)
	r.pod("launcher-0", of)
	home := r.placed("launcher-0")
	if got := r.recorded("fedora"); got != home {
		t.Errorf("recorded %q, placed on %s", got, home)
	}
	vm := must[*unstructured.Unstructured](t)(c.custom.Resource(machines).Namespace(r.name).Get(t.Context(), "fedora", metav1.GetOptions{}))
	for i := range 10 {
		r.remove(fmt.Sprint("launcher-", i))
		if err := c.custom.Resource(instances).Namespace(r.name).Delete(t.Context(), "fedora", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprint("launcher-", i+1)
		r.pod(name, r.instance("fedora", vm))
		if on := r.placed(name); on != home {
			t.Errorf("moved from %s to %s", home, on)
		}
	}
	r.remove("launcher-10")
	r.drop(home)
	r.pod("launcher-11", of, func(p *corev1.Pod) { p.OwnerReferences = r.instanceOwner("fedora") })
	r.waits("launcher-11", "remove the annotation "+stickyNode)
	free := []byte(`{"metadata":{"annotations":{"` + stickyNode + `":null}}}`)
	must[*unstructured.Unstructured](t)(c.custom.Resource(machines).Namespace(r.name).Patch(t.Context(), "fedora", types.MergePatchType, free, metav1.PatchOptions{}))
	if on := r.placed("launcher-11"); on == home || r.recorded("fedora") != on {
		t.Errorf("placed on %s, recorded %s", on, r.recorded("fedora"))
	}
}

func (r *room) instanceOwner(name string) []metav1.OwnerReference {
	r.t.Helper()
	o := must[*unstructured.Unstructured](r.t)(r.custom.Resource(instances).Namespace(r.name).Get(r.t.Context(), name, metav1.GetOptions{}))
	p := &corev1.Pod{}
	ownedBy("kubevirt.io/v1", "VirtualMachineInstance", name, o.GetUID())(p)
	return p.OwnerReferences
}

// Placing pods reads nothing from the API server (fault 3), by the scheduler's own count.
func nothingIsRead(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "", 100)
	r.pod("first", r.machine("first", nil)) // from here on everything is watched
	r.placed("first")
	const pods = 20
	before := c.requests(t)
	for i := range pods {
		r.pod(fmt.Sprint("kubevirt-", i), r.machine(fmt.Sprint("vm-", i), nil))
		r.pod(fmt.Sprint("cocoon-", i), sticky(contract.StickyScheduler))
	}
	for i := range pods {
		r.placed(fmt.Sprint("kubevirt-", i))
		r.placed(fmt.Sprint("cocoon-", i))
	}
	if reads := c.requests(t) - before; reads >= pods { // a watch may have been reopened
		t.Errorf("%d reads for %d pods", reads, 2*pods)
	}
}

// A pod whose node cannot be recorded is not bound. Once it can be recorded, the pod is bound without any change to it (fault 4).
func recordBeforeBind(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "", 10)
	of := r.machine("vm", nil)
	policies := c.custom.Resource(schema.GroupVersionResource{Group: "admissionregistration.k8s.io", Version: "v1", Resource: "validatingadmissionpolicies"})
	bindings := c.custom.Resource(schema.GroupVersionResource{Group: "admissionregistration.k8s.io", Version: "v1", Resource: "validatingadmissionpolicybindings"})
	meta := map[string]any{"name": r.name}
	must[*unstructured.Unstructured](t)(policies.Create(t.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "metadata": meta,
		"spec": map[string]any{
			"matchConstraints": map[string]any{"resourceRules": []any{map[string]any{"apiGroups": []any{"kubevirt.io"}, "apiVersions": []any{"*"}, "operations": []any{"UPDATE"}, "resources": []any{"virtualmachines"}}}},
			"validations":      []any{map[string]any{"expression": "object.metadata.namespace != '" + r.name + "'", "message": "VMs are locked"}},
		},
	}}, metav1.CreateOptions{}))
	must[*unstructured.Unstructured](t)(bindings.Create(t.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding", "metadata": meta,
		"spec": map[string]any{"policyName": r.name, "validationActions": []any{"Deny"}},
	}}, metav1.CreateOptions{}))
	r.until("VMs are locked", func() bool { // policies take effect after a moment
		_, err := c.custom.Resource(machines).Namespace(r.name).Patch(t.Context(), "vm", types.MergePatchType, []byte(`{"metadata":{"labels":{"probe":"1"}}}`), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
		return err != nil
	})
	r.pod("launcher", of)
	r.until("the scheduler says why", func() bool { return strings.Contains(r.events("launcher"), "VMs are locked") })
	if on := r.get("launcher").Spec.NodeName; on != "" || r.recorded("vm") != "" {
		t.Errorf("bound to %q, recorded %q", on, r.recorded("vm"))
	}
	for _, o := range []interface {
		Delete(ctx context.Context, name string, options metav1.DeleteOptions, sub ...string) error
	}{bindings, policies} {
		if err := o.Delete(t.Context(), r.name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if on := r.placed("launcher"); r.recorded("vm") != on {
		t.Errorf("bound to %q, recorded %q", on, r.recorded("vm"))
	}
}

// A node is recorded on a VM even if someone else writes to the VM all the time, based on the last read (fault 5).
func recordAgainstConflicts(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "", 100)
	for i := range 5 {
		name := fmt.Sprint("vm-", i)
		of := r.machine(name, nil)
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				_, _ = c.custom.Resource(machines).Namespace(r.name).Patch(ctx, name, types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{"busy":"%d"}}}`, n), metav1.PatchOptions{})
				if n > 50 {
					return
				}
			}
		})
		r.pod(name, of)
		on := r.placed(name)
		stop()
		wg.Wait()
		if got := r.recorded(name); got != on {
			t.Errorf("placed on %q, recorded %q", on, got)
		}
	}
}

// A pod that a VM migrates to is not sent back to the node that the VM leaves (fault 6).
func migrationTargetsGo(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "", 10)
	of := r.machine("vm", nil)
	r.pod("source", of)
	r.placed("source")
	r.node("b", "", 10)
	r.pod("target", of, func(p *corev1.Pod) {
		metav1.SetMetaDataLabel(&p.ObjectMeta, "kubevirt.io/migrationJobUID", "job")
		p.Spec.NodeSelector[corev1.LabelHostname] = r.on("b")
	})
	if on := r.placed("target"); on != "b" || r.recorded("vm") != "a" {
		t.Errorf("the target is on %s, %s is recorded", on, r.recorded("vm"))
	}
}

// A copy of a VirtualMachine, including its annotations, may go to any node, and gets its own record (fault 11).
func copiedVMsAreFree(t *testing.T, c *cluster) {
	r := c.room(t)
	r.node("a", "", 10)
	r.pod("one", r.machine("one", nil))
	r.placed("one")
	vm := must[*unstructured.Unstructured](t)(c.custom.Resource(machines).Namespace(r.name).Get(t.Context(), "one", metav1.GetOptions{}))
	r.drop("a")
	r.node("b", "", 10)
	r.pod("two", r.machine("two", vm.GetAnnotations()))
	if on := r.placed("two"); on != "b" || r.recorded("two") != "b" {
		t.Errorf("the copy is on %s, recorded %s", on, r.recorded("two"))
	}
}

// A user may name the node by hand, as in the seed.
func namedByHand(t *testing.T, c *cluster) {
	r := c.room(t)
	for i := range 4 {
		r.node(fmt.Sprint(i), "", 10)
	}
	r.pod("vm", r.machine("vm", map[string]string{stickyNode: r.on("2")}))
	if on := r.placed("vm"); on != "2" {
		t.Errorf("placed on %s", on)
	}
}
