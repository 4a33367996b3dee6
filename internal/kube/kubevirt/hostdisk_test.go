package kubevirt

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// A file of the node is a hostPath of the pod, so the rules of the cluster for such volumes hold. A guest without another disk boots from it.
func TestHostDisk(t *testing.T) {
	yes := true
	i := vmi(t, "web")
	i.Spec.Volumes = []v1.Volume{
		{Name: "data", VolumeSource: v1.VolumeSource{HostDisk: &v1.HostDisk{Path: "/srv/data.img", Type: v1.HostDiskExists, Shared: &yes}}},
		{Name: "root", VolumeSource: v1.VolumeSource{HostDisk: &v1.HostDisk{Path: "/srv/root.img", Type: v1.HostDiskExistsOrCreate, Capacity: resource.MustParse("1Gi")}}},
	}
	first, second := uint(1), uint(2)
	i.Spec.Domain.Devices.Disks = []v1.Disk{
		{Name: "data", BootOrder: nil, DiskDevice: v1.DiskDevice{Disk: &v1.DiskTarget{Bus: v1.DiskBusSCSI, ReadOnly: true}}},
		{Name: "root", BootOrder: &first},
	}
	if errs, warnings := CheckInstance(i); len(errs)+len(warnings) > 0 {
		t.Fatal(errs, warnings)
	}
	pod := Pod(i)
	if errs := convert.Check(pod); len(errs) > 0 {
		t.Fatalf("a node refuses the pod: %v", errs)
	}
	s := convert.Spec(pod, convert.Node{}, nil)
	if err := s.Validate(); err != nil {
		t.Error(err)
	}
	want := []vm.Volume{
		{Name: "data", Kind: vm.VolumeHostDisk, HostDisk: &vm.HostDisk{Path: "/srv/data.img", Shared: true, ReadOnly: true}},
		{Name: "root", Kind: vm.VolumeHostDisk, HostDisk: &vm.HostDisk{Path: "/srv/root.img", Capacity: 1 << 30}},
	}
	if d := diff.Of(want, s.Volumes); d != "" {
		t.Error(d)
	}
	if s.Image != "volume://root" || len(pod.Spec.Containers[0].VolumeMounts)+len(pod.Spec.Containers[0].VolumeDevices) > 0 {
		t.Errorf("it boots from %s, with %+v", s.Image, pod.Spec.Containers[0])
	}
	if v := pod.Spec.Volumes[1]; v.HostPath == nil || *v.HostPath.Type != corev1.HostPathFileOrCreate {
		t.Errorf("the pod has %+v", v)
	}
	i.Spec.Domain.Devices.Disks[1].BootOrder, i.Spec.Domain.Devices.Disks[0].BootOrder = &second, &first
	if root := rootVolume(&i.Spec); root.Name != "data" {
		t.Errorf("by another order it boots from %s", root.Name)
	}
}
