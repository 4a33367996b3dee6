package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrladmission "sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/placement"
)

// podCompleter adds the fields that a pod with a VM needs to be scheduled to a virtual node.
type podCompleter struct {
	decoder ctrladmission.Decoder
	claims  client.Reader
}

// Handle implements admission.Handler.
func (c *podCompleter) Handle(ctx context.Context, req ctrladmission.Request) ctrladmission.Response {
	pod := &corev1.Pod{}
	if err := c.decoder.Decode(req, pod); err != nil {
		return unreadable(err)
	}
	pod.Namespace = req.Namespace
	if req.Operation != admissionv1.Create || !tolerates(pod.Spec.Tolerations) && !asks(pod) {
		return ctrladmission.Allowed("")
	}
	// before and after hold only the fields that this version knows. Fields of a newer API server are in neither, so the patch
	// keeps them.
	before, err := json.Marshal(pod)
	if err != nil {
		return failed(err)
	}
	changed := complete(pod)
	if owner := metav1.GetControllerOf(pod); owner != nil && owner.Kind == contract.OwnerKind {
		return patched(before, pod, changed) // the controller that created it has stamped it
	}
	claim, err := c.claim(ctx, pod)
	if err != nil {
		return failed(err)
	}
	stamped := placement.Stamp(pod, claim)
	return patched(before, pod, changed || stamped)
}

// patched answers with the difference between before and pod.
func patched(before []byte, pod *corev1.Pod, changed bool) ctrladmission.Response {
	if !changed {
		return ctrladmission.Allowed("")
	}
	after, err := json.Marshal(pod)
	if err != nil {
		return failed(err)
	}
	return ctrladmission.PatchResponseFromRaw(before, after)
}

// claim returns the claim of the pod's VM, or nil if it has none.
func (c *podCompleter) claim(ctx context.Context, pod *corev1.Pod) (*v1.VMPlacement, error) {
	name := placement.NameOf(pod)
	if ask, _ := contract.ParseSticky(pod.Annotations); !ask.Asked || name == "" { // podChecker reports errors of the annotation
		return nil, nil
	}
	claim, err := placement.Lookup(pod.Namespace, name, func(name string) (*v1.VMPlacement, error) {
		claim := &v1.VMPlacement{}
		return claim, c.claims.Get(ctx, client.ObjectKey{Namespace: pod.Namespace, Name: name}, claim)
	})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("get VMPlacement %s: %w", name, err)
	}
	return claim, nil
}

// tolerates reports whether one of the tolerations names the taint of virtual nodes. A toleration of every taint does not
// count.
func tolerates(list []corev1.Toleration) bool {
	return slices.ContainsFunc(list, func(t corev1.Toleration) bool {
		return t.Key == contract.TaintKey && (t.Operator == corev1.TolerationOpExists || t.Value == contract.TaintValue)
	})
}

// asks reports whether the pod asks for a VM: it names a pool or has VM annotations.
func asks(pod *corev1.Pod) bool {
	if pod.Spec.NodeSelector[contract.LabelPool] != "" || pod.Labels[contract.LabelPool] != "" || pod.Annotations[contract.LabelPool] != "" {
		return true
	}
	return saysVM(pod.Annotations)
}

func saysVM(annotations map[string]string) bool {
	for key := range annotations {
		if strings.HasPrefix(key, contract.PrefixVM) || strings.HasPrefix(key, contract.PrefixSet) {
			return true
		}
	}
	return false
}

// defaultPool is the pool of pods that name no pool.
const defaultPool = "default"

// complete adds the VM's name, the toleration, the pool, the preference for nodes with its hypervisor, and volumes for the objects that the pod's annotations name. It
// reports whether it changed the pod. It keeps fields that are already set, and a second call changes nothing.
func complete(pod *corev1.Pod) bool {
	changed := false
	if pod.Name != "" && pod.Annotations[contract.KeyName] == "" { // an empty name: the API server has not generated it yet
		pod.Annotations = with(pod.Annotations, contract.KeyName, contract.VMName(pod.Namespace, pod.Name))
		changed = true
	}
	if !tolerates(pod.Spec.Tolerations) {
		pod.Spec.Tolerations = append(pod.Spec.Tolerations, corev1.Toleration{
			Key: contract.TaintKey, Operator: corev1.TolerationOpEqual, Value: contract.TaintValue, Effect: corev1.TaintEffectNoSchedule,
		})
		changed = true
	}
	if pool := poolOf(pod); pool != "" && pod.Spec.NodeSelector[contract.LabelPool] == "" {
		pod.Spec.NodeSelector = with(pod.Spec.NodeSelector, contract.LabelPool, pool)
		changed = true
	}
	if (contract.AsksSnapshot(pod.Annotations) || contract.HibernatesOnDelete(pod.Annotations)) && stay(pod.Spec.Tolerations) {
		changed = true
	}
	changed = placement.Prefer(pod) || changed
	return convert.Name(pod) || changed
}

func with(m map[string]string, key, value string) map[string]string {
	if m = maps.Clone(m); m == nil {
		m = map[string]string{}
	}
	m[key] = value
	return m
}

// poolOf returns the pool in which the pod runs: the pool that it names, else the default pool. It returns "" if the pod
// selects its nodes in another way.
func poolOf(pod *corev1.Pod) string {
	for _, said := range []map[string]string{pod.Spec.NodeSelector, pod.Labels, pod.Annotations} {
		if pool := said[contract.LabelPool]; pool != "" {
			return pool
		}
	}
	a := pod.Spec.Affinity
	if pod.Spec.NodeName != "" || len(pod.Spec.NodeSelector) > 0 || a != nil && a.NodeAffinity != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		return ""
	}
	return defaultPool
}

// defaultStay is the API server's default tolerationSeconds for a node that is not ready or unreachable.
const defaultStay = 300

// stay keeps the pod of a VM with state on a node that is not ready or unreachable, because the VM still exists there. It
// changes only the default of the API server, not a value that the user chose.
func stay(list []corev1.Toleration) (changed bool) {
	for i := range list {
		t := &list[i]
		away := t.Key == corev1.TaintNodeNotReady || t.Key == corev1.TaintNodeUnreachable
		if away && t.Effect == corev1.TaintEffectNoExecute && t.TolerationSeconds != nil && *t.TolerationSeconds == defaultStay {
			t.TolerationSeconds, changed = nil, true
		}
	}
	return changed
}

// podChecker refuses pods with invalid VM settings, and warns about pods that nodes of this version refuse.
type podChecker struct {
	decoder   ctrladmission.Decoder
	cloneDirs []string
}

// Handle implements admission.Handler.
func (c *podChecker) Handle(_ context.Context, req ctrladmission.Request) ctrladmission.Response {
	pod := &corev1.Pod{}
	if err := c.decoder.Decode(req, pod); err != nil {
		return unreadable(err)
	}
	pod.Namespace = req.Namespace
	if req.Operation != admissionv1.Create || !tolerates(pod.Spec.Tolerations) || pod.Spec.NodeSelector[contract.LabelPool] == "" {
		return ctrladmission.Allowed("") // the pod may belong to other nodes
	}
	if errs := checkPod(pod, c.cloneDirs); len(errs) > 0 {
		return refuse(corev1.SchemeGroupVersion.WithKind("Pod").GroupKind(), pod.Name, errs)
	}
	resp := ctrladmission.Allowed("")
	for _, e := range convert.Check(pod) { // only a warning: a node of another version may accept it
		resp = resp.WithWarnings("Cocoon nodes of this version refuse the pod: " + e.Error())
	}
	return resp
}

// checkPod refuses unknown or invalid annotations of the contract, names of VMs and snapshots of other namespaces, and node
// directories that are not listed in cloneDirs.
func checkPod(pod *corev1.Pod, cloneDirs []string) field.ErrorList {
	errs := append(convert.CheckKeys(pod), convert.CheckNames(pod)...)
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	below := func(dir string) bool {
		return ask.CloneFromDir == dir || strings.HasPrefix(ask.CloneFromDir, strings.TrimSuffix(dir, "/")+"/")
	}
	if ask.CloneFromDir != "" && !slices.ContainsFunc(cloneDirs, below) {
		errs = append(errs, field.Forbidden(field.NewPath("metadata", "annotations").Key(contract.KeyCloneFromDir),
			"pods may not be cloned from this folder; the operator lists the allowed folders in --clone-dirs of cocoon-manager and in cloneDirs of cocoond"))
	}
	return errs
}
