package kubevirt

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// An instance boots from a copy of a claim. The scheduler takes a node that has the claim, and the copy is as large as that is.
func TestCopies(t *testing.T) {
	i := vmi(t, "web")
	name := strings.Repeat("r", 60)
	i.Spec.Volumes = []v1.Volume{{Name: name, VolumeSource: v1.VolumeSource{Ephemeral: &v1.EphemeralVolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "golden"}}}}}
	i.Spec.Domain.Devices.Disks = []v1.Disk{{Name: name, DiskDevice: v1.DiskDevice{Disk: &v1.DiskTarget{Bus: v1.DiskBusVirtio}}}}
	if errs, warnings := CheckInstance(i); len(errs)+len(warnings) > 0 {
		t.Fatal(errs, warnings)
	}
	pod := Pod(i)
	class, mode := "fast", corev1.PersistentVolumeFilesystem
	golden := &corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{
		StorageClassName: &class, VolumeMode: &mode, Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
	}, Status: corev1.PersistentVolumeClaimStatus{Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("2Gi")}}}
	SizeCopies(pod, map[string]*corev1.PersistentVolumeClaim{name: golden})
	if errs := convert.Check(pod); len(errs) > 0 {
		t.Fatalf("a node refuses the pod: %v", errs)
	}
	if len(pod.Spec.Volumes) != 2 || len(pod.Spec.Volumes[1].Name) > 63 || pod.Spec.Volumes[1].PersistentVolumeClaim.ClaimName != "golden" {
		t.Fatalf("volumes %+v", pod.Spec.Volumes)
	}
	spec := pod.Spec.Volumes[0].Ephemeral.VolumeClaimTemplate.Spec
	if size := spec.Resources.Requests[corev1.ResourceStorage]; size.String() != "2Gi" || *spec.StorageClassName != "fast" || *spec.VolumeMode != mode || spec.DataSource.Name != "golden" {
		t.Errorf("the copy is %+v", spec)
	}
	if c := pod.Spec.Containers[0]; c.Image != vm.FromVolume(name) || len(c.VolumeDevices) != 1 {
		t.Errorf("the guest boots from %s and has the disks %+v", c.Image, c.VolumeDevices)
	}

	i.Spec.Volumes[0].Ephemeral.PersistentVolumeClaim.ClaimName = ""
	if errs, _ := CheckInstance(i); len(errs) != 1 || errs[0].Field != "spec.volumes[0].ephemeral.persistentVolumeClaim.claimName" {
		t.Errorf("a copy of nothing: %v", errs)
	}
}
