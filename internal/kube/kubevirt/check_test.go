package kubevirt

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// cirros is the smallest manifest of KubeVirt's users: a containerDisk, cloud-init, masquerade, all with the buses they write.
const cirros = `
domain:
  cpu: {cores: 2, model: host-model}
  devices:
    disks:
    - {name: root, bootOrder: 1, disk: {bus: virtio}}
    - {name: seed, disk: {bus: virtio}}
    interfaces: [{name: default, bridge: {}, model: virtio}]
    rng: {}
  machine: {type: q35}
  memory: {guest: 128Mi}
  resources: {}
terminationGracePeriodSeconds: 0
networks: [{name: default, pod: {}}]
volumes:
- {name: root, containerDisk: {image: "cocoon/disk-demo:latest"}}
- {name: seed, cloudInitNoCloud: {userData: "#!/bin/sh\necho hello"}}
`

func spec(t testing.TB, text string) *v1.VirtualMachineInstanceSpec {
	t.Helper()
	s := &v1.VirtualMachineInstanceSpec{}
	if err := yaml.UnmarshalStrict([]byte(text), s); err != nil {
		t.Fatal(err)
	}
	return s
}

// boots returns a change that sets the boot loader.
func boots(b v1.Bootloader) func(*v1.VirtualMachineInstanceSpec) {
	return func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Firmware = &v1.Firmware{Bootloader: &b} }
}

func fileOfNode(d v1.HostDisk) func(*v1.VirtualMachineInstanceSpec) {
	return func(s *v1.VirtualMachineInstanceSpec) { s.Volumes[1].VolumeSource = v1.VolumeSource{HostDisk: &d} }
}

func kernelOf(k v1.KernelBoot) func(*v1.VirtualMachineInstanceSpec) {
	return func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Firmware = &v1.Firmware{KernelBoot: &k} }
}

func TestCheck(t *testing.T) {
	yes, no := true, false
	if errs, warnings := Check(spec(t, cirros), nil); len(errs) > 0 || len(warnings) > 0 {
		t.Errorf("%v %q", errs, warnings)
	}
	minimal := `{domain: {devices: {}, resources: {requests: {memory: 128Mi}}}, volumes: [{name: root, containerDisk: {image: a}}]}`
	if errs, warnings := Check(spec(t, minimal), nil); len(errs) > 0 || len(warnings) > 0 {
		t.Errorf("%v %q", errs, warnings)
	}
	efi := spec(t, cirros)
	boots(v1.Bootloader{EFI: &v1.EFI{SecureBoot: &no, Persistent: &no}})(efi)
	if errs, warnings := Check(efi, nil); len(errs) > 0 || len(warnings) > 0 {
		t.Errorf("UEFI: %v %q", errs, warnings)
	}
	for name, c := range map[string]struct {
		change func(*v1.VirtualMachineInstanceSpec)
		want   string // in the error
	}{
		"no memory":     {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Memory = nil }, "spec.domain.memory.guest: Required"},
		"little memory": {func(s *v1.VirtualMachineInstanceSpec) { *s.Domain.Memory.Guest = resource.MustParse("16Mi") }, "is less than 96 MiB"},
		"above its limit": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Resources.Limits = corev1.ResourceList{"memory": resource.MustParse("100Mi")}
		}, "spec.domain.memory.guest"},
		"devices": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Resources.Limits = corev1.ResourceList{"a/b": resource.MustParse("1")}
		}, "spec.domain.resources.limits[a/b]: Forbidden"},
		"unknown bus": {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Disks[0].Disk.Bus = "ide" }, `spec.domain.devices.disks[0].disk.bus: Unsupported value: "ide": supported values: "virtio", "sata", "scsi", "usb"`},
		"read-only sata": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.Disks[1].Disk = &v1.DiskTarget{Bus: v1.DiskBusSATA, ReadOnly: true}
		}, "spec.domain.devices.disks[1].disk.readonly: Forbidden"},
		"seven on sata": {func(s *v1.VirtualMachineInstanceSpec) {
			for i := range 7 {
				name := fmt.Sprintf("d%d", i)
				s.Volumes = append(s.Volumes, v1.Volume{Name: name, VolumeSource: v1.VolumeSource{EmptyDisk: &v1.EmptyDiskSource{Capacity: resource.MustParse("1Gi")}}})
				s.Domain.Devices.Disks = append(s.Domain.Devices.Disks, v1.Disk{Name: name, DiskDevice: v1.DiskDevice{Disk: &v1.DiskTarget{Bus: v1.DiskBusSATA}}})
			}
		}, "spec.domain.devices.disks[8]: Too many"},
		"a writable CD": {func(s *v1.VirtualMachineInstanceSpec) {
			no := false
			s.Domain.Devices.Disks[1].DiskDevice = v1.DiskDevice{CDRom: &v1.CDRomTarget{ReadOnly: &no}}
		}, "spec.domain.devices.disks[1].cdrom.readonly: Forbidden"},
		"an open CD": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.Disks[1].DiskDevice = v1.DiskDevice{CDRom: &v1.CDRomTarget{Tray: v1.TrayStateOpen}}
		}, "spec.domain.devices.disks[1].cdrom.tray: Unsupported"},
		"watchdog": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.Watchdog = &v1.Watchdog{Name: "w", WatchdogDevice: v1.WatchdogDevice{I6300ESB: &v1.I6300ESBWatchdog{Action: "bark"}}}
		}, "spec.domain.devices.watchdog.i6300esb.action: Unsupported"},
		"long serial": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.Disks[0].Serial = strings.Repeat("s", 21)
		}, "spec.domain.devices.disks[0].serial: Invalid"},
		"serial of ours": {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Disks[0].Serial = "vol-1" }, "begins with vol-"},
		"one serial twice": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.Disks[0].Serial, s.Domain.Devices.Disks[1].Serial = "A", "A"
		}, "spec.domain.devices.disks[1].serial: Duplicate"},
		"blocks of one size": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.Disks[0].BlockSize = &v1.BlockSize{Custom: &v1.CustomBlockSize{Logical: 4096}}
		}, "spec.domain.devices.disks[0].blockSize.custom: Invalid"},
		"blocks of no size": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.Disks[0].BlockSize = &v1.BlockSize{Custom: &v1.CustomBlockSize{}}
		}, "spec.domain.devices.disks[0].blockSize.custom: Required"},
		"cdrom": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.Disks[1].DiskDevice = v1.DiskDevice{CDRom: &v1.CDRomTarget{Bus: "virtio"}}
		}, "spec.domain.devices.disks[1].cdrom.bus"},
		"disk twice":       {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Disks[1].Name = "root" }, "spec.domain.devices.disks[1].name: Duplicate"},
		"disk of nothing":  {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Disks[1].Name = "x" }, "spec.domain.devices.disks[1].name: Not found"},
		"boot order twice": {func(s *v1.VirtualMachineInstanceSpec) { one := uint(1); s.Domain.Devices.Disks[1].BootOrder = &one }, "spec.domain.devices.disks[1].bootOrder: Duplicate"},
		"two disks":        {func(s *v1.VirtualMachineInstanceSpec) { s.Volumes[1].VolumeSource = s.Volumes[0].VolumeSource }, "spec.volumes[1].containerDisk: Forbidden"},
		"two seeds": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Volumes = append(s.Volumes, s.Volumes[1])
			s.Volumes[2].Name = "more"
		}, "spec.volumes[2].cloudInitNoCloud: Forbidden"},
		"no disk":      {func(s *v1.VirtualMachineInstanceSpec) { s.Volumes = s.Volumes[1:]; s.Domain.Devices.Disks = nil }, "spec.volumes: Required"},
		"two sources":  {func(s *v1.VirtualMachineInstanceSpec) { s.Volumes[1].ContainerDisk = s.Volumes[0].ContainerDisk }, "has 2 sources"},
		"no user data": {func(s *v1.VirtualMachineInstanceSpec) { s.Volumes[1].CloudInitNoCloud.UserData = "" }, "spec.volumes[1].cloudInitNoCloud: Required value: give userData or networkData"},
		"bad base64": {func(s *v1.VirtualMachineInstanceSpec) {
			*s.Volumes[1].CloudInitNoCloud = v1.CloudInitNoCloudSource{UserDataBase64: "geheim!"}
		}, "userDataBase64: Invalid value: is not base64"},
		"long user data": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Volumes[1].CloudInitNoCloud.UserData = strings.Repeat("x", 2049)
		}, "userData: Too long"},
		"1,000 disks": {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Disks = make([]v1.Disk, 1000) }, "spec.domain.devices.disks[999].name"},
		"two networks": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Networks = append(s.Networks, s.Networks[0])
			s.Networks[1].Name = "b"
		}, "spec.networks[1]: Forbidden"},
		"two interfaces": {func(s *v1.VirtualMachineInstanceSpec) {
			d := &s.Domain.Devices
			d.Interfaces = append(d.Interfaces, d.Interfaces[0])
		}, "spec.domain.devices.interfaces[1].name: Duplicate"},
		"no interface": {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Interfaces[0].Name = "x" }, "spec.networks[0]: Required"},
		"no action":    {func(s *v1.VirtualMachineInstanceSpec) { s.LivenessProbe = &v1.Probe{} }, "spec.livenessProbe: Invalid"},
		"two actions": {func(s *v1.VirtualMachineInstanceSpec) {
			s.ReadinessProbe = &v1.Probe{Handler: v1.Handler{Exec: &corev1.ExecAction{}, GuestAgentPing: &v1.GuestAgentPing{}}}
		}, "spec.readinessProbe: Invalid"},
		"model": {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Interfaces[0].Model = "ne2k_pci" }, "spec.domain.devices.interfaces[0].model"},
		"two bindings": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.Interfaces[0].Masquerade = &v1.InterfaceMasquerade{}
		}, "one binding"},
		"machine":          {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Machine.Type = "pc-i440fx-7.2" }, "spec.domain.machine.type"},
		"architecture":     {func(s *v1.VirtualMachineInstanceSpec) { s.Architecture = "arm64" }, "spec.architecture"},
		"model of the CPU": {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.CPU.Model = "a,b=c" }, "spec.domain.cpu.model: Invalid"},
		"forbidden feature": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.CPU.Features = []v1.CPUFeature{{Name: "vmx", Policy: "forbid"}}
		}, "spec.domain.cpu.features[0].policy: Forbidden"},
		"bad feature": {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.CPU.Features = []v1.CPUFeature{{Name: "a=b"}} }, "spec.domain.cpu.features[0].name: Invalid"},
		"two offsets": {func(s *v1.VirtualMachineInstanceSpec) {
			zone := v1.ClockOffsetTimezone("Europe/Berlin")
			s.Domain.Clock = &v1.Clock{ClockOffset: v1.ClockOffset{UTC: &v1.ClockOffsetUTC{}, Timezone: &zone}}
		}, "spec.domain.clock.timezone: Forbidden"},
		"no zone": {func(s *v1.VirtualMachineInstanceSpec) {
			zone := v1.ClockOffsetTimezone("Mars/Base")
			s.Domain.Clock = &v1.Clock{ClockOffset: v1.ClockOffset{Timezone: &zone}}
		}, "spec.domain.clock.timezone: Invalid"},
		"few spinlocks": {func(s *v1.VirtualMachineInstanceSpec) {
			few := uint32(1)
			s.Domain.Features = &v1.Features{Hyperv: &v1.FeatureHyperv{Spinlocks: &v1.FeatureSpinlocks{Retries: &few}}}
		}, "spec.domain.features.hyperv.spinlocks.spinlocks: Invalid"},
		"no SMM": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Features = &v1.Features{SMM: &v1.FeatureState{Enabled: &no}}
		}, "spec.domain.features.smm.enabled: Forbidden"},
		"two panic devices": {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.PanicDevices = make([]v1.PanicDevice, 2) }, "spec.domain.devices.panicDevices: Too many"},
		"CPUs":              {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.CPU.Sockets = 1 << 31 }, "is more than 255 CPUs"},
		"host name":         {func(s *v1.VirtualMachineInstanceSpec) { s.Hostname = "a.b" }, "spec.hostname"},
		"video":             {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Video = &v1.VideoDevice{Type: "virtio"} }, "spec.domain.devices.video.type: Unsupported"},
		"video without graphics": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.AutoattachGraphicsDevice, s.Domain.Devices.Video = &no, &v1.VideoDevice{}
		}, "spec.domain.devices.video: Forbidden"},
		"UEFI, empty": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Firmware = &v1.Firmware{Bootloader: &v1.Bootloader{EFI: &v1.EFI{}}}
		}, "spec.domain.features.smm.enabled: Required"},
		"Secure Boot":                  {boots(v1.Bootloader{EFI: &v1.EFI{SecureBoot: &yes}}), "spec.domain.features.smm.enabled: Required"},
		"two boot loaders":             {boots(v1.Bootloader{EFI: &v1.EFI{SecureBoot: &no}, BIOS: &v1.BIOS{}}), "spec.domain.firmware.bootloader.efi: Forbidden"},
		"no UUID":                      {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Firmware = &v1.Firmware{UUID: "5d307ca9"} }, "spec.domain.firmware.uuid: Invalid"},
		"a serial number of two lines": {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Firmware = &v1.Firmware{Serial: "a\nb"} }, "spec.domain.firmware.serial: Invalid"},
		"a long chassis":               {func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Chassis = &v1.Chassis{Sku: strings.Repeat("x", 65)} }, "spec.domain.chassis.sku: Invalid"},
		"network data of two": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Volumes[1].CloudInitNoCloud.NetworkData, s.Volumes[1].CloudInitNoCloud.NetworkDataBase64 = "version: 2", "e30="
		}, "only one of networkData, networkDataBase64 and networkDataSecretRef"},
		"network data that is a list": {func(s *v1.VirtualMachineInstanceSpec) { s.Volumes[1].CloudInitNoCloud.NetworkData = "[geheim]" }, "spec.volumes[1].cloudInitNoCloud.networkData: Invalid"},
		"network data of a config drive that is not JSON": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Volumes[1].VolumeSource = v1.VolumeSource{CloudInitConfigDrive: &v1.CloudInitConfigDriveSource{NetworkData: "version: geheim"}}
		}, "spec.volumes[1].cloudInitConfigDrive.networkData: Invalid"},
		"a Secret without a name": {func(s *v1.VirtualMachineInstanceSpec) {
			*s.Volumes[1].CloudInitNoCloud = v1.CloudInitNoCloudSource{NetworkDataSecretRef: &corev1.LocalObjectReference{}}
		}, "spec.volumes[1].cloudInitNoCloud.networkDataSecretRef.name: Required"},
		"a claim without a name": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Volumes[1].VolumeSource = v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{}}
		}, "spec.volumes[1].persistentVolumeClaim.claimName: Required"},
		"an empty disk of no size": {func(s *v1.VirtualMachineInstanceSpec) {
			s.Volumes[1].VolumeSource = v1.VolumeSource{EmptyDisk: &v1.EmptyDiskSource{}}
		}, "spec.volumes[1].emptyDisk.capacity: Invalid"},
		"a kernel with Secure Boot": {func(s *v1.VirtualMachineInstanceSpec) {
			kernelOf(v1.KernelBoot{Container: &v1.KernelBootContainer{Image: "k", KernelPath: "/k"}})(s)
			s.Domain.Firmware.Bootloader = &v1.Bootloader{EFI: &v1.EFI{}}
		}, "spec.domain.firmware.bootloader.efi.secureBoot: Forbidden"},
		"arguments of no kernel":     {kernelOf(v1.KernelBoot{KernelArgs: "quiet"}), "spec.domain.firmware.kernelBoot.kernelArgs: Invalid"},
		"arguments of two lines":     {kernelOf(v1.KernelBoot{KernelArgs: "a\nb", Container: &v1.KernelBootContainer{}}), "spec.domain.firmware.kernelBoot.kernelArgs: Invalid"},
		"a kernel of no image":       {kernelOf(v1.KernelBoot{Container: &v1.KernelBootContainer{KernelPath: "/k"}}), "spec.domain.firmware.kernelBoot.container.image: Required"},
		"an initrd without a kernel": {kernelOf(v1.KernelBoot{Container: &v1.KernelBootContainer{Image: "k", InitrdPath: "/i"}}), "spec.domain.firmware.kernelBoot.container.kernelPath: Required"},
		"a kernel outside":           {kernelOf(v1.KernelBoot{Container: &v1.KernelBootContainer{Image: "k", KernelPath: "/../etc/shadow"}}), "spec.domain.firmware.kernelBoot.container.kernelPath: Invalid"},
		"a relative initrd":          {kernelOf(v1.KernelBoot{Container: &v1.KernelBootContainer{Image: "k", KernelPath: "/k", InitrdPath: "i"}}), "spec.domain.firmware.kernelBoot.container.initrdPath: Invalid"},
		"a kernel pulled sometimes":  {kernelOf(v1.KernelBoot{Container: &v1.KernelBootContainer{Image: "k", KernelPath: "/k", ImagePullPolicy: "Sometimes"}}), "spec.domain.firmware.kernelBoot.container.imagePullPolicy: Unsupported"},
		"a file without a type":      {fileOfNode(v1.HostDisk{Path: "/srv/disk"}), "spec.volumes[1].hostDisk.type: Unsupported"},
		"a file without a path":      {fileOfNode(v1.HostDisk{Type: v1.HostDiskExists}), "spec.volumes[1].hostDisk.path: Required"},
		"a file outside":             {fileOfNode(v1.HostDisk{Path: "/srv/../etc/shadow", Type: v1.HostDiskExists}), "spec.volumes[1].hostDisk.path: Invalid"},
		"a relative file":            {fileOfNode(v1.HostDisk{Path: "srv/disk", Type: v1.HostDiskExists}), "spec.volumes[1].hostDisk.path: Invalid"},
		"a new file of no size":      {fileOfNode(v1.HostDisk{Path: "/srv/disk", Type: v1.HostDiskExistsOrCreate}), "spec.volumes[1].hostDisk.capacity: Invalid"},
		"a file with a size":         {fileOfNode(v1.HostDisk{Path: "/srv/disk", Type: v1.HostDiskExists, Capacity: resource.MustParse("1Gi")}), "spec.volumes[1].hostDisk.capacity: Invalid"},
		"a huge file":                {fileOfNode(v1.HostDisk{Path: "/srv/disk", Type: v1.HostDiskExistsOrCreate, Capacity: resource.MustParse("1Ei")}), "spec.volumes[1].hostDisk.capacity: Invalid"},
	} {
		s := spec(t, cirros)
		c.change(s)
		errs, _ := Check(s, field.NewPath("spec"))
		if text := errs.ToAggregate().Error(); len(errs) == 0 || !strings.Contains(text, c.want) {
			t.Errorf("%s: %s; want %s", name, text, c.want)
		} else if strings.Contains(text, "geheim") {
			t.Errorf("%s: the error quotes user data", name)
		}
	}
}

// Whatever the API server lets through, neither Check nor Pod panics, and what is refused has a path.
func FuzzCheck(f *testing.F) {
	f.Add([]byte(cirros))
	f.Add([]byte(`{domain: {memory: {guest: 128Mi}, firmware: {kernelBoot: {kernelArgs: a, container: {image: k, kernelPath: /k, initrdPath: /i}}}}, volumes: [{name: kernel-boot, emptyDisk: {capacity: 1Gi}}]}`))
	f.Add([]byte(`{domain: {devices: {disks: [{name: a, bootOrder: 0, cdrom: {}}]}, cpu: {cores: 4294967295, sockets: 4294967295, threads: 4294967295}}, volumes: [{}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		s := &v1.VirtualMachineInstanceSpec{}
		if yaml.Unmarshal(data, s) != nil {
			return
		}
		errs, _ := Check(s, field.NewPath("spec"))
		for _, e := range errs {
			if !strings.HasPrefix(e.Field, "spec.") {
				t.Errorf("an error without a path: %v", e)
			}
		}
		if len(errs) == 0 {
			vmi := &v1.VirtualMachineInstance{Spec: *s}
			vmi.Name, vmi.Namespace, vmi.UID = "a", "ns", "u"
			Pod(vmi)
			Seed(vmi)
		}
	})
}
