package stickyvm

import (
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	fwk "k8s.io/kube-scheduler/framework"
)

// Names from Cocoon's API (api/contract).
const (
	askAnnotation  = "vm.cocoonstack.io/sticky" // on a pod: its VM is sticky
	nameAnnotation = "vm.cocoonstack.io/name"   // on a pod: the name of its VM
)

// Names from KubeVirt's API.
const (
	kubevirtGroup  = "kubevirt.io"
	migrationLabel = "kubevirt.io/migrationJobUID" // on the pod that a VM migrates to
)

// Names of this plugin, on a VirtualMachine. Users may set or remove the first
// by hand. The second names the VM that the first belongs to, so that a copy of
// the VM does not inherit it.
const (
	nodeAnnotation  = "vm.cocoonstack.io/sticky-node"
	claimAnnotation = "vm.cocoonstack.io/sticky-claim" // UID of the VM/UID of the node
)

// target is what is known about a pod's VM. It is immutable.
type target struct {
	vm        string // in the form that keys returns
	node      string // that holds its state, "": none
	nodeUID   types.UID
	machineID string
	release   string // how to release the claim
	// machine is the VirtualMachine to record on; nil: another component records.
	machine  *unstructured.Unstructured
	recorded bool
}

// Clone implements fwk.StateData.
func (t *target) Clone() fwk.StateData { return t }

func read(state fwk.CycleState) *target {
	data, err := state.Read(stateKey)
	if err != nil {
		return nil // PreFilter recorded no target
	}
	t, _ := data.(*target)
	return t
}

// is reports whether node is the target: the object of that UID, or another
// object for the same machine. A node that a user named by hand is compared by
// its name alone.
func (t *target) is(node *v1.Node) bool {
	return t.nodeUID == "" || t.nodeUID == node.UID || t.machineID != "" && t.machineID == node.Status.NodeInfo.MachineID
}

const podsByVM = Name

var indexers = cache.Indexers{podsByVM: func(o any) ([]string, error) {
	if pod, ok := o.(*v1.Pod); ok {
		return keys(pod), nil
	}
	return nil, nil
}}

// keys are the VMs of a pod, in this package's form: none or one.
func keys(pod *v1.Pod) []string {
	if owner := instanceOf(pod); owner != nil {
		return []string{kubevirtKey(pod.Namespace, owner.Name)}
	}
	if pod.Annotations[askAnnotation] == "" {
		return nil
	}
	name := pod.Annotations[nameAnnotation]
	if name == "" {
		name = vmName(pod.Namespace, pod.Name)
	}
	return []string{cocoonKey(pod.Namespace, name)}
}

func cocoonKey(namespace, name string) string   { return "VM " + namespace + "/" + name }
func kubevirtKey(namespace, name string) string { return "VirtualMachine " + namespace + "/" + name }

// instanceOf is the VirtualMachineInstance that controls pod, nil if none does.
func instanceOf(pod *v1.Pod) *metav1.OwnerReference {
	return controller(pod, "VirtualMachineInstance")
}

// controller is o's controller if it is of that KubeVirt kind.
func controller(o metav1.Object, kind string) *metav1.OwnerReference {
	owner := metav1.GetControllerOfNoCopy(o)
	if owner == nil || owner.Kind != kind {
		return nil
	}
	if gv, err := schema.ParseGroupVersion(owner.APIVersion); err != nil || gv.Group != kubevirtGroup {
		return nil
	}
	return owner
}

// resolve finds out what is known about the pod's VM. It returns nil if the pod
// has no sticky VM. It reads caches only.
func (pl *Plugin) resolve(pod *v1.Pod) (*target, *fwk.Status) {
	var t *target
	var status *fwk.Status
	switch names := keys(pod); {
	case len(names) == 0:
		return nil, nil
	case instanceOf(pod) == nil:
		t, status = pl.claimed(pod, names[0])
	case pod.Labels[migrationLabel] != "": // it must leave the node
		return nil, nil
	default:
		t, status = pl.annotated(pod, names[0])
	}
	if t == nil || t.node != "" || !status.IsSuccess() {
		return t, status
	}
	t.node, t.release = pl.beside(t.vm, pod), "delete its other pod"
	return t, nil
}

// claimed reads the VMPlacement of a Cocoon VM.
func (pl *Plugin) claimed(pod *v1.Pod, vm string) (*target, *fwk.Status) {
	name := vm[strings.LastIndexByte(vm, '/')+1:]
	claim, status := pl.objects.claims.get(pod.Namespace, name)
	if old := oldVMName(pod.Namespace, pod.Name); claim == nil && status.IsSuccess() && name == vmName(pod.Namespace, pod.Name) && name != old {
		claim, status = pl.objects.claims.get(pod.Namespace, old) // made by an earlier release
	}
	if claim == nil || !status.IsSuccess() {
		return &target{vm: vm}, status
	}
	name = claim.GetName()
	text := func(field string) string {
		s, _, _ := unstructured.NestedString(claim.Object, "status", field)
		return s
	}
	return &target{
		vm: vm, node: text("nodeName"), nodeUID: types.UID(text("nodeUID")), machineID: text("machineID"),
		release: "delete the VMPlacement " + name,
	}, nil
}

// annotated reads the annotation of a KubeVirt VirtualMachine.
func (pl *Plugin) annotated(pod *v1.Pod, vm string) (*target, *fwk.Status) {
	owner := instanceOf(pod)
	instance, status := pl.objects.instances.get(pod.Namespace, owner.Name)
	if !status.IsSuccess() {
		return nil, status
	}
	if instance == nil || instance.GetUID() != owner.UID {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, fmt.Sprintf("the VirtualMachineInstance %s of the pod is not loaded yet", owner.Name))
	}
	if owner = controller(instance, "VirtualMachine"); owner == nil {
		return nil, nil // an instance without a VirtualMachine has no state that outlives it
	}
	machine, status := pl.objects.machines.get(pod.Namespace, owner.Name)
	if !status.IsSuccess() {
		return nil, status
	}
	if machine == nil || machine.GetUID() != owner.UID {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, fmt.Sprintf("the VirtualMachine %s of the pod is not loaded yet", owner.Name))
	}
	t := &target{vm: vm, machine: machine, release: "remove the annotation " + nodeAnnotation + " of the VirtualMachine " + owner.Name}
	annotations := machine.GetAnnotations()
	node, claim := annotations[nodeAnnotation], annotations[claimAnnotation]
	holder, nodeUID, _ := strings.Cut(claim, "/")
	if claim != "" && holder != string(machine.GetUID()) {
		return t, nil // the VM is a copy
	}
	t.node, t.nodeUID, t.recorded = node, types.UID(nodeUID), node != ""
	return t, nil
}

// beside is the node of another pod of the VM, or the node that such a pod is
// being bound to. It is "" if there is none.
func (pl *Plugin) beside(vm string, pod *v1.Pod) string {
	pl.mu.Lock()
	other, ok := pl.going[vm]
	pl.mu.Unlock()
	if ok && other.pod != pod.UID {
		return other.node
	}
	found, err := pl.pods.ByIndex(podsByVM, vm)
	if err != nil {
		return ""
	}
	for _, o := range found {
		p, ok := o.(*v1.Pod)
		if ok && p.UID != pod.UID && p.Spec.NodeName != "" && p.Labels[migrationLabel] == "" && p.Status.Phase != v1.PodSucceeded && p.Status.Phase != v1.PodFailed {
			return p.Spec.NodeName
		}
	}
	return ""
}
