package convert

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// machine returns the firmware of pod's VM, and what the firmware tells the guest; nil for nothing in particular.
func machine(pod *corev1.Pod) (vm.Firmware, *vm.SMBIOS) {
	ask, _ := contract.ParseMachine(pod.Annotations)
	virtlet, _ := contract.ParseVirtlet(pod.Annotations)
	b := vm.SMBIOS{UUID: virtlet.SystemUUID, Serial: ask.SMBIOS.Serial, Chassis: vm.Chassis(ask.SMBIOS.Chassis)}
	if b == (vm.SMBIOS{}) {
		return vm.Firmware(ask.Firmware), nil
	}
	return vm.Firmware(ask.Firmware), &b
}

// Windows reports whether the guest of pod is Windows.
func Windows(pod *corev1.Pod) bool {
	return pod.Annotations[contract.KeyOS] == string(contract.OSWindows)
}

// ProbePort returns the TCP port at which the guest of pod must answer to be ready; 0: it must answer pings. A Windows guest whose pod says
// nothing about its readiness is ready when a person can log in.
func ProbePort(pod *corev1.Pod) int {
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	probed := slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.ReadinessProbe != nil })
	if Windows(pod) && !Static(pod) && !probed && pod.Annotations[contract.KeyProbePort] == "" {
		return vm.PortRDP
	}
	return int(ask.ProbePort)
}

// graphics reports whether pod asks for a screen.
func graphics(pod *corev1.Pod) bool {
	ask, _ := contract.ParseMachine(pod.Annotations)
	return ask.Graphics
}

// diskRate returns what limits the disks of pod's VM.
func diskRate(pod *corev1.Pod) vm.DiskRate {
	ask, _ := contract.ParseDiskRate(pod.Annotations)
	return vm.DiskRate(ask)
}

// checkDiskRate refuses limits that no disk can have.
func checkDiskRate(pod *corev1.Pod) (errs field.ErrorList) {
	r := diskRate(pod)
	for _, part := range []struct {
		key  string
		rate vm.DiskRate
	}{{contract.KeyDiskBandwidth, vm.DiskRate{Bytes: r.Bytes}}, {contract.KeyDiskIOPS, vm.DiskRate{Ops: r.Ops}}} {
		if err := part.rate.Validate(); err != nil {
			errs = append(errs, field.Invalid(annotationPath(part.key), pod.Annotations[part.key], err.Error()))
		}
	}
	return errs
}

// hardware returns what else the machine of pod's VM is like; nil for the usual one.
func hardware(pod *corev1.Pod) *vm.Hardware {
	ask, _ := contract.ParseMachine(pod.Annotations)
	cpu := ask.Hardware.CPU
	h := vm.Hardware{
		Topology: vm.Topology(ask.Hardware.Topology), Watchdog: vm.Watchdog(ask.Hardware.Watchdog), Panic: vm.Panic(ask.Hardware.Panic), TPM: vm.TPM(ask.Hardware.TPM), Keep: ask.Hardware.Keep, VSOCK: ask.Hardware.VSOCK, UEFI: vm.UEFI(ask.Hardware.UEFI),
		CPU: vm.CPU{Model: cpu.Model, HideKVM: cpu.HideKVM, HyperV: vm.HyperV(cpu.HyperV)}, Clock: vm.Clock(ask.Hardware.Clock),
	}
	if ask.Hardware.Huge {
		h.HugePages = hugePagesOf(pod)
	}
	h.Growth = vm.Growth{Sockets: ask.Hardware.MaxSockets, Memory: ask.Hardware.MaxMemory}
	if n := sharedCPUs(pod); n > 0 && h.Topology != (vm.Topology{}) {
		h.Topology.Sockets = max(n/max(h.Topology.Cores*h.Topology.Threads, 1), 1)
	}
	for _, f := range cpu.Features {
		h.CPU.Features = append(h.CPU.Features, vm.CPUFeature{Name: f.Name, Policy: vm.FeaturePolicy(f.Policy)})
	}
	for name, d := range ask.Hardware.Disks {
		if h.Disks == nil {
			h.Disks = map[string]vm.DiskDevice{}
		}
		h.Disks[name] = vm.DiskDevice{Bus: vm.DiskBus(d.Bus), CDROM: d.CDROM, ReadOnly: d.ReadOnly, Serial: d.Serial, Blocks: vm.Blocks(d.Blocks)}
	}
	if k := ask.Hardware.Kernel; k != nil {
		kernel := vm.Kernel(*k)
		h.Kernel = &kernel
	}
	for _, model := range ask.Hardware.NICs {
		h.NICs = append(h.NICs, vm.NICModel(model))
	}
	if h.Usual() {
		return nil
	}
	return &h
}

func checkMachine(pod *corev1.Pod) field.ErrorList {
	_, err := contract.ParseMachine(pod.Annotations)
	errs := badKeys(err)
	if _, b := machine(pod); len(errs) == 0 {
		if err := b.Validate(); err != nil {
			errs = append(errs, field.Invalid(annotationPath(contract.KeySMBIOS), pod.Annotations[contract.KeySMBIOS], err.Error()))
		}
	}
	return slices.Concat(errs, checkDiskRate(pod), checkFileDisks(pod), checkLogins(pod), checkHugePages(pod), checkKeep(pod), checkKernel(pod), checkHostDisks(pod), checkShared(pod))
}

// kernelVolume returns the name of the volume of pod with the kernel of its guest, "" if the guest boots from a disk.
func kernelVolume(pod *corev1.Pod) string {
	ask, _ := contract.ParseMachine(pod.Annotations)
	if ask.Hardware.Kernel == nil {
		return ""
	}
	return ask.Hardware.Kernel.Volume
}

// checkKernel refuses a kernel of a volume that has no image, or that a container mounts. The engine validates the paths.
func checkKernel(pod *corev1.Pod) field.ErrorList {
	h := hardware(pod)
	if h == nil || h.Kernel == nil {
		return nil
	}
	var why string
	name := h.Kernel.Volume
	at := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	switch {
	case at < 0:
		why = "is no volume of the pod"
	case pod.Spec.Volumes[at].Image == nil:
		why = "is not of an image; the kernel is a file of an image"
	case slices.ContainsFunc(containers(pod), func(c *corev1.Container) bool { return uses(c, name) }):
		why = "is mounted by a container; only the node reads the kernel, so leave out the mount"
	default:
		return nil
	}
	return field.ErrorList{field.Invalid(annotationPath(contract.KeyHardware), pod.Annotations[contract.KeyHardware], "the volume "+name+" of the kernel "+why)}
}

// hostDisk returns the file of the node that v, a volume of pod, is as a disk; nil if v is none.
func hostDisk(pod *corev1.Pod, v *corev1.Volume) *vm.HostDisk {
	ask, _ := contract.ParseMachine(pod.Annotations)
	d, ok := ask.Hardware.HostDisks[v.Name]
	if !ok || v.HostPath == nil {
		return nil
	}
	dir, _ := HostDir(v.HostPath)
	device := ask.Hardware.Disks[v.Name]
	return &vm.HostDisk{Path: dir.Path, Capacity: d.Capacity, Shared: d.Shared, ReadOnly: device.ReadOnly || device.CDROM}
}

// checkHostDisks refuses disks of the node that are no files, or that a container mounts.
func checkHostDisks(pod *corev1.Pod) (errs field.ErrorList) {
	ask, _ := contract.ParseMachine(pod.Annotations)
	for _, name := range slices.Sorted(maps.Keys(ask.Hardware.HostDisks)) {
		var why string
		d := ask.Hardware.HostDisks[name]
		at := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
		switch {
		case at < 0:
			why = "is no volume of the pod"
		case !isFile(pod.Spec.Volumes[at].HostPath):
			why = "is no file of the node; make it a hostPath of the type File or FileOrCreate"
		case slices.ContainsFunc(containers(pod), func(c *corev1.Container) bool { return uses(c, name) }):
			why = "is mounted by a container; leave out the mount or the disk"
		case (*pod.Spec.Volumes[at].HostPath.Type == corev1.HostPathFileOrCreate) != (d.Capacity > 0):
			why = "has a capacity of more than 0 with the type FileOrCreate, and with no other type"
		default:
			if err := hostDisk(pod, &pod.Spec.Volumes[at]).Validate(); err == nil {
				continue
			} else {
				why = "is not possible: " + err.Error()
			}
		}
		errs = append(errs, field.Invalid(annotationPath(contract.KeyHardware), pod.Annotations[contract.KeyHardware], "the disk "+name+" "+why))
	}
	return errs
}

// checkShared refuses to share what is no volume of a claim. The engine knows what else a shared volume may not be.
func checkShared(pod *corev1.Pod) (errs field.ErrorList) {
	ask, _ := contract.ParseMachine(pod.Annotations)
	for _, name := range slices.Sorted(maps.Keys(ask.Hardware.Disks)) {
		if !ask.Hardware.Disks[name].Shared || slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == name && v.PersistentVolumeClaim != nil }) {
			continue
		}
		why := "the disk " + name + " is not of a claim that other pods can name, so no other VM can share it; leave out shared"
		if _, of := ask.Hardware.HostDisks[name]; of {
			why = "the disk " + name + " is a file of the node; say shared in hostDisks"
		}
		errs = append(errs, field.Invalid(annotationPath(contract.KeyHardware), pod.Annotations[contract.KeyHardware], why))
	}
	return errs
}

// checkKeep refuses a pod that keeps the state of firmware on its node, unless the VM stays on that node.
func checkKeep(pod *corev1.Pod) (errs field.ErrorList) {
	ask, err := contract.ParseSticky(pod.Annotations)
	if h := hardware(pod); h != nil && h.Keep != "" && err == nil && !ask.Asked {
		errs = append(errs, field.Required(annotationPath(contract.KeySticky), "the state of the firmware is on one node, as keep in "+contract.KeyHardware+" says; the VM must stay there"))
	}
	return errs
}

// checkHugePages refuses huge pages unless they are the memory of the VM.
func checkHugePages(pod *corev1.Pod) (errs field.ErrorList) {
	ask, _ := contract.ParseMachine(pod.Annotations)
	asked := ask.Hardware.Huge
	found := 0
	for i, c := range pod.Spec.Containers {
		at := field.NewPath("spec", "containers").Index(i).Child("resources", "limits")
		for _, size := range vm.AllHugePages {
			name := hugePages(size)
			q, ok := c.Resources.Limits[name]
			switch {
			case !ok:
			case !asked:
				errs = append(errs, field.Forbidden(at.Key(string(name)), "a container in a VM has no huge pages; they are the memory of a guest that boots itself with hugePages in the annotation "+contract.KeyHardware))
			case !q.IsZero():
				if found++; found > 1 {
					errs = append(errs, field.Forbidden(at.Key(string(name)), "the memory of a VM consists of huge pages of one size; leave one limit out"))
				}
			}
		}
		if _, both := c.Resources.Limits[corev1.ResourceMemory]; both && asked {
			errs = append(errs, field.Forbidden(at.Key(string(corev1.ResourceMemory)), "all memory of the VM is huge pages; leave it out"))
		}
	}
	if asked && found == 0 {
		errs = append(errs, field.Required(field.NewPath("spec", "containers").Index(0).Child("resources", "limits").Key(string(hugePages(vm.HugePages2M))), "say how much memory the VM has, in pages of 2Mi or 1Gi"))
	}
	return errs
}

// checkLogins refuses users that no guest can have.
func checkLogins(pod *corev1.Pod) (errs field.ErrorList) {
	ask, _ := contract.ParseMachine(pod.Annotations)
	for _, secret := range slices.Sorted(maps.Keys(ask.Logins.Keys)) {
		for _, user := range ask.Logins.Keys[secret] {
			if err := guest.ValidUser(user); err != nil {
				errs = append(errs, field.Invalid(annotationPath(contract.KeyLogins), user, err.Error()))
			}
		}
	}
	return errs
}

// checkFileDisks refuses disks for volumes that have no files, or that a container mounts.
func checkFileDisks(pod *corev1.Pod) (errs field.ErrorList) {
	ask, _ := contract.ParseMachine(pod.Annotations)
	for _, name := range slices.Sorted(maps.Keys(ask.FileDisks)) {
		var why string
		at := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
		switch {
		case at < 0:
			why = "is no volume of the pod"
		case len(partsOf(pod, name)) == 0:
			why = "has no files of its own; use a configMap, secret, downwardAPI or projected volume"
		case slices.ContainsFunc(containers(pod), func(c *corev1.Container) bool { return uses(c, name) }):
			why = "is mounted by a container; leave out the mount or the disk"
		default:
			continue
		}
		errs = append(errs, field.Invalid(annotationPath(contract.KeyFileDisks), pod.Annotations[contract.KeyFileDisks], "volume "+name+" "+why))
	}
	return errs
}
