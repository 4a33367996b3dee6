package kubevirt

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/convert"
)

// Machines share the claim of a disk that says so, and no other disk.
func TestShareable(t *testing.T) {
	yes := true
	of := func(claim string) v1.VolumeSource {
		return v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{PersistentVolumeClaimVolumeSource: corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}
	}
	with := func(change func(*v1.Volume, *v1.Disk)) *v1.VirtualMachineInstance {
		i := vmi(t, "web")
		v, d := v1.Volume{Name: "common", VolumeSource: of("common")}, v1.Disk{Name: "common", Shareable: &yes, DiskDevice: v1.DiskDevice{Disk: &v1.DiskTarget{Bus: v1.DiskBusSCSI}}}
		change(&v, &d)
		i.Spec.Volumes, i.Spec.Domain.Devices.Disks = append(i.Spec.Volumes, v), append(i.Spec.Domain.Devices.Disks, d)
		return i
	}
	for what, c := range map[string]struct {
		change func(*v1.Volume, *v1.Disk)
		warns  string
	}{
		"a claim": {func(*v1.Volume, *v1.Disk) {}, ""},
		"a DataVolume": {func(v *v1.Volume, _ *v1.Disk) {
			v.VolumeSource = v1.VolumeSource{DataVolume: &v1.DataVolumeSource{Name: "common"}}
		}, ""},
		"on SATA":       {func(_ *v1.Volume, d *v1.Disk) { d.Disk.Bus = v1.DiskBusSATA }, ""},
		"without a bus": {func(_ *v1.Volume, d *v1.Disk) { d.DiskDevice = v1.DiskDevice{} }, ""},
		"without cache": {func(_ *v1.Volume, d *v1.Disk) { d.Cache = v1.CacheNone }, "cache"},
	} {
		i := with(c.change)
		errs, warnings := CheckInstance(i)
		if len(errs) > 0 || c.warns == "" && len(warnings) > 0 || c.warns != "" && !strings.Contains(strings.Join(warnings, " "), c.warns) {
			t.Errorf("%s: %v, %v", what, errs, warnings)
		}
		pod := Pod(i)
		if errs := convert.Check(pod); len(errs) > 0 {
			t.Errorf("%s: a node refuses the pod: %v", what, errs)
		}
		s := convert.Spec(pod, convert.Node{}, nil)
		if shared := s.SharedVolumes(); len(shared) != 1 || shared[0].Name != "common" || !Shareable(&i.Spec, "common") || Shareable(&i.Spec, i.Spec.Volumes[0].Name) {
			t.Errorf("%s: shared are %+v", what, shared)
		}
		if err := s.Validate(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, c := range map[string]struct {
		change func(*v1.Volume, *v1.Disk)
		at     string
	}{
		"a CD-ROM":     {func(_ *v1.Volume, d *v1.Disk) { d.DiskDevice = v1.DiskDevice{CDRom: &v1.CDRomTarget{}} }, "shareable"},
		"on USB":       {func(_ *v1.Volume, d *v1.Disk) { d.Disk.Bus = v1.DiskBusUSB }, "shareable"},
		"with a cache": {func(_ *v1.Volume, d *v1.Disk) { d.Cache = v1.CacheWriteThrough }, "cache"},
		"an emptyDisk": {func(v *v1.Volume, _ *v1.Disk) {
			v.VolumeSource = v1.VolumeSource{EmptyDisk: &v1.EmptyDiskSource{Capacity: resource.MustParse("32Mi")}}
		}, "shareable"},
		"a file of the node": {func(v *v1.Volume, _ *v1.Disk) {
			v.VolumeSource = v1.VolumeSource{HostDisk: &v1.HostDisk{Path: "/srv/d", Type: v1.HostDiskExists}}
		}, "shareable"},
		"a LUN": {func(_ *v1.Volume, d *v1.Disk) { d.DiskDevice = v1.DiskDevice{LUN: &v1.LunTarget{Bus: v1.DiskBusSCSI}} }, "lun.bus"},
	} {
		errs, _ := CheckInstance(with(c.change))
		if len(errs) != 1 || !strings.HasSuffix(errs[0].Field, c.at) {
			t.Errorf("%s: %v", what, errs)
		}
	}
	root := with(func(*v1.Volume, *v1.Disk) {})
	root.Spec.Volumes = root.Spec.Volumes[len(root.Spec.Volumes)-1:]
	root.Spec.Domain.Devices.Disks = root.Spec.Domain.Devices.Disks[len(root.Spec.Domain.Devices.Disks)-1:]
	if errs, _ := CheckInstance(root); len(errs) != 1 || !strings.Contains(errs[0].Error(), "the guest boots from it") {
		t.Errorf("the disk from which it boots: %v", errs)
	}
}
