package cocoonset

import (
	"cmp"
	"encoding/json"
	"reflect"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
)

const (
	containerName = "agent"
	// placeholder is the image in the pod of a static VM, which no node creates.
	placeholder = "cocoon/static"
)

// member is one VM that the set wants.
type member struct {
	role    v1.Role
	slot    int32 // the agent's number; not used for toolboxes
	toolbox *v1.ToolboxSpec
	pod     *corev1.Pod // the pod to create, without placement
}

func (m member) name() string   { return m.pod.Name }
func (m member) vmName() string { return m.pod.Annotations[contract.KeyName] }

// managed reports whether a node creates the VM. Only such a VM can hibernate.
func (m member) managed() bool { return m.pod.Annotations[contract.KeyManaged] == "true" }

// members returns the VMs that set wants, the main one first.
func members(set *v1.CocoonSet) []member {
	agent := set.Spec.Agent
	var all []member
	main := podName(set, "0")
	for slot := range agent.Replicas + 1 {
		ask := ask(set, agent.VMOptions, contract.VMName(set.Namespace, podName(set, strconv.Itoa(int(slot)))))
		ask.Image, ask.Mode = agent.Image, contract.Mode(agent.Mode)
		role := v1.RoleMain
		if slot > 0 {
			role, ask.ForkFrom = v1.RoleSubAgent, contract.VMName(set.Namespace, main)
		}
		pod := newPod(set, role, strconv.Itoa(int(slot)), ask, agent.Resources)
		if role == v1.RoleMain { // sub-agents follow the main VM
			stay(set, pod)
		}
		pod.Spec.Containers[0].EnvFrom = agent.EnvFrom
		pod.Spec.ServiceAccountName = agent.ServiceAccountName
		all = append(all, member{role: role, slot: slot, pod: pod})
	}
	for i := range set.Spec.Toolboxes {
		t := &set.Spec.Toolboxes[i]
		ask := ask(set, t.VMOptions, contract.VMName(set.Namespace, podName(set, t.Name)))
		ask.Image, ask.Mode, ask.Managed = t.Image, t.Mode, t.Mode != contract.ModeStatic
		pod := newPod(set, v1.RoleToolbox, t.Name, ask, t.Resources)
		if t.Mode == contract.ModeStatic {
			contract.VMRuntime{ID: t.StaticVMID, IP: t.StaticIP, VNCPort: t.VNCPort}.Apply(pod.Annotations)
		} else {
			stay(set, pod)
		}
		all = append(all, member{role: v1.RoleToolbox, toolbox: t, pod: pod})
	}
	return all
}

// stay keeps the pod's VM on the node that holds its state, if the set asks for that.
func stay(set *v1.CocoonSet, pod *corev1.Pod) {
	if set.Spec.Sticky != "" {
		pod.Annotations[contract.KeySticky] = set.Spec.Sticky
	}
}

func podName(set *v1.CocoonSet, slot string) string { return set.Name + "-" + slot }

func ask(set *v1.CocoonSet, o v1.VMOptions, vmName string) contract.VMSpec {
	s := contract.VMSpec{
		Name: vmName, OS: o.OS, Network: o.Network, SnapshotPolicy: set.Spec.SnapshotPolicy, Managed: true, ForcePull: o.ForcePull,
		ConnType: o.ConnType, Backend: o.Backend, NoDirectIO: o.NoDirectIO, ProbePort: o.ProbePort,
	}
	if o.Storage != nil {
		s.Storage = *o.Storage
	}
	return s
}

// newPod returns the pod of one VM. If set.Name+"-"+slot is not a valid pod name, the API server refuses the pod.
func newPod(set *v1.CocoonSet, role v1.Role, slot string, ask contract.VMSpec, resources corev1.ResourceRequirements) *corev1.Pod {
	image := cmp.Or(ask.Image, placeholder)
	resources = withStorage(resources, ask.Storage)
	text, _ := json.Marshal(resources) // quantities and names always encode
	annotations := map[string]string{contract.KeyGeneration: strconv.FormatInt(set.Generation, 10), contract.KeyResources: string(text)}
	ask.Apply(annotations)
	selector := map[string]string{contract.LabelPool: set.Spec.NodePool}
	if class := set.Spec.SnapshotCompatibilityClass; class != "" {
		selector[contract.LabelSnapshotCPUClass] = class
	}
	grace := int64(1)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: podName(set, slot), Namespace: set.Namespace, Annotations: annotations,
			Labels: map[string]string{
				contract.LabelSetName: set.Name, contract.LabelSetRole: string(role), contract.LabelSetSlot: slot,
				"app.kubernetes.io/name": set.Name, contract.LabelPool: set.Spec.NodePool,
			},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(set, v1.GroupVersion.WithKind(contract.OwnerKind))},
		},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			NodeSelector:                  selector,
			Tolerations: []corev1.Toleration{
				{Key: contract.TaintKey, Operator: corev1.TolerationOpExists},
				// A node that is not ready or unreachable for a while still has the VM, so the pod must not be evicted.
				{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
				{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
			},
			Containers: []corev1.Container{{Name: containerName, Image: image, ImagePullPolicy: corev1.PullIfNotPresent, Resources: resources}},
		},
	}
}

// withStorage tells the scheduler the size of the root disk.
func withStorage(r corev1.ResourceRequirements, storage resource.Quantity) corev1.ResourceRequirements {
	r = *r.DeepCopy()
	if storage.IsZero() {
		return r
	}
	for _, list := range []*corev1.ResourceList{&r.Requests, &r.Limits} {
		if *list == nil {
			*list = corev1.ResourceList{}
		}
		(*list)[corev1.ResourceEphemeralStorage] = storage
	}
	return r
}

// drifted reports whether pod differs from want in a field that a running VM cannot adopt. Fields that the cluster added when
// the pod was created do not count, such as sizes of a LimitRange or the node selector of a namespace.
func drifted(want, pod *corev1.Pod) bool {
	is, err := contract.ParseVMSpec(pod.Annotations)
	should, _ := contract.ParseVMSpec(want.Annotations)
	if err != nil || is.Storage.Cmp(should.Storage) != 0 {
		return true
	}
	is.Storage, should.Storage = resource.Quantity{}, resource.Quantity{}
	is.Name, is.ForkFrom = contract.CanonicalVMName(pod.Namespace, is.Name), contract.CanonicalVMName(pod.Namespace, is.ForkFrom)
	should.ForkFrom = contract.CanonicalVMName(pod.Namespace, should.ForkFrom)
	if !reflect.DeepEqual(is, should) || len(pod.Spec.Containers) == 0 {
		return true
	}
	if should.Mode == contract.ModeStatic { // for other VMs the node reports these
		for _, key := range []string{contract.KeyID, contract.KeyIP, contract.KeyVNCPort} {
			if want.Annotations[key] != pod.Annotations[key] {
				return true
			}
		}
	}
	for _, key := range []string{contract.LabelPool, contract.LabelSnapshotCPUClass} {
		if want.Spec.NodeSelector[key] != pod.Spec.NodeSelector[key] {
			return true
		}
	}
	return !apiequality.Semantic.DeepEqual(asked(want), asked(pod)) || account(want) != account(pod) ||
		!apiequality.Semantic.DeepEqual(want.Spec.Containers[0].EnvFrom, pod.Spec.Containers[0].EnvFrom)
}

// asked returns the resources with which the pod was created. For a pod of an earlier manager, which does not record them, it
// returns the resources of its container.
func asked(pod *corev1.Pod) corev1.ResourceRequirements {
	var r corev1.ResourceRequirements
	if text := pod.Annotations[contract.KeyResources]; text == "" || json.Unmarshal([]byte(text), &r) != nil {
		r = pod.Spec.Containers[0].Resources
	}
	return defaulted(r)
}

// defaulted returns r as the API server completes it: missing requests are set to the limits.
func defaulted(r corev1.ResourceRequirements) corev1.ResourceRequirements {
	r = *r.DeepCopy()
	for name, limit := range r.Limits {
		if _, given := r.Requests[name]; !given {
			if r.Requests == nil {
				r.Requests = corev1.ResourceList{}
			}
			r.Requests[name] = limit
		}
	}
	return r
}

func account(pod *corev1.Pod) string {
	if pod.Spec.ServiceAccountName == "" {
		return "default"
	}
	return pod.Spec.ServiceAccountName
}

// pinned requires the node of that name for pod.
func pinned(pod *corev1.Pod, node string) {
	term := corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}}
	affinity(pod).RequiredDuringSchedulingIgnoredDuringExecution = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}}
}

// preferring prefers the node of that name for pod.
func preferring(pod *corev1.Pod, node string) {
	affinity(pod).PreferredDuringSchedulingIgnoredDuringExecution = []corev1.PreferredSchedulingTerm{{Weight: 100, Preference: corev1.NodeSelectorTerm{
		MatchFields: []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
	}}}
}

func affinity(pod *corev1.Pod) *corev1.NodeAffinity {
	if pod.Spec.Affinity == nil {
		pod.Spec.Affinity = &corev1.Affinity{}
	}
	if pod.Spec.Affinity.NodeAffinity == nil {
		pod.Spec.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	return pod.Spec.Affinity.NodeAffinity
}
