package kubevirt

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// added is what virtctl sends if it is only told the claim.
func added(change func(*v1.AddVolumeOptions)) *v1.AddVolumeOptions {
	o := &v1.AddVolumeOptions{
		Name: "data", Disk: &v1.Disk{DiskDevice: v1.DiskDevice{Disk: &v1.DiskTarget{Bus: v1.DiskBusSCSI}}, Serial: "data"},
		VolumeSource: &v1.HotplugVolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{
			PersistentVolumeClaimVolumeSource: corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim"}, Hotpluggable: true,
		}},
	}
	if change != nil {
		change(o)
	}
	return o
}

func TestHotplug(t *testing.T) {
	order := uint(1)
	for name, c := range map[string]struct {
		change   func(*v1.AddVolumeOptions)
		refused  string
		warnings string
	}{
		"as virtctl":         {warnings: "disk.serial has no effect: the node decides about the serial number"},
		"virtio":             {change: func(o *v1.AddVolumeOptions) { o.Disk.Disk.Bus = v1.DiskBusVirtio }, warnings: "disk.disk.bus has no effect: the disk is on SCSI until the VM starts again; disk.serial has no effect"},
		"no serial":          {change: func(o *v1.AddVolumeOptions) { o.Disk.Serial = "" }},
		"a disk of no kind":  {change: func(o *v1.AddVolumeOptions) { o.Disk.Disk = nil }, warnings: "disk.serial has no effect"},
		"a cache":            {change: func(o *v1.AddVolumeOptions) { o.Disk.Serial, o.Disk.Cache = "", v1.CacheNone }, warnings: "disk.cache has no effect: the node decides about caches"},
		"another serial":     {change: func(o *v1.AddVolumeOptions) { o.Disk.Serial = "1234" }, refused: "disk.serial: Forbidden: the node decides about the serial number"},
		"SATA":               {change: func(o *v1.AddVolumeOptions) { o.Disk.Disk.Bus = v1.DiskBusSATA }, refused: `disk.disk.bus: Unsupported value: "sata": supported values: "virtio", "scsi"`},
		"a LUN":              {change: func(o *v1.AddVolumeOptions) { o.Disk.Disk, o.Disk.LUN = nil, &v1.LunTarget{Bus: v1.DiskBusSCSI} }, refused: "disk.lun.bus: Forbidden: SCSI commands of a guest reach no device of its node"},
		"a CD":               {change: func(o *v1.AddVolumeOptions) { o.Disk.Disk, o.Disk.CDRom = nil, &v1.CDRomTarget{Bus: v1.DiskBusSATA} }, refused: "disk.cdrom: Forbidden"},
		"a boot order":       {change: func(o *v1.AddVolumeOptions) { o.Disk.BootOrder = &order }, refused: "disk.bootOrder: Forbidden: the guest boots from its containerDisk"},
		"shared":             {change: func(o *v1.AddVolumeOptions) { o.Disk.Shareable = new(true) }, refused: "disk.shareable: Forbidden: a volume that is added to a running VM belongs to it alone; give"},
		"read-only":          {change: func(o *v1.AddVolumeOptions) { o.Disk.Disk.ReadOnly = true }, refused: "disk.disk.readonly: Forbidden"},
		"a read-only claim":  {change: func(o *v1.AddVolumeOptions) { o.VolumeSource.PersistentVolumeClaim.ReadOnly = true }, refused: "volumeSource.persistentVolumeClaim.readOnly: Forbidden"},
		"no name":            {change: func(o *v1.AddVolumeOptions) { o.Name = "" }, refused: "name: Required"},
		"a long name":        {change: func(o *v1.AddVolumeOptions) { o.Name = strings.Repeat("n", 64) }, refused: "name: Invalid value"},
		"an upper-case name": {change: func(o *v1.AddVolumeOptions) { o.Name, o.Disk.Serial = "Data", "" }, refused: "name: Invalid value"},
		"no disk":            {change: func(o *v1.AddVolumeOptions) { o.Disk = nil }, refused: "disk: Required"},
		"no source":          {change: func(o *v1.AddVolumeOptions) { o.VolumeSource = nil }, refused: "volumeSource: Required"},
		"an empty source":    {change: func(o *v1.AddVolumeOptions) { o.VolumeSource = &v1.HotplugVolumeSource{} }, refused: "volumeSource.persistentVolumeClaim: Required"},
		"no claim":           {change: func(o *v1.AddVolumeOptions) { o.VolumeSource.PersistentVolumeClaim.ClaimName = "" }, refused: "volumeSource.persistentVolumeClaim.claimName: Required"},
		"a DataVolume": {change: func(o *v1.AddVolumeOptions) {
			o.Disk.Serial, o.VolumeSource = "", &v1.HotplugVolumeSource{DataVolume: &v1.DataVolumeSource{Name: "data"}}
		}},
		"no DataVolume": {change: func(o *v1.AddVolumeOptions) {
			o.VolumeSource = &v1.HotplugVolumeSource{DataVolume: &v1.DataVolumeSource{}}
		}, refused: "volumeSource.dataVolume.name: Required"},
		"a DataVolume and a claim": {change: func(o *v1.AddVolumeOptions) {
			o.VolumeSource.DataVolume = &v1.DataVolumeSource{Name: "data"}
		}, refused: "volumeSource.dataVolume: Forbidden"},
	} {
		volume, disk, errs, warnings := Hotplug(added(c.change))
		if c.refused != "" {
			if len(errs) == 0 || !strings.Contains(errs.ToAggregate().Error(), c.refused) {
				t.Errorf("%s: %v, want %s", name, errs, c.refused)
			}
			continue
		}
		if len(errs) > 0 || !strings.HasPrefix(strings.Join(warnings, "; "), c.warnings) || c.warnings == "" && len(warnings) > 0 {
			t.Errorf("%s: %v, %q", name, errs, warnings)
		}
		if volume.Name != "data" || !Hotpluggable(&volume) || disk.Name != "data" || disk.Disk.Bus != v1.DiskBusVirtio || disk.Serial != "" {
			t.Errorf("%s: %+v, %+v", name, volume, disk)
		}
		whole := spec(t, cirros)
		whole.Volumes, whole.Domain.Devices.Disks = append(whole.Volumes, volume), append(whole.Domain.Devices.Disks, disk)
		if errs, _ := Check(whole, nil); len(errs) > 0 {
			t.Errorf("%s: a machine with it is refused: %v", name, errs)
		}
	}
}

func TestHotplugged(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "virt-launcher-web", UID: "pod", Annotations: map[string]string{
		contract.KeyVolumes: "new=a,bound=b,sent=c,there=d,moved=f",
		contract.KeyPlugged: contract.PluggedText([]contract.Plugged{
			{Volume: "there", Claim: "d", ID: "1", Serial: "vol-1", Why: "an old reason"},
			{Volume: "bound", Claim: "b", Why: "it is not bound"},
			{Volume: "sent", Claim: "c", ID: "2"},
			{Volume: "gone", Claim: "e", ID: "3", Serial: "vol-3", Why: "it is in use"},
			{Volume: "moved", Claim: "d", ID: "4"},
		}),
	}}}
	status := func(name, claim string, phase v1.VolumePhase, reason, message string) v1.VolumeStatus {
		return v1.VolumeStatus{
			Name: name, Phase: phase, Reason: reason, Message: message, PersistentVolumeClaimInfo: &v1.PersistentVolumeClaimInfo{ClaimName: claim},
			HotplugVolume: &v1.HotplugVolumeStatus{AttachPodName: "virt-launcher-web", AttachPodUID: "pod"},
		}
	}
	want := []v1.VolumeStatus{
		status("bound", "b", v1.VolumePending, "VolumePlugFailed", "it is not bound"),
		status("gone", "e", v1.HotplugVolumeDetaching, "VolumeUnplugFailed", "it is in use"),
		status("moved", "d", v1.HotplugVolumeDetaching, "", ""),
		status("new", "a", v1.VolumePending, "", ""),
		status("sent", "c", v1.HotplugVolumeAttachedToNode, "", ""),
		status("there", "d", v1.VolumeReady, "VolumeReady", "the guest has the disk with the serial number vol-1"),
	}
	is := hotplugged(pod)
	if d := diff.Of(want, is); d != "" {
		t.Error(d)
	}
	if got := hotplugged(&corev1.Pod{}); got != nil {
		t.Errorf("a pod without volumes has %v", got)
	}
	if d := diff.Of([]VolumeChange{
		{"VolumePlugFailed", "volume bound: it is not bound", true},
		{"VolumeUnplugFailed", "volume gone: it is in use", true},
		{"VolumeReady", "volume there: the guest has the disk with the serial number vol-1", false},
	}, VolumeChanges(nil, is)); d != "" {
		t.Error(d)
	}
	if got := VolumeChanges(is, is); got != nil {
		t.Errorf("nothing has changed, and that is told: %v", got)
	}
	if d := diff.Of([]VolumeChange{{Reason: "VolumeUnplugged", Text: "volume there is removed"}}, VolumeChanges(is, is[:5])); d != "" {
		t.Error(d)
	}
}
