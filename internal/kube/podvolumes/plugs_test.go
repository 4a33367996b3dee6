package podvolumes

import (
	"log/slog"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// A claim is looked for in the namespace of the pod only, by a list, and only a volume of a node of ours, on the pod's node, can be plugged.
func TestPlug(t *testing.T) {
	machine := []metav1.OwnerReference{{APIVersion: "kubevirt.io/v1", Kind: "VirtualMachineInstance", Name: "web", UID: "vmi", Controller: new(true)}}
	for name, c := range map[string]struct {
		pod     func(*corev1.Pod)
		claim   func(*corev1.PersistentVolumeClaim)
		volume  func(*corev1.PersistentVolume)
		want    vm.VolumeUse
		refused string
	}{
		"a machine": {want: vm.VolumeUse{Ref: "01disk"}},
		"a pod":     {pod: func(p *corev1.Pod) { p.OwnerReferences = nil }, refused: "use volumeMode Block"},
		"for readers": {volume: func(v *corev1.PersistentVolume) {
			v.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}
		}, want: vm.VolumeUse{Ref: "01disk", ReadOnly: true}},
		"a pod, block": {
			pod:    func(p *corev1.Pod) { p.OwnerReferences = nil },
			volume: func(v *corev1.PersistentVolume) { v.Spec.VolumeMode = new(corev1.PersistentVolumeBlock) },
			want:   vm.VolumeUse{Ref: "01disk"},
		},
		"of another namespace": {claim: func(c *corev1.PersistentVolumeClaim) { c.Namespace = "other" }, refused: `persistentvolumeclaim "data" not found`},
		"in the pod already": {pod: func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{*named(false)}
		}, refused: `the pod has persistentvolumeclaim "data" since it was created`},
		"pending":           {claim: func(c *corev1.PersistentVolumeClaim) { c.Status.Phase = corev1.ClaimPending }, refused: "is not bound"},
		"being deleted":     {claim: func(c *corev1.PersistentVolumeClaim) { c.DeletionTimestamp = new(metav1.Now()) }, refused: "is being deleted"},
		"of another claim":  {volume: func(v *corev1.PersistentVolume) { v.Spec.ClaimRef.UID = "other" }, refused: "belongs to another claim"},
		"of another driver": {volume: func(v *corev1.PersistentVolume) { v.Spec.CSI.Driver = "example.com/disks" }, refused: "is not of driver volume.cocoonstack.io"},
		"a folder": {volume: func(v *corev1.PersistentVolume) {
			v.Spec.CSI, v.Spec.Local = nil, &corev1.LocalVolumeSource{Path: "/srv"}
		}, refused: "is not of driver volume.cocoonstack.io"},
		"of another node":     {volume: func(v *corev1.PersistentVolume) { v.Spec.NodeAffinity = affinity("n2") }, refused: "is on another node"},
		"without an affinity": {volume: func(v *corev1.PersistentVolume) { v.Spec.NodeAffinity = nil }, want: vm.VolumeUse{Ref: "01disk"}},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "pod", OwnerReferences: machine}, Spec: corev1.PodSpec{NodeName: "n1"}}
		claim := &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "data", UID: "claim"},
			Spec:       corev1.PersistentVolumeClaimSpec{VolumeName: "pv"}, Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
		}
		pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
			ClaimRef: &corev1.ObjectReference{UID: "claim"}, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, NodeAffinity: affinity("n1"),
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: contract.VolumeDriver, VolumeHandle: "01disk", FSType: "ext4"}},
		}}
		if c.pod != nil {
			c.pod(pod)
		}
		if c.claim != nil {
			c.claim(claim)
		}
		if c.volume != nil {
			c.volume(pv)
		}
		client := fake.NewClientset(claim, pv, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{corev1.LabelHostname: "n1"}}})
		client.PrependReactor("get", "persistentvolumeclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
			t.Errorf("%s: the node gets the claim, which the API server does not let it", name)
			return false, nil, nil
		})
		got, err := New(NewObjects(client, slog.New(slog.DiscardHandler)), convert.Node{Name: "n1"}, Owner{}).Plug(t.Context(), pod, "data")
		switch {
		case c.refused == "" && (err != nil || got != c.want):
			t.Errorf("%s: %+v, %v", name, got, err)
		case c.refused != "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), c.refused)):
			t.Errorf("%s: %v, want %q", name, err, c.refused)
		}
	}
}

func affinity(node string) *corev1.VolumeNodeAffinity {
	return &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
	}}}}
}
