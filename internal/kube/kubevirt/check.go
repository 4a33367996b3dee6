package kubevirt

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// Check returns an error for each setting of spec that Cocoon refuses, and a sentence for each that has no effect. at is the path of
// spec in its object.
func Check(spec *v1.VirtualMachineInstanceSpec, at *field.Path) (errs field.ErrorList, warnings []string) {
	errs, warnings = rules.judge(spec, at)
	c := check{spec: spec, at: at}
	c.machine()
	c.firmware()
	c.disks()
	c.volumes()
	c.interfaces()
	c.credentials()
	return append(errs, c.errs...), warnings
}

// CheckInstance is Check for a whole instance.
func CheckInstance(vmi *v1.VirtualMachineInstance) (errs field.ErrorList, warnings []string) {
	errs, warnings = Check(&vmi.Spec, field.NewPath("spec"))
	return append(errs, checkAnnotations(vmi.Annotations, field.NewPath("metadata"))...), warnings
}

// hooks is the annotation of KubeVirt that names containers which change the machine before it starts.
const hooks = "hooks.kubevirt.io/hookSidecars"

// checkAnnotations refuses annotations of an instance that ask for what its VM cannot have.
func checkAnnotations(annotations map[string]string, meta *field.Path) (errs field.ErrorList) {
	if _, ok := annotations[hooks]; ok {
		errs = append(errs, field.Forbidden(meta.Child("annotations").Key(hooks), "no container runs beside a VM of Cocoon"))
	}
	invalid := func(key, why string) {
		errs = append(errs, field.Invalid(meta.Child("annotations").Key(key), annotations[key], why))
	}
	if _, err := contract.ParseSticky(annotations); err != nil {
		invalid(contract.KeySticky, err.Error())
	}
	rate, err := contract.ParseDiskRate(annotations)
	bad, _ := errors.AsType[contract.Errors](err)
	for _, one := range bad {
		invalid(one.Key, one.Error())
	}
	if err := (vm.DiskRate{Bytes: rate.Bytes}).Validate(); err != nil {
		invalid(contract.KeyDiskBandwidth, err.Error())
	}
	if err := (vm.DiskRate{Ops: rate.Ops}).Validate(); err != nil {
		invalid(contract.KeyDiskIOPS, err.Error())
	}
	if policy, err := contract.ParseEvictionPolicy(annotations); err != nil {
		invalid(contract.KeyEvictionPolicy, err.Error())
	} else if policy == contract.EvictHibernate {
		invalid(contract.KeyEvictionPolicy, "a VirtualMachine does not hibernate; use shutdown, delete or refuse")
	}
	return errs
}

// CheckMachine is Check for a whole machine that builds on base.
func CheckMachine(vm *v1.VirtualMachine, base Base) (errs field.ErrorList, warnings []string) {
	spec, at := &vm.Spec, field.NewPath("spec")
	no := func(when bool, name, why string) {
		if when {
			errs = append(errs, field.Forbidden(at.Child(name), why))
		}
	}
	no(spec.Running != nil && spec.RunStrategy != nil, "running", "use either running or runStrategy")
	if spec.Running == nil && spec.RunStrategy == nil {
		errs = append(errs, field.Required(at.Child("runStrategy"), "say when the machine runs, such as Always or Halted"))
	}
	if spec.RunStrategy != nil && !slices.Contains(strategies, *spec.RunStrategy) {
		errs = append(errs, field.NotSupported(at.Child("runStrategy"), *spec.RunStrategy, strategies))
	}
	errs = append(errs, checkTemplates(vm, at.Child("dataVolumeTemplates"))...)
	no(spec.UpdateVolumesStrategy != nil, "updateVolumesStrategy", "volumes of a VM cannot be replaced while it runs")
	if spec.Template == nil {
		return append(errs, field.Required(at.Child("template"), "")), nil
	}
	whole, more, warnings := Unfold(vm, base)
	errs = append(errs, more...)
	template := at.Child("template")
	errs = append(errs, checkAnnotations(whole.Spec.Template.ObjectMeta.Annotations, template.Child("metadata"))...)
	more, ignored := Check(&whole.Spec.Template.Spec, template.Child("spec"))
	return append(errs, base.attribute(more)...), append(warnings, ignored...)
}

var strategies = []v1.VirtualMachineRunStrategy{v1.RunStrategyAlways, v1.RunStrategyHalted, v1.RunStrategyManual, v1.RunStrategyRerunOnFailure, v1.RunStrategyOnce}

// check collects errors about the values of fields that are honoured.
type check struct {
	spec *v1.VirtualMachineInstanceSpec
	at   *field.Path
	errs field.ErrorList
}

func (c *check) invalid(at *field.Path, value any, why string) {
	c.errs = append(c.errs, field.Invalid(at, value, why))
}

// only refuses value unless it is one of those that are supported.
func only[T ~string](c *check, at *field.Path, value T, supported ...T) {
	if !slices.Contains(supported, value) {
		c.errs = append(c.errs, field.NotSupported(at, value, slices.DeleteFunc(supported, func(s T) bool { return s == "" })))
	}
}

// flag refuses a value of a flag; nil is the default, which is never refused.
func (c *check) flag(at *field.Path, value *bool, refused bool, why string) {
	if value != nil && *value == refused {
		c.errs = append(c.errs, field.Forbidden(at, why))
	}
}

// probe refuses a probe without an action, and one with several.
func (c *check) probe(name string, p *v1.Probe) {
	if p == nil {
		return
	}
	n := 0
	for _, is := range []bool{p.Exec != nil, p.HTTPGet != nil, p.TCPSocket != nil, p.GuestAgentPing != nil} {
		if is {
			n++
		}
	}
	if n != 1 {
		c.invalid(c.at.Child(name), n, "give one of exec, httpGet, tcpSocket and guestAgentPing")
	}
}

func (c *check) machine() {
	s, domain := c.spec, c.at.Child("domain")
	only(c, c.at.Child("architecture"), s.Architecture, "", architecture)
	if s.StartStrategy != nil {
		only(c, c.at.Child("startStrategy"), *s.StartStrategy, v1.StartStrategyPaused)
		if p := s.LivenessProbe; p != nil && p.GuestAgentPing == nil {
			c.invalid(c.at.Child("startStrategy"), *s.StartStrategy, "a VM with a livenessProbe cannot start paused; leave one of them out")
		}
	}
	c.probe("livenessProbe", s.LivenessProbe)
	c.probe("readinessProbe", s.ReadinessProbe)
	if s.Hostname != "" {
		for _, why := range validation.IsDNS1123Label(s.Hostname) {
			c.invalid(c.at.Child("hostname"), s.Hostname, why)
		}
	}
	if m := s.Domain.Machine; m != nil && m.Type != "" && !supportedMachine(m.Type) {
		c.errs = append(c.errs, field.NotSupported(domain.Child("machine", "type"), m.Type, []string{"q35"}))
	}
	if s.Domain.RebootPolicy != nil {
		only(c, domain.Child("rebootPolicy"), *s.Domain.RebootPolicy, v1.RebootPolicyReboot)
	}
	if f := s.Domain.Features; f != nil {
		c.flag(domain.Child("features", "acpi", "enabled"), f.ACPI.Enabled, false, "a VM has ACPI, by which it is asked to shut down")
	}
	c.cpu()
	if n := cpus(s); n > maxCPUs {
		c.invalid(domain.Child("cpu"), n, fmt.Sprintf("is more than %d CPUs", maxCPUs))
	}
	c.memory(domain)
	c.growth()
	devices, d := domain.Child("devices"), s.Domain.Devices
	c.flag(devices.Child("autoattachPodInterface"), d.AutoattachPodInterface, false, "a VM has the network of pods")
	c.flag(devices.Child("autoattachSerialConsole"), d.AutoattachSerialConsole, false, "a VM has a serial console")
	c.flag(devices.Child("logSerialConsole"), d.LogSerialConsole, false, "the output of the console is kept, for kubectl logs")
	c.flag(devices.Child("autoattachInputDevice"), d.AutoattachInputDevice, true, noInputs)
	if w := d.Watchdog; w != nil && w.I6300ESB != nil {
		only(c, devices.Child("watchdog", "i6300esb", "action"), w.I6300ESB.Action, "", v1.WatchdogActionReset, v1.WatchdogActionPoweroff, v1.WatchdogActionShutdown)
	}
	if v := d.Video; v != nil {
		only(c, devices.Child("video", "type"), v.Type, "", videoType)
		if !graphics(c.spec) {
			c.errs = append(c.errs, field.Forbidden(devices.Child("video"), "a VM without graphics has no video device; remove one of them"))
		}
	}
}

// noInputs is why a VM has no other input devices.
const noInputs = "a VM with graphics has a keyboard and a mouse, and no other input devices"

func (c *check) memory(domain *field.Path) {
	s := c.spec.Domain
	size, ok := memory(c.spec)
	if !ok {
		c.errs = append(c.errs, field.Required(domain.Child("memory", "guest"), "a VM needs memory, such as 256Mi"))
		return
	}
	if size < vm.MinMemory {
		c.invalid(domain.Child("memory", "guest"), size, fmt.Sprintf("is less than %d MiB", vm.MinMemory>>20))
	}
	if s.Memory != nil && s.Memory.Hugepages != nil {
		asked := s.Memory.Hugepages.PageSize
		if p, ok := pageSize(asked); !ok {
			c.invalid(domain.Child("memory", "hugepages", "pageSize"), asked, "huge pages have 2Mi or 1Gi")
		} else if size%int64(p) != 0 {
			c.invalid(domain.Child("memory", "guest"), size, "is no multiple of hugepages.pageSize")
		}
	}
	limit, limited := s.Resources.Limits[corev1.ResourceMemory]
	if limited && size > limit.Value() {
		c.invalid(domain.Child("memory", "guest"), size, "is more than resources.limits.memory")
	}
	if request, ok := s.Resources.Requests[corev1.ResourceMemory]; ok && limited && request.Cmp(limit) > 0 {
		c.invalid(domain.Child("resources", "requests", "memory"), request.String(), "is more than the limit")
	}
	for what, list := range map[string]corev1.ResourceList{"requests": s.Resources.Requests, "limits": s.Resources.Limits} {
		for name := range list {
			if name != corev1.ResourceMemory && name != corev1.ResourceCPU {
				c.errs = append(c.errs, field.Forbidden(domain.Child("resources", what).Key(string(name)), "a VM has cpu and memory only"))
			}
		}
	}
}

// disks checks that disks and volumes are pairs, and what disks are like.
func (c *check) disks() {
	volumes, dumps := map[string]bool{}, map[string]bool{}
	for _, v := range c.spec.Volumes {
		volumes[v.Name], dumps[v.Name] = true, v.MemoryDump != nil
	}
	seen, orders, used, serials := map[string]bool{}, map[uint]bool{}, map[string]int{}, map[string]bool{}
	for i, d := range c.spec.Domain.Devices.Disks {
		at := c.at.Child("domain", "devices", "disks").Index(i)
		if seen[d.Name] {
			c.errs = append(c.errs, field.Duplicate(at.Child("name"), d.Name))
		}
		if !volumes[d.Name] {
			c.errs = append(c.errs, field.NotFound(at.Child("name"), d.Name))
		}
		seen[d.Name] = true
		if dumps[d.Name] {
			c.errs = append(c.errs, field.Forbidden(at, "the volume memoryDump is no disk; leave the disk out"))
		}
		c.device(d, at)
		c.shareable(d, at)
		if d.Serial != "" && serials[d.Serial] {
			c.errs = append(c.errs, field.Duplicate(at.Child("serial"), d.Serial))
		}
		serials[d.Serial] = true
		if bus := device(d).Bus; bus != "" {
			used[bus]++
			if most := vm.BusRoom(vm.DiskBus(bus)); most > 0 && used[bus] == most+1 {
				c.errs = append(c.errs, field.TooMany(at, used[bus], most))
			}
		}
		if d.BootOrder != nil {
			if *d.BootOrder == 0 {
				c.invalid(at.Child("bootOrder"), 0, "must be at least 1")
			}
			if orders[*d.BootOrder] {
				c.errs = append(c.errs, field.Duplicate(at.Child("bootOrder"), *d.BootOrder))
			}
			orders[*d.BootOrder] = true
			if root := rootVolume(c.spec); volumes[d.Name] && (root == nil || root.Name != d.Name) {
				c.errs = append(c.errs, field.Forbidden(at.Child("bootOrder"), "the guest boots from its containerDisk, or else from its first claim or hostDisk"))
			}
		}
	}
}

// device checks by which device the guest sees a disk.
func (c *check) device(d v1.Disk, at *field.Path) {
	if d.Disk != nil && d.CDRom != nil {
		c.errs = append(c.errs, field.Forbidden(at, "a disk is one device; remove disk or cdrom"))
		return
	}
	switch {
	case d.Disk != nil:
		only(c, at.Child("disk", "bus"), d.Disk.Bus, "", v1.DiskBusVirtio, v1.DiskBusSATA, v1.DiskBusSCSI, v1.DiskBusUSB)
		if d.Disk.ReadOnly && d.Disk.Bus == v1.DiskBusSATA {
			c.errs = append(c.errs, field.Forbidden(at.Child("disk", "readonly"), "a disk on sata cannot be read-only; use a cdrom, or another bus"))
		}
	case d.CDRom != nil:
		only(c, at.Child("cdrom", "bus"), d.CDRom.Bus, "", v1.DiskBusSATA, v1.DiskBusSCSI, v1.DiskBusUSB)
		c.flag(at.Child("cdrom", "readonly"), d.CDRom.ReadOnly, false, "a CD-ROM is read-only")
		only(c, at.Child("cdrom", "tray"), d.CDRom.Tray, "", v1.TrayStateClosed)
	}
	if err := vm.ValidateDiskSerial(d.Serial); err != nil {
		c.invalid(at.Child("serial"), d.Serial, err.Error())
	}
	if b := d.BlockSize; b != nil && b.Custom != nil {
		dev := device(d)
		if dev.Blocks == (contract.Blocks{}) {
			c.errs = append(c.errs, field.Required(at.Child("blockSize", "custom"), "give logical and physical, such as 4096"))
		} else if err := (vm.DiskDevice{Bus: vm.DiskBus(dev.Bus), CDROM: dev.CDROM, Blocks: vm.Blocks(dev.Blocks)}).ValidateBlocks(); err != nil {
			c.invalid(at.Child("blockSize", "custom"), dev.Blocks.Logical, err.Error())
		}
	}
}

func (c *check) volumes() {
	at := c.at.Child("volumes")
	disks, seeds := 0, 0
	seen := map[string]bool{}
	for i, v := range c.spec.Volumes {
		at := at.Index(i)
		if seen[v.Name] {
			c.errs = append(c.errs, field.Duplicate(at.Child("name"), v.Name))
		}
		seen[v.Name] = true
		for _, why := range validation.IsDNS1123Label(v.Name) {
			c.invalid(at.Child("name"), v.Name, why)
		}
		if n := sources(v.VolumeSource); n != 1 {
			c.invalid(at, v.Name, fmt.Sprintf("has %d sources; it must have one", n))
		}
		if v.ContainerDisk != nil {
			disks++
			if v.ContainerDisk.Image == "" {
				c.errs = append(c.errs, field.Required(at.Child("containerDisk", "image"), ""))
			}
			if disks == 2 {
				c.errs = append(c.errs, field.Forbidden(at.Child("containerDisk"), "a VM has one containerDisk"))
			}
		}
		if d := v.EmptyDisk; d != nil && d.Capacity.Sign() <= 0 {
			c.invalid(at.Child("emptyDisk", "capacity"), d.Capacity.String(), "must be more than 0, such as 1Gi")
		}
		if d := v.PersistentVolumeClaim; d != nil {
			if d.ClaimName == "" {
				c.errs = append(c.errs, field.Required(at.Child("persistentVolumeClaim", "claimName"), ""))
			}
		}
		if v.Ephemeral != nil && CopiedClaim(&v) == "" {
			c.errs = append(c.errs, field.Required(at.Child("ephemeral", "persistentVolumeClaim", "claimName"), ""))
		}
		if d := v.DataVolume; d != nil && d.Name == "" {
			c.errs = append(c.errs, field.Required(at.Child("dataVolume", "name"), ""))
		}
		c.hostDisk(v.HostDisk, at.Child("hostDisk"))
		c.files(v, at)
		if seed, name := cloudInit(v); seed != nil {
			seeds++
			if seeds == 2 {
				c.errs = append(c.errs, field.Forbidden(at.Child(name), "a VM has one source of cloud-init"))
			}
			c.seed(seed, at.Child(name))
		}
	}
	if rootVolume(c.spec) == nil && kernelBoot(c.spec) == nil {
		c.errs = append(c.errs, field.Required(at, "a VM boots from a containerDisk, a dataVolume, a persistentVolumeClaim or a hostDisk, or by kernelBoot"))
	}
}

// rootVolume returns the volume from which the guest boots; nil if there is none. That is its containerDisk. An instance without one boots from a
// file of its node or a claim that is not hotpluggable, and so never from one that was added: the disk with the lowest bootOrder, or else the first.
func rootVolume(s *v1.VirtualMachineInstanceSpec) *v1.Volume {
	claims := map[string]*v1.Volume{}
	var first *v1.Volume
	for i := range s.Volumes {
		v := &s.Volumes[i]
		switch {
		case v.ContainerDisk != nil:
			return v
		case (v.PersistentVolumeClaim != nil || v.DataVolume != nil || v.Ephemeral != nil || v.HostDisk != nil) && !Hotpluggable(v):
			claims[v.Name] = v
			if first == nil {
				first = v
			}
		}
	}
	order := func(d v1.Disk) uint {
		if d.BootOrder == nil {
			return math.MaxUint
		}
		return *d.BootOrder
	}
	var root *v1.Volume
	lowest := uint(math.MaxUint)
	for _, d := range s.Domain.Devices.Disks {
		if v := claims[d.Name]; v != nil && (root == nil || order(d) < lowest) {
			root, lowest = v, order(d)
		}
	}
	if root == nil { // as in KubeVirt, a volume that no disk names is a disk, too
		root = first
	}
	return root
}

// dataDisk reports whether v is a disk of the volume store. As in KubeVirt, a volume that no disk names is one, too.
func dataDisk(v v1.Volume) bool {
	return v.EmptyDisk != nil || v.PersistentVolumeClaim != nil || v.DataVolume != nil || v.Ephemeral != nil
}

// sources counts the sources of a volume.
func sources(s v1.VolumeSource) (n int) {
	v := reflect.ValueOf(s)
	for i := range v.NumField() {
		if f := v.Field(i); f.Kind() == reflect.Pointer && !f.IsNil() {
			n++
		}
	}
	return n
}

const maxCPUs = 255 // as a pod may ask for

// cpus returns how many CPUs the guest has: as its topology says, else its limit, else its request.
func cpus(s *v1.VirtualMachineInstanceSpec) int64 {
	if c := s.Domain.CPU; c != nil && c.Sockets|c.Cores|c.Threads != 0 {
		n := int64(1)
		for _, f := range []uint32{c.Sockets, c.Cores, c.Threads} {
			if f > 0 {
				n *= min(int64(f), math.MaxInt16)
			}
		}
		return n
	}
	for _, list := range []corev1.ResourceList{s.Domain.Resources.Limits, s.Domain.Resources.Requests} {
		if q, ok := list[corev1.ResourceCPU]; ok && !q.IsZero() {
			return max(q.Value(), 1)
		}
	}
	return 1
}

// memory returns the size of the guest's memory in bytes: as it says, else its request, else its limit.
func memory(s *v1.VirtualMachineInstanceSpec) (int64, bool) {
	if m := s.Domain.Memory; m != nil && m.Guest != nil {
		return m.Guest.Value(), true
	}
	for _, list := range []corev1.ResourceList{s.Domain.Resources.Requests, s.Domain.Resources.Limits} {
		if q, ok := list[corev1.ResourceMemory]; ok && !q.IsZero() {
			return q.Value(), true
		}
	}
	return 0, false
}
