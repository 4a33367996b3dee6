package kubevirt

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// The kernel of an instance is a volume of its pod, which is pulled as any image and which no container mounts. An instance without a disk
// boots from that volume.
func TestKernelBoot(t *testing.T) {
	boot := &v1.KernelBoot{KernelArgs: "console=ttyS0", Container: &v1.KernelBootContainer{
		Image: "registry.example/kernel:1", KernelPath: "/boot/vmlinuz", InitrdPath: "/boot/initrd", ImagePullSecret: "mine", ImagePullPolicy: corev1.PullAlways,
	}}
	for what, c := range map[string]struct {
		change func(*v1.VirtualMachineInstanceSpec)
		volume string // with the kernel
		image  string
		pulls  int
		kinds  []vm.VolumeKind
	}{
		"no disk": {func(s *v1.VirtualMachineInstanceSpec) { s.Volumes, s.Domain.Devices.Disks = nil, nil }, "kernel-boot", "volume://kernel-boot", 2, []vm.VolumeKind{vm.VolumeImage}},
		"an empty disk of its name": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Volumes = []v1.Volume{{Name: "kernel-boot", VolumeSource: v1.VolumeSource{EmptyDisk: &v1.EmptyDiskSource{Capacity: resource.MustParse("1Gi")}}}}
			s.Domain.Devices.Disks = nil
		}, "kernel-boot-1", "volume://kernel-boot-1", 2, []vm.VolumeKind{vm.VolumeDisk, vm.VolumeImage}},
		"a containerDisk": {func(s *v1.VirtualMachineInstanceSpec) { s.Volumes[0].ContainerDisk.ImagePullSecret = "mine" }, "kernel-boot", "cocoon/disk-demo:latest", 2, []vm.VolumeKind{vm.VolumeImage}},
	} {
		i := vmi(t, "web")
		i.Spec.Domain.Firmware = &v1.Firmware{KernelBoot: boot}
		c.change(&i.Spec)
		if errs, warnings := CheckInstance(i); len(errs)+len(warnings) > 0 {
			t.Fatal(what, errs, warnings)
		}
		pod := Pod(i)
		if errs := convert.Check(pod); len(errs) > 0 {
			t.Fatalf("%s: a node refuses the pod: %v", what, errs)
		}
		s := convert.Spec(pod, convert.Node{}, nil)
		if err := s.Validate(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		want := &vm.Kernel{Volume: c.volume, Path: "/boot/vmlinuz", Initrd: "/boot/initrd", Args: "console=ttyS0"}
		if d := diff.Of(want, s.Kernel()); d != "" {
			t.Errorf("%s: %s", what, d)
		}
		if s.Image != c.image {
			t.Errorf("%s: boots from %s", what, s.Image)
		}
		var kinds []vm.VolumeKind
		for _, v := range s.Volumes {
			kinds = append(kinds, v.Kind)
		}
		if d := diff.Of(c.kinds, kinds); d != "" {
			t.Errorf("%s: %s", what, d)
		}
		pulls := convert.Pulls(pod)
		if len(pulls) != c.pulls || pulls[1].Name != boot.Container.Image || pulls[1].Policy != image.PullAlways {
			t.Errorf("%s: pulls %+v", what, pulls)
		}
		if secrets := pod.Spec.ImagePullSecrets; len(secrets) != 1 || secrets[0].Name != "mine" {
			t.Errorf("%s: secrets %v", what, secrets)
		}
	}
}

// The status has the checksums that the node tells.
func TestKernelBootStatus(t *testing.T) {
	info := func(kernel, initrd uint32) *v1.KernelBootStatus {
		return &v1.KernelBootStatus{KernelInfo: &v1.KernelInfo{Checksum: kernel}, InitrdInfo: &v1.InitrdInfo{Checksum: initrd}}
	}
	only := info(7, 0)
	only.InitrdInfo = nil
	i := vmi(t, "web")
	pod := Pod(i)
	for text, want := range map[string]*v1.KernelBootStatus{"4294967295,8": info(4294967295, 8), "7,0": only, "": nil, "7": nil, "x,8": nil, "-1,8": nil, "4294967296,1": nil, "1,2,3": nil} {
		pod.Annotations[contract.KeyKernelSums] = text
		if d := diff.Of(want, Observe(i, pod, time.Now()).KernelBootStatus); d != "" {
			t.Errorf("%q: %s", text, d)
		}
	}
	if text := contract.KernelSumsText(4294967295, 8); text != "4294967295,8" {
		t.Errorf("the text is %q", text)
	}
}
