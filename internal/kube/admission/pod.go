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

// podCompleter gives a pod that asks for a VM what it needs to come to a virtual node.
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
	// Both sides as this version knows pods: what a newer API server has beside that is in neither, and stays.
	before, err := json.Marshal(pod)
	if err != nil {
		return failed(err)
	}
	changed := complete(pod)
	if owner := metav1.GetControllerOf(pod); owner != nil && owner.Kind == contract.OwnerKind {
		return patched(before, pod, changed) // who made it has stamped it
	}
	claim, err := c.claim(ctx, pod)
	if err != nil {
		return failed(err)
	}
	stamped := placement.Stamp(pod, claim)
	return patched(before, pod, changed || stamped)
}

// patched answers with what changed since before.
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

// claim is that of the pod's VM, nil when there is none.
func (c *podCompleter) claim(ctx context.Context, pod *corev1.Pod) (*v1.VMPlacement, error) {
	name := placement.NameOf(pod)
	if ask, _ := contract.ParseSticky(pod.Annotations); !ask.Asked || name == "" { // what is wrong with it is said when the pod is checked
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

// tolerates reports whether one of the tolerations is for the taint of our nodes by name. Who tolerates everything does
// not mean us.
func tolerates(list []corev1.Toleration) bool {
	for _, t := range list {
		if t.Key == contract.TaintKey && (t.Operator == corev1.TolerationOpExists || t.Value == contract.TaintValue) {
			return true
		}
	}
	return false
}

// asks reports whether the pod asks for a VM by what is said on it: a pool of ours, or how its VM shall be.
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

// defaultPool is where VMs run that name no pool.
const defaultPool = "default"

// complete gives the pod its VM's name, the toleration, the pool, and volumes of what its annotations name, where it lacks them,
// and reports whether it did. What the pod says itself stays; a second call changes nothing.
func complete(pod *corev1.Pod) bool {
	changed := false
	if pod.Name != "" && pod.Annotations[contract.KeyName] == "" { // the API server has not made up a name for others yet
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
	if contract.AsksSnapshot(pod.Annotations) && stay(pod.Spec.Tolerations) {
		changed = true
	}
	return convert.Name(pod) || changed
}

func with(m map[string]string, key, value string) map[string]string {
	if m = maps.Clone(m); m == nil {
		m = map[string]string{}
	}
	m[key] = value
	return m
}

// poolOf is the pool that the pod is to run in: what it says, or the default one unless it chooses its nodes in another way.
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

// defaultStay is how long the API server lets a pod that does not say stay on a node that is away, in seconds.
const defaultStay = 300

// stay has a VM whose state matters stay on a node that is away for a while: the VM is still there, and its pod must be too.
// It changes what the API server put there, and nothing that the user chose.
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

// podChecker refuses pods that say of their VM what nobody could understand, and warns of what our nodes refuse.
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
		return ctrladmission.Allowed("") // not surely ours
	}
	if errs := checkPod(pod, c.cloneDirs); len(errs) > 0 {
		return refuse(corev1.SchemeGroupVersion.WithKind("Pod").GroupKind(), pod.Name, errs)
	}
	resp := ctrladmission.Allowed("")
	for _, e := range convert.Check(pod) { // a node of another version may be able to
		resp = resp.WithWarnings("cocoon nodes of this version refuse the pod: " + e.Error())
	}
	return resp
}

// checkPod refuses annotations that are none of the contract's, names that the pod may not give or use, and folders of the node
// that are not listed for it.
func checkPod(pod *corev1.Pod, cloneDirs []string) field.ErrorList {
	errs := append(convert.CheckKeys(pod), convert.CheckNames(pod)...)
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	below := func(dir string) bool {
		return ask.CloneFromDir == dir || strings.HasPrefix(ask.CloneFromDir, strings.TrimSuffix(dir, "/")+"/")
	}
	if ask.CloneFromDir != "" && !slices.ContainsFunc(cloneDirs, below) {
		errs = append(errs, field.Forbidden(field.NewPath("metadata", "annotations").Key(contract.KeyCloneFromDir),
			"folders of a node are not for everybody: the operator lists those that pods may be cloned from (--clone-dirs of cocoon-manager, cloneDirs of cocoond)"))
	}
	return errs
}
