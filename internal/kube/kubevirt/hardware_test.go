package kubevirt

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// What an instance says of its machine reaches the node that runs its pod.
func TestHardware(t *testing.T) {
	i := vmi(t, "web")
	d := &i.Spec.Domain
	d.CPU = &v1.CPU{Sockets: 2, Cores: 2}
	zone, isa, no := v1.ClockOffsetTimezone("Europe/Berlin"), v1.Pvpanic, false
	d.Clock = &v1.Clock{ClockOffset: v1.ClockOffset{Timezone: &zone}, Timer: &v1.Timer{
		HPET: &v1.HPETTimer{Enabled: &no}, KVM: &v1.KVMTimer{Enabled: &no}, RTC: &v1.RTCTimer{TickPolicy: v1.RTCTickPolicyCatchup}, Hyperv: &v1.HypervTimer{},
	}}
	d.CPU.Model, d.CPU.Features = "Haswell", []v1.CPUFeature{{Name: "avx2", Policy: "force"}, {Name: "vmx", Policy: "disable"}}
	d.Features = &v1.Features{
		KVM: &v1.FeatureKVM{Hidden: true}, Pvspinlock: &v1.FeatureState{Enabled: &no}, SMM: &v1.FeatureState{},
		Hyperv: &v1.FeatureHyperv{Relaxed: &v1.FeatureState{}, VAPIC: &v1.FeatureState{Enabled: &no}, Spinlocks: &v1.FeatureSpinlocks{}, SyNICTimer: &v1.SyNICTimer{Direct: &v1.FeatureState{}}},
	}
	d.Firmware = &v1.Firmware{Bootloader: &v1.Bootloader{EFI: &v1.EFI{Persistent: new(true)}}}
	d.Devices.TPM = &v1.TPMDevice{}
	d.Devices.PanicDevices = []v1.PanicDevice{{Model: &isa}}
	d.Devices.Watchdog = &v1.Watchdog{Name: "w"}
	d.Devices.Disks[0].DiskDevice = v1.DiskDevice{Disk: &v1.DiskTarget{Bus: v1.DiskBusSATA}}
	d.Devices.Disks[1].DiskDevice = v1.DiskDevice{CDRom: &v1.CDRomTarget{}}
	i.Spec.Volumes = append(i.Spec.Volumes,
		v1.Volume{Name: "claim", VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{PersistentVolumeClaimVolumeSource: corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}}},
		v1.Volume{Name: "keys", VolumeSource: v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "k"}}})
	d.Devices.Disks = append(d.Devices.Disks, v1.Disk{Name: "claim", DiskDevice: v1.DiskDevice{Disk: &v1.DiskTarget{Bus: v1.DiskBusSCSI, ReadOnly: true}}, Serial: "WD-1", BlockSize: &v1.BlockSize{Custom: &v1.CustomBlockSize{Logical: 512, Physical: 4096}}},
		v1.Disk{Name: "keys", DiskDevice: v1.DiskDevice{CDRom: &v1.CDRomTarget{Bus: v1.DiskBusUSB}}})
	if errs, warnings := CheckInstance(i); len(errs)+len(warnings) > 0 {
		t.Fatal(errs, warnings)
	}
	pod := Pod(i)
	if errs := convert.Check(pod); len(errs) > 0 {
		t.Fatalf("a node refuses the pod: %v", errs)
	}
	want := &vm.Hardware{
		Topology: vm.Topology{Sockets: 2, Cores: 2, Threads: 1}, Watchdog: vm.WatchdogReset, TPM: vm.TPMEphemeral, Panic: vm.PanicPCI, UEFI: vm.UEFI{Persistent: true, SecureBoot: true},
		Clock: vm.Clock{Timezone: "Europe/Berlin", CatchUp: true, NoHPET: true},
		CPU: vm.CPU{
			Model: "Haswell", HideKVM: true, HyperV: vm.HyperV{Features: []string{"relaxed", "stimer", "stimer-direct", "time"}, Spinlocks: 4096},
			Features: []vm.CPUFeature{
				{Name: "avx2", Policy: vm.FeatureOptional},
				{Name: "vmx", Policy: vm.FeatureDisable},
				{Name: "kvm-pv-unhalt", Policy: vm.FeatureDisable},
				{Name: "kvmclock", Policy: vm.FeatureDisable},
			},
		},
		Disks: map[string]vm.DiskDevice{
			vm.DiskOfImage: {Bus: vm.DiskSATA}, vm.DiskOfSeed: {Bus: vm.DiskSATA, CDROM: true},
			"claim": {Bus: vm.DiskSCSI, ReadOnly: true, Serial: "WD-1", Blocks: vm.Blocks{Logical: 512, Physical: 4096}}, "keys": {Bus: vm.DiskUSB, CDROM: true},
		},
	}
	if d := diff.Of(want, convert.Spec(pod, convert.Node{}, nil).Hardware); d != "" {
		t.Error(d)
	}
}

// Huge pages are the memory of the guest, and the scheduler counts them instead of other memory.
func TestHugePages(t *testing.T) {
	for _, size := range []string{"2Mi", "1Gi"} {
		t.Run(size, func(t *testing.T) { testHugePages(t, size) })
	}
	for size, want := range map[string]string{"1Gi": "spec.domain.memory.guest", "4Mi": "spec.domain.memory.hugepages.pageSize", "2MB": "spec.domain.memory.hugepages.pageSize", "2Mi": "spec.domain.memory.guest"} {
		i := vmi(t, "web")
		odd := resource.MustParse("129Mi")
		i.Spec.Domain.Memory.Guest, i.Spec.Domain.Memory.Hugepages = &odd, &v1.Hugepages{PageSize: size}
		if errs, _ := CheckInstance(i); len(errs) != 1 || errs[0].Field != want {
			t.Errorf("%s: %v", size, errs)
		}
	}
}

func testHugePages(t *testing.T, size string) {
	i := vmi(t, "web")
	memory := resource.MustParse("2Gi")
	i.Spec.Domain.Memory.Guest, i.Spec.Domain.Memory.Hugepages = &memory, &v1.Hugepages{PageSize: size}
	i.Spec.Domain.Resources.Requests = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Mi")}
	if errs, warnings := CheckInstance(i); len(errs)+len(warnings) > 0 {
		t.Fatal(errs, warnings)
	}
	pod := Pod(i)
	if errs := convert.Check(pod); len(errs) > 0 {
		t.Fatalf("a node refuses the pod: %v", errs)
	}
	guest := i.Spec.Domain.Memory.Guest.Value()
	for what, list := range map[string]corev1.ResourceList{"requests": pod.Spec.Containers[0].Resources.Requests, "limits": pod.Spec.Containers[0].Resources.Limits} {
		huge := list[corev1.ResourceName("hugepages-"+size)]
		if _, other := list[corev1.ResourceMemory]; other || huge.Value() != guest {
			t.Errorf("%s: %v", what, list)
		}
	}
	if s := convert.Spec(pod, convert.Node{}, nil); s.Memory != guest || s.HugePages().String() != size {
		t.Errorf("the VM has %d bytes, %+v", s.Memory, s.Hardware)
	}
}

// What firmware keeps outlives the instances of a machine, which stays on its node. An instance without a machine has no next one.
func TestKeptFirmware(t *testing.T) {
	yes, no := true, false
	machine := metav1.OwnerReference{APIVersion: "kubevirt.io/v1", Kind: "VirtualMachine", Name: "web", UID: "0f9c8d1e-0000-4000-8000-000000000001", Controller: &yes}
	set := metav1.OwnerReference{APIVersion: "kubevirt.io/v1", Kind: "VirtualMachineInstanceReplicaSet", Name: "web", UID: "0f9c8d1e-0000-4000-8000-000000000002", Controller: &yes}
	tpm := func(persistent *bool) func(*v1.VirtualMachineInstance) {
		return func(i *v1.VirtualMachineInstance) {
			i.Spec.Domain.Devices.TPM = &v1.TPMDevice{Persistent: persistent}
		}
	}
	for name, tc := range map[string]struct {
		owner               *metav1.OwnerReference
		change              func(*v1.VirtualMachineInstance)
		keep, sticky, state string
	}{
		"a TPM":                  {owner: &machine, change: tpm(nil), state: "ephemeral"},
		"a TPM that is not kept": {owner: &machine, change: tpm(&no), state: "ephemeral"},
		"a TPM that is kept":     {owner: &machine, change: tpm(&yes), keep: string(machine.UID), sticky: "never", state: "persistent"},
		"of an instance alone":   {change: tpm(&yes), state: "persistent"},
		"of a set":               {owner: &set, change: tpm(&yes), state: "persistent"},
		"the machine says sticky": {owner: &machine, change: func(i *v1.VirtualMachineInstance) {
			tpm(&yes)(i)
			i.Annotations = map[string]string{contract.KeySticky: "10m"}
		}, keep: string(machine.UID), sticky: "10m", state: "persistent"},
		"UEFI": {owner: &machine, change: func(i *v1.VirtualMachineInstance) {
			i.Spec.Domain.Firmware = &v1.Firmware{Bootloader: &v1.Bootloader{EFI: &v1.EFI{SecureBoot: &no, Persistent: &yes}}}
		}, keep: string(machine.UID), sticky: "never"},
	} {
		i := vmi(t, "web")
		if tc.owner != nil {
			i.OwnerReferences = []metav1.OwnerReference{*tc.owner}
		}
		tc.change(i)
		if errs, warnings := CheckInstance(i); len(errs)+len(warnings) > 0 {
			t.Fatal(name, errs, warnings)
		}
		pod := Pod(i)
		if errs := convert.Check(pod); len(errs) > 0 {
			t.Fatalf("%s: a node refuses the pod: %v", name, errs)
		}
		s := convert.Spec(pod, convert.Node{}, nil)
		if s.KeepsFirmware() != tc.keep || pod.Annotations[contract.KeySticky] != tc.sticky || string(s.Hardware.TPM) != tc.state {
			t.Errorf("%s: %+v, sticky %q", name, s.Hardware, pod.Annotations[contract.KeySticky])
		}
		if tc.keep != "" {
			delete(pod.Annotations, contract.KeySticky)
			if errs := convert.Check(pod); len(errs) != 1 {
				t.Errorf("%s: a pod that may start on another node: %v", name, errs)
			}
		}
	}
}
