package podvolumes

import (
	"log/slog"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// named is a volume of the claim "data", which the pod "web" has made if it is ephemeral.
func named(ephemeral bool) *corev1.Volume {
	if ephemeral {
		return &corev1.Volume{Name: "data", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}}
	}
	return &corev1.Volume{Name: "data", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}
}

func TestClaim(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "pod"}, Spec: corev1.PodSpec{NodeName: "n1"}}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{corev1.LabelHostname: "n1"}}}
	onNode := func(name string) *corev1.VolumeNodeAffinity {
		return &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{name}}},
		}}}}
	}
	for name, c := range map[string]struct {
		claim     func(*corev1.PersistentVolumeClaim)
		volume    func(*corev1.PersistentVolume)
		ephemeral bool
		want      convert.Disk
		refused   string
	}{
		"bound": {want: convert.Disk{ID: "01disk", FSType: "ext4"}},
		"xfs":   {volume: func(v *corev1.PersistentVolume) { v.Spec.CSI.FSType = "xfs" }, want: convert.Disk{ID: "01disk", FSType: "xfs"}},
		"block": {volume: func(v *corev1.PersistentVolume) { v.Spec.VolumeMode = new(corev1.PersistentVolumeBlock) }, want: convert.Disk{ID: "01disk", FSType: "ext4", Device: true}},
		"only for readers": {
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}
			},
			want: convert.Disk{ID: "01disk", FSType: "ext4", ReadOnly: true},
		},
		"ephemeral": {
			claim: func(c *corev1.PersistentVolumeClaim) {
				c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "web", UID: "pod", Controller: new(true)}}
			},
			ephemeral: true, want: convert.Disk{ID: "01disk", FSType: "ext4"},
		},
		"ephemeral, of an earlier pod": {
			claim: func(c *corev1.PersistentVolumeClaim) {
				c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "web", UID: "older", Controller: new(true)}}
			},
			ephemeral: true, refused: "was not made for the pod",
		},
		"ephemeral, of nobody": {ephemeral: true, refused: "was not made for the pod"},
		"pending":              {claim: func(c *corev1.PersistentVolumeClaim) { c.Status.Phase = corev1.ClaimPending }, refused: "is not bound"},
		"being deleted":        {claim: func(c *corev1.PersistentVolumeClaim) { c.DeletionTimestamp = new(metav1.Now()) }, refused: "is being deleted"},
		"of another claim": {
			volume:  func(v *corev1.PersistentVolume) { v.Spec.ClaimRef.UID = "other" },
			refused: `persistentvolume "pv", which persistentvolumeclaim "data" names, belongs to another claim`,
		},
		"of nobody's": {volume: func(v *corev1.PersistentVolume) { v.Spec.ClaimRef = nil }, refused: "belongs to another claim"},
		"of another driver": {
			volume:  func(v *corev1.PersistentVolume) { v.Spec.CSI.Driver = "example.com/disks" },
			refused: "this node has no CSI drivers",
		},
		"local": {
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI, v.Spec.Local = nil, &corev1.LocalVolumeSource{Path: "/mnt/disks/one/"}
				v.Spec.NodeAffinity = onNode("n1")
			},
			want: convert.Disk{Dir: &vm.HostDir{Path: "/mnt/disks/one"}, Group: true},
		},
		"local, for readers": {
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI, v.Spec.Local = nil, &corev1.LocalVolumeSource{Path: "/mnt/disks/one"}
				v.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}
			},
			want: convert.Disk{Dir: &vm.HostDir{Path: "/mnt/disks/one"}, Group: true, ReadOnly: true},
		},
		"local, of another node": {
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI, v.Spec.Local = nil, &corev1.LocalVolumeSource{Path: "/mnt/disks/one"}
				v.Spec.NodeAffinity = onNode("n2")
			},
			refused: "is on another node",
		},
		"local, a block device": {
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI, v.Spec.Local, v.Spec.VolumeMode = nil, &corev1.LocalVolumeSource{Path: "/dev/sdb"}, new(corev1.PersistentVolumeBlock)
			},
			refused: "is a block device of the node",
		},
		"hostPath": {
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI, v.Spec.HostPath = nil, &corev1.HostPathVolumeSource{Path: "/srv/data"}
			},
			want: convert.Disk{Dir: &vm.HostDir{Path: "/srv/data", Create: true}},
		},
		"hostPath, a socket": {
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI, v.Spec.HostPath = nil, &corev1.HostPathVolumeSource{Path: "/run/x", Type: new(corev1.HostPathSocket)}
			},
			refused: "hostPath of type Socket",
		},
		"nfs": {
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI, v.Spec.NFS = nil, &corev1.NFSVolumeSource{Server: "nfs.example", Path: "/data", ReadOnly: true}
				v.Spec.MountOptions = []string{"nfsvers=4.1", "hard,noatime"}
			},
			want: convert.Disk{NFS: &vm.NFS{Server: "nfs.example", Path: "/data", ReadOnly: true, Options: []string{"nfsvers=4.1", "hard,noatime"}}},
		},
		"nfs, only read": {
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI, v.Spec.NFS = nil, &corev1.NFSVolumeSource{Server: "nfs.example", Path: "/data"}
				v.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}
			},
			want: convert.Disk{NFS: &vm.NFS{Server: "nfs.example", Path: "/data"}, ReadOnly: true},
		},
		"nfs, with an option that is not served": {
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI, v.Spec.NFS = nil, &corev1.NFSVolumeSource{Server: "nfs.example", Path: "/data"}
				v.Spec.MountOptions = []string{"nfsvers=3"}
			},
			refused: `mount option "nfsvers=3" is not supported`,
		},
		"nfs, on another node": {
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI, v.Spec.NFS = nil, &corev1.NFSVolumeSource{Server: "nfs.example", Path: "/data"}
				v.Spec.NodeAffinity = onNode("n2")
			},
			refused: "is on another node",
		},
		"nfs, a block device": {
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI, v.Spec.NFS, v.Spec.VolumeMode = nil, &corev1.NFSVolumeSource{Server: "nfs.example", Path: "/data"}, new(corev1.PersistentVolumeBlock)
			},
			refused: "cannot be a block device",
		},
		"of another kind": {
			volume: func(v *corev1.PersistentVolume) {
				v.Spec.CSI, v.Spec.ISCSI = nil, &corev1.ISCSIPersistentVolumeSource{}
			},
			refused: "is not of a CSI driver",
		},
	} {
		t.Run(name, func(t *testing.T) {
			claim := &corev1.PersistentVolumeClaim{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: convert.ClaimName(pod, named(c.ephemeral)), UID: "claim"},
				Spec:       corev1.PersistentVolumeClaimSpec{VolumeName: "pv"}, Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
			}
			volume := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pv"}, Spec: corev1.PersistentVolumeSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadOnlyMany}, ClaimRef: &corev1.ObjectReference{UID: "claim"},
				PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: contract.VolumeDriver, VolumeHandle: "01disk", FSType: "ext4"}},
			}}
			if c.claim != nil {
				c.claim(claim)
			}
			if c.volume != nil {
				c.volume(volume)
			}
			o := NewObjects(fake.NewClientset(claim, volume, node), slog.New(slog.DiscardHandler))
			got, err := New(o, convert.Node{}, Owner{}).from.Disk(t.Context(), pod, named(c.ephemeral))
			if c.refused != "" {
				if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), c.refused) {
					t.Errorf("%v, want %q in it", err, c.refused)
				}
				return
			}
			if d := diff.Of(c.want, got); err != nil || d != "" {
				t.Errorf("%v (-want +got):\n%s", err, d)
			}
		})
	}
	o := NewObjects(fake.NewClientset(), slog.New(slog.DiscardHandler))
	if _, err := New(o, convert.Node{}, Owner{}).from.Disk(t.Context(), pod, named(false)); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "not found") {
		t.Errorf("a missing claim: %v", err)
	}
}
