package kubevirt

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
)

func required(value string, at *field.Path) (errs field.ErrorList) {
	if value == "" {
		errs = append(errs, field.Required(at, ""))
	}
	return errs
}

// nodeSerial is why a volume that is added has no serial number of the request.
const nodeSerial = "the node decides about the serial number of a volume that is added"

// Hotplug returns the volume and the disk that a request asks to add. The disk is on SCSI as long as the VM runs, and on virtio from its
// next start; virtctl asks for SCSI if nobody says anything. The serial number must be the name, which is what virtctl asks for then, and
// has no effect.
func Hotplug(o *v1.AddVolumeOptions) (volume v1.Volume, disk v1.Disk, errs field.ErrorList, warnings []string) {
	source, at := field.NewPath("volumeSource"), field.NewPath("disk")
	switch {
	case o.Name == "":
		errs = append(errs, field.Required(field.NewPath("name"), ""))
	case o.Disk == nil:
		errs = append(errs, field.Required(at, ""))
	case o.VolumeSource == nil:
		errs = append(errs, field.Required(source, ""))
	case o.VolumeSource.DataVolume != nil && o.VolumeSource.PersistentVolumeClaim != nil:
		errs = append(errs, field.Forbidden(source.Child("dataVolume"), "use either a dataVolume or a persistentVolumeClaim"))
	case o.VolumeSource.DataVolume != nil:
		errs = append(errs, required(o.VolumeSource.DataVolume.Name, source.Child("dataVolume", "name"))...)
	case o.VolumeSource.PersistentVolumeClaim == nil:
		errs = append(errs, field.Required(source.Child("persistentVolumeClaim"), ""))
	case o.VolumeSource.PersistentVolumeClaim.ReadOnly:
		errs = append(errs, field.Forbidden(source.Child("persistentVolumeClaim", "readOnly"), "the guest can write to a volume that is added"))
	}
	if len(errs) > 0 {
		return volume, disk, errs, nil
	}
	volume = v1.Volume{Name: o.Name}
	if d := o.VolumeSource.DataVolume; d != nil {
		volume.DataVolume = &v1.DataVolumeSource{Name: d.Name, Hotpluggable: true}
	} else {
		claim := *o.VolumeSource.PersistentVolumeClaim
		claim.Hotpluggable = true
		volume.PersistentVolumeClaim = &claim
	}
	disk = *o.Disk.DeepCopy()
	disk.Name = o.Name
	if disk.Disk == nil && disk.LUN == nil && disk.CDRom == nil {
		disk.Disk = &v1.DiskTarget{}
	}
	if t := disk.Disk; t != nil && t.Bus == v1.DiskBusVirtio {
		warnings = append(warnings, ineffective(at.Child("disk", "bus"), "the disk is on SCSI until the VM starts again"))
	} else if t != nil && (t.Bus == v1.DiskBusSCSI || t.Bus == "") {
		t.Bus = v1.DiskBusVirtio
	}
	if t := disk.Disk; t != nil && t.Bus != v1.DiskBusVirtio {
		errs = append(errs, field.NotSupported(at.Child("disk", "bus"), t.Bus, []v1.DiskBus{v1.DiskBusVirtio, v1.DiskBusSCSI}))
	} else if t != nil && t.ReadOnly {
		errs = append(errs, field.Forbidden(at.Child("disk", "readonly"), "the guest can write to a volume that is added"))
	}
	if disk.CDRom != nil {
		errs = append(errs, field.Forbidden(at.Child("cdrom"), "a volume that is added is a disk; use disk"))
	}
	switch disk.Serial {
	case "":
	case o.Name:
		warnings = append(warnings, ineffective(at.Child("serial"), nodeSerial))
	default:
		errs = append(errs, field.Forbidden(at.Child("serial"), nodeSerial+"; leave it out"))
	}
	disk.Serial = ""
	if shareable(disk) {
		errs = append(errs, field.Forbidden(at.Child("shareable"), "a volume that is added to a running VM belongs to it alone; give the disk to the machine in its template, and start it again"))
	}
	disk.Shareable = nil
	spec := &v1.VirtualMachineInstanceSpec{Volumes: []v1.Volume{volume}, Domain: v1.DomainSpec{Devices: v1.Devices{Disks: []v1.Disk{disk}}}}
	judged, more := rules.judge(spec, nil)
	c := check{spec: spec, at: field.NewPath("spec")}
	c.disks()
	c.volumes()
	places := strings.NewReplacer("spec.", "", "domain.devices.disks[0]", "disk", "volumes[0].name", "name", "volumes[0]", "volumeSource")
	for _, e := range append(judged, c.errs...) {
		if e.Field != "spec.volumes" { // it is no whole machine
			e.Field = places.Replace(e.Field)
			errs = append(errs, e)
		}
	}
	for _, w := range more {
		warnings = append(warnings, places.Replace(w))
	}
	return volume, disk, errs, warnings
}

// hotplugged returns what is known of the volumes that were added to the VM of pod while it ran, in the order of their names.
func hotplugged(pod *corev1.Pod) (out []v1.VolumeStatus) {
	wants, err := contract.ParseVolumes(pod.Annotations)
	plugged := contract.ParsePlugged(pod.Annotations)
	add := func(p contract.Plugged, phase v1.VolumePhase, failure string) {
		s := v1.VolumeStatus{
			Name: p.Volume, Phase: phase, Message: p.Why, PersistentVolumeClaimInfo: &v1.PersistentVolumeClaimInfo{ClaimName: p.Claim},
			HotplugVolume: &v1.HotplugVolumeStatus{AttachPodName: pod.Name, AttachPodUID: pod.UID},
		}
		if p.Why != "" {
			s.Reason = failure
		}
		if phase == v1.VolumeReady {
			s.Reason, s.Message = ReasonVolumeReady, "the guest has the disk with the serial number "+p.Serial
		}
		out = append(out, s)
	}
	for _, p := range plugged {
		claim, wanted := wants[p.Volume]
		switch {
		case (!wanted || claim != p.Claim) && err == nil:
			add(p, v1.HotplugVolumeDetaching, ReasonUnplugFailed)
		case p.Serial != "":
			add(p, v1.VolumeReady, "")
		case p.ID != "":
			add(p, v1.HotplugVolumeAttachedToNode, ReasonPlugFailed)
		default:
			add(p, v1.VolumePending, ReasonPlugFailed)
		}
	}
	for name, claim := range wants {
		if !slices.ContainsFunc(plugged, func(p contract.Plugged) bool { return p.Volume == name }) {
			add(contract.Plugged{Volume: name, Claim: claim}, v1.VolumePending, "")
		}
	}
	slices.SortStableFunc(out, func(a, b v1.VolumeStatus) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// Reasons of the status of a volume that was added.
const (
	ReasonVolumeReady  = "VolumeReady"
	ReasonPlugFailed   = "VolumePlugFailed"
	ReasonUnplugFailed = "VolumeUnplugFailed"
	ReasonUnplugged    = "VolumeUnplugged" // of an Event
)

// IsHotplugged reports whether the volume was added to the instance while it ran.
func IsHotplugged(vmi *v1.VirtualMachineInstance, volume string) bool {
	return slices.ContainsFunc(vmi.Status.VolumeStatus, func(s v1.VolumeStatus) bool { return s.Name == volume && s.HotplugVolume != nil })
}

// Without returns spec without the volume and its disk. It shares the rest.
func Without(spec v1.VirtualMachineInstanceSpec, volume string) v1.VirtualMachineInstanceSpec {
	spec.Volumes = slices.DeleteFunc(slices.Clone(spec.Volumes), func(v v1.Volume) bool { return v.Name == volume })
	spec.Domain.Devices.Disks = slices.DeleteFunc(slices.Clone(spec.Domain.Devices.Disks), func(d v1.Disk) bool { return d.Name == volume })
	return spec
}

// VolumeChange is a change of the status of a volume that people want to hear of.
type VolumeChange struct {
	Reason, Text string
	Failed       bool
}

// VolumeChanges compares what was known of the volumes of an instance with what is known now.
func VolumeChanges(was, is []v1.VolumeStatus) (out []VolumeChange) {
	find := func(list []v1.VolumeStatus, name string) *v1.VolumeStatus {
		for i := range list {
			if list[i].Name == name && list[i].HotplugVolume != nil {
				return &list[i]
			}
		}
		return nil
	}
	for _, s := range is {
		old := find(was, s.Name)
		if s.HotplugVolume == nil || old != nil && old.Reason == s.Reason && old.Message == s.Message || s.Reason == "" {
			continue
		}
		out = append(out, VolumeChange{s.Reason, "volume " + s.Name + ": " + s.Message, s.Phase != v1.VolumeReady})
	}
	for _, s := range was {
		if s.HotplugVolume != nil && find(is, s.Name) == nil {
			out = append(out, VolumeChange{Reason: ReasonUnplugged, Text: "volume " + s.Name + " is removed"})
		}
	}
	return out
}
