package virtualmachine

import (
	"context"
	"errors"
	"testing"
	"time"

	volumesnapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/snapshotclass"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// A machine says of each volume whether a snapshot has it, and why not.
func TestSnapshotStatuses(t *testing.T) {
	s := runtime.NewScheme()
	if err := errors.Join(kubevirt.AddToScheme(s), corev1.AddToScheme(s), storagev1.AddToScheme(s), volumesnapshotv1.AddToScheme(s)); err != nil {
		t.Fatal(err)
	}
	claim := func(name, class string) *corev1.PersistentVolumeClaim {
		return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &class}}
	}
	class := func(name, driver string) *storagev1.StorageClass {
		return &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: driver}
	}
	kept := &volumesnapshotv1.VolumeSnapshotClass{ObjectMeta: metav1.ObjectMeta{Name: "keeps"}, Driver: "ours"}
	c := fake.NewClientBuilder().WithScheme(s).WithObjects(claim("data", "local"), claim("dv", "local"), claim("far", "other"), class("local", "ours"), class("other", "theirs"), kept).Build()
	clock, reads := now, 0
	counted := interceptor.NewClient(c, interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, o ...client.ListOption) error {
		reads++
		return c.List(ctx, list, o...)
	}})
	r := &Reconciler{Client: c, Classes: &snapshotclass.Memo{From: counted, Now: func() time.Time { return clock }}}
	vm := machine(v1.RunStrategyAlways, func(vm *v1.VirtualMachine) {
		of := func(claim string) v1.VolumeSource {
			return v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{PersistentVolumeClaimVolumeSource: corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}
		}
		vm.Spec.Template.Spec.Volumes = []v1.Volume{
			{Name: "root", VolumeSource: v1.VolumeSource{ContainerDisk: &v1.ContainerDiskSource{Image: "a"}}},
			{Name: "disk", VolumeSource: of("data")},
			{Name: "made", VolumeSource: v1.VolumeSource{DataVolume: &v1.DataVolumeSource{Name: "dv"}}},
			{Name: "away", VolumeSource: of("far")},
			{Name: "none", VolumeSource: of("nothing")},
			{Name: "common", VolumeSource: of("data")},
		}
		vm.Spec.Template.Spec.Domain.Devices.Disks = []v1.Disk{{Name: "common", Shareable: new(true)}}
	})
	want := []v1.VolumeSnapshotStatus{
		{Name: "root", Reason: "Snapshot is not supported for this volumeSource type [root]"},
		{Name: "disk", Enabled: true},
		{Name: "made", Enabled: true},
		{Name: "away", Reason: "No VolumeSnapshotClass: Volume snapshots are not configured for this StorageClass [other] [away]"},
		{Name: "none", Reason: "PVC not found [nothing]"},
		{Name: "common", Reason: "Snapshot is not supported for a disk that is shareable [common]"},
	}
	for range 2 {
		got, err := r.snapshotStatuses(t.Context(), vm, vm.Spec.Template)
		if err != nil {
			t.Fatal(err)
		}
		if d := diff.Of(want, got); d != "" {
			t.Error(d)
		}
		vm.Status.VolumeSnapshotStatuses = got
	}
	if reads != 2 { // one for each storage class
		t.Errorf("the classes of snapshots were listed %d times", reads)
	}
	if err := c.Create(t.Context(), &volumesnapshotv1.VolumeSnapshotClass{ObjectMeta: metav1.ObjectMeta{Name: "theirs"}, Driver: "theirs"}); err != nil {
		t.Fatal(err)
	}
	clock = clock.Add(time.Minute)
	if got, err := r.snapshotStatuses(t.Context(), vm, vm.Spec.Template); err != nil || !got[3].Enabled || got[3].Reason != "" {
		t.Errorf("a minute after there is a class: %+v, %v", got, err)
	}
	if got, err := r.snapshotStatuses(t.Context(), vm, nil); err != nil || diff.Of(want, got) != "" {
		t.Errorf("without a template: %+v, %v", got, err)
	}
}
