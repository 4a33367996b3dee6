package convert

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// Volumes whose files are disks: the VM has them without a mount, and nobody updates them.
func TestFileDisks(t *testing.T) {
	volumes := []corev1.Volume{
		{Name: "cfg", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "app"}}}},
		{Name: "other", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "app"}}}},
		{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
	}
	pod := plain(annotate(contract.KeyFileDisks, "cfg=CFG"))
	pod.Spec.Volumes = append(pod.Spec.Volumes, volumes...)
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs.ToAggregate())
	}
	s := Spec(pod, Node{}, nil)
	labels := map[string]string{}
	for _, v := range s.Volumes {
		labels[v.Name] = v.Label
	}
	if d := diff.Of(map[string]string{"kube-api-access-x7": "", "cfg": "CFG"}, labels); d != "" {
		t.Error(d)
	}
	if names, _ := Live(pod); slices.Contains(names, "cfg") {
		t.Error("the files of a disk are updated")
	}
	pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "other", MountPath: "/etc/app"}}
	for value, why := range map[string]string{"none=A": "no volume of the pod", "scratch=A": "no files of its own", "other=A": "mounted by a container", "cfg": "list of NAME=LABEL"} {
		pod.Annotations[contract.KeyFileDisks] = value
		if errs := Check(pod); len(errs) != 1 || !strings.Contains(errs[0].Error(), why) {
			t.Errorf("%s: %v", value, errs)
		}
	}
}

func TestHardware(t *testing.T) {
	pod := plain(annotate(contract.KeyHardware, `{"topology": {"sockets": 1, "cores": 2, "threads": 1}, "watchdog": "reset", "disks": {"@image": {"bus": "sata"}, "@cloud-init": {"bus": "scsi", "cdrom": true}}}`, contract.KeyVirtletVCPUs, "2"))
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs.ToAggregate())
	}
	want := &vm.Hardware{
		Topology: vm.Topology{Sockets: 1, Cores: 2, Threads: 1}, Watchdog: vm.WatchdogReset,
		Disks: map[string]vm.DiskDevice{vm.DiskOfImage: {Bus: vm.DiskSATA}, vm.DiskOfSeed: {Bus: vm.DiskSCSI, CDROM: true}},
	}
	if d := diff.Of(want, Spec(pod, Node{}, nil).Hardware); d != "" {
		t.Error(d)
	}
	if got := Inherited(pod); !slices.Contains(got, contract.KeyHardware) {
		t.Errorf("a clone has no effect of %q", got)
	}
	for name, value := range map[string]string{
		"no JSON": "sata", "unknown": `{"sockets": 1}`, "topology": `{"topology": {"sockets": 3, "cores": 1, "threads": 1}}`, "bus": `{"disks": {"@image": {"bus": "ide"}}}`, "no disk": `{"disks": {"data": {"bus": "sata"}}}`,
	} {
		if errs := Check(plain(annotate(contract.KeyHardware, value, contract.KeyVirtletVCPUs, "2"))); len(errs) != 1 {
			t.Errorf("%s: %v", name, errs)
		}
	}
}

// A pod limits the disks of its VM, also of one that is a clone.
func TestDiskRate(t *testing.T) {
	pod := plain(annotate(contract.KeyDiskBandwidth, "100M", contract.KeyDiskIOPS, "1000"))
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs.ToAggregate())
	}
	want := vm.DiskRate{Bytes: 100_000_000, Ops: 1000}
	if s, c := Spec(pod, Node{}, nil), Clone(pod, Node{}); s.DiskRate != want || c.DiskRate != want || len(Inherited(pod)) > 0 {
		t.Errorf("%+v, of a clone %+v, not used: %q", s.DiskRate, c.DiskRate, Inherited(pod))
	}
	if s := Spec(plain(), Node{}, nil); s.DiskRate != (vm.DiskRate{}) {
		t.Errorf("a pod that asks for nothing: %+v", s.DiskRate)
	}
	for _, bad := range [][2]string{
		{contract.KeyDiskBandwidth, "fast"},
		{contract.KeyDiskBandwidth, "1Ki"},
		{contract.KeyDiskBandwidth, "2Ti"},
		{contract.KeyDiskBandwidth, "0"},
		{contract.KeyDiskIOPS, "1k"},
		{contract.KeyDiskIOPS, "9"},
		{contract.KeyDiskIOPS, "1000000001"},
		{contract.KeyDiskIOPS, "-1"},
	} {
		if errs := Check(plain(annotate(bad[0], bad[1]))); len(errs) != 1 || !strings.Contains(errs[0].Field, bad[0]) {
			t.Errorf("%s: %v", bad, errs)
		}
	}
}

func TestMachine(t *testing.T) {
	const uuid = "5d307ca9-b3ef-428c-8861-06e72d69f223"
	pod := plain(annotate(contract.KeyFirmware, "uefi", contract.KeyVirtletSystemUUID, strings.ToUpper(uuid), contract.KeySMBIOS, `{"serial": "1", "chassis": {"sku": "2"}}`, contract.KeyGraphics, "true"))
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs.ToAggregate())
	}
	s := Spec(pod, Node{}, nil)
	if !s.Graphics || s.Firmware != vm.FirmwareUEFI || s.SMBIOS == nil || *s.SMBIOS != (vm.SMBIOS{UUID: uuid, Serial: "1", Chassis: vm.Chassis{SKU: "2"}}) {
		t.Errorf("%q, %+v, graphics: %v", s.Firmware, s.SMBIOS, s.Graphics)
	}
	if s := Spec(plain(), Node{}, nil); s.Graphics || s.Firmware != "" || s.SMBIOS != nil {
		t.Errorf("a pod that asks for nothing: %q, %+v", s.Firmware, s.SMBIOS)
	}
	if got := Inherited(pod); len(got) < 3 || got[0] != contract.KeyFirmware || !strings.Contains(got[1], contract.KeySMBIOS) || got[2] != contract.KeyGraphics {
		t.Errorf("a clone has no effect of %q", got)
	}
	if got := Inherited(plain()); len(got) > 0 {
		t.Errorf("a clone of a plain pod has no effect of %q", got)
	}
	for name, pair := range map[string][2]string{
		"firmware": {contract.KeyFirmware, "coreboot"}, "no JSON": {contract.KeySMBIOS, "serial"}, "graphics": {contract.KeyGraphics, "vga"}, "two lines": {contract.KeySMBIOS, `{"serial": "a\nb"}`},
	} {
		if errs := Check(plain(annotate(pair[0], pair[1]))); len(errs) != 1 || !strings.Contains(errs[0].Field, pair[0]) {
			t.Errorf("%s: %v", name, errs)
		}
	}
}

func TestProbePort(t *testing.T) {
	windows := func(more ...string) func(*corev1.Pod) {
		return annotate(append([]string{contract.KeyOS, "windows"}, more...)...)
	}
	for name, tc := range map[string]struct {
		change func(*corev1.Pod)
		want   int
	}{
		"linux":                       {func(*corev1.Pod) {}, 0},
		"a port":                      {annotate(contract.KeyProbePort, "8080"), 8080},
		"windows":                     {windows(), vm.PortRDP},
		"windows with a port":         {windows(contract.KeyProbePort, "22"), 22},
		"windows by ping":             {windows(contract.KeyProbePort, "0"), 0},
		"a machine that no node runs": {windows(contract.KeyMode, "static"), 0},
		"windows with a probe of its own": {func(p *corev1.Pod) {
			windows()(p)
			p.Spec.Containers[0].ReadinessProbe = &corev1.Probe{}
		}, 0},
	} {
		if got := ProbePort(plain(tc.change)); got != tc.want {
			t.Errorf("%s: %d, want %d", name, got, tc.want)
		}
	}
}

func TestWindows(t *testing.T) {
	pod := plain(annotate(contract.KeyOS, "windows", contract.KeyHardware, `{"nics": ["virtio"], "clock": {"local": true}}`))
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs.ToAggregate())
	}
	s := Spec(pod, Node{}, nil)
	if s.Firmware != vm.FirmwareUEFI || !s.IsWindows() || s.Hardware.NICs[0] != vm.NICVirtio || s.Hardware.Disks[vm.DiskOfImage].Bus != vm.DiskSATA || s.HasTPM() {
		t.Errorf("%s, %+v", s.Firmware, s.Hardware)
	}
	clone := plain(annotate(contract.KeyOS, "windows"))
	if got := Inherited(clone); slices.Contains(got, contract.KeyHardware) || slices.Contains(got, contract.KeyFirmware) {
		t.Errorf("a clone is told that %q have no effect, and asks for none", got)
	}
}

// The kernel of a guest is a file of an image that the pod has and no container mounts.
func TestKernelVolume(t *testing.T) {
	const hardware = `{"kernel": {"volume": "boot", "path": "/k"}}`
	kernel := func(change func(*corev1.Pod)) *corev1.Pod {
		return plain(annotate(contract.KeyHardware, hardware), func(p *corev1.Pod) {
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "boot", VolumeSource: corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: "k:1"}}})
			change(p)
		})
	}
	pod := kernel(func(*corev1.Pod) {})
	if errs := Check(pod); len(errs) > 0 {
		t.Fatal(errs.ToAggregate())
	}
	s := Spec(pod, Node{}, nil)
	if k := s.Kernel(); k == nil || *k != (vm.Kernel{Volume: "boot", Path: "/k"}) || len(s.ImageVolumes()) != 1 || len(ImageVolumes(pod)) != 1 {
		t.Errorf("%+v, volumes %+v", s.Hardware, s.Volumes)
	}
	for name, change := range map[string]func(*corev1.Pod){
		"no volume": func(p *corev1.Pod) { p.Spec.Volumes = nil },
		"a Secret": func(p *corev1.Pod) {
			p.Spec.Volumes[len(p.Spec.Volumes)-1].VolumeSource = corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "s"}}
		},
		"mounted": func(p *corev1.Pod) {
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "boot", MountPath: "/k"}}
		},
	} {
		if errs := Check(kernel(change)); len(errs) != 1 || errs[0].Field != "metadata.annotations[vm.cocoonstack.io/hardware]" {
			t.Errorf("%s: %v", name, errs)
		}
	}
}

// A disk of the node is a hostPath of a pod that is a file, and that no container mounts.
func TestHostDisks(t *testing.T) {
	with := func(hardware string, kind corev1.HostPathType, change ...func(*corev1.Pod)) *corev1.Pod {
		return plain(append([]func(*corev1.Pod){annotate(contract.KeyHardware, hardware), func(p *corev1.Pod) {
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "disk", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/srv/disk", Type: &kind}}})
		}}, change...)...)
	}
	for hardware, want := range map[string]vm.HostDisk{
		`{"hostDisks": {"disk": {"capacity": 1048576}}}`:                                            {Path: "/srv/disk", Capacity: 1 << 20},
		`{"hostDisks": {"disk": {"capacity": 1, "shared": true}}, "disks": {"disk": {"ro": true}}}`: {Path: "/srv/disk", Capacity: 1, Shared: true, ReadOnly: true},
	} {
		pod := with(hardware, corev1.HostPathFileOrCreate)
		if errs := Check(pod); len(errs) > 0 {
			t.Fatal(errs.ToAggregate())
		}
		if disks := Spec(pod, Node{}, nil).HostDisks(); len(disks) != 1 || *disks[0].HostDisk != want {
			t.Errorf("%s: %+v", hardware, disks)
		}
	}
	for name, pod := range map[string]*corev1.Pod{
		"no volume":   with(`{"hostDisks": {"other": {}}}`, corev1.HostPathFile),
		"a folder":    with(`{"hostDisks": {"disk": {}}}`, corev1.HostPathDirectory),
		"no capacity": with(`{"hostDisks": {"disk": {}}}`, corev1.HostPathFileOrCreate),
		"a capacity":  with(`{"hostDisks": {"disk": {"capacity": 1}}}`, corev1.HostPathFile),
		"a negative":  with(`{"hostDisks": {"disk": {"capacity": -1}}}`, corev1.HostPathFileOrCreate),
		"a huge one":  with(`{"hostDisks": {"disk": {"capacity": 9223372036854775807}}}`, corev1.HostPathFileOrCreate),
		"mounted": with(`{"hostDisks": {"disk": {}}}`, corev1.HostPathFile, func(p *corev1.Pod) {
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "disk", MountPath: "/d"}}
		}),
		"a ConfigMap": with(`{"hostDisks": {"disk": {}}}`, corev1.HostPathFile, func(p *corev1.Pod) {
			p.Spec.Volumes[len(p.Spec.Volumes)-1].VolumeSource = corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}}
		}),
		"an odd answer": with(`{"hostDisks": {"disk": true}}`, corev1.HostPathFile),
	} {
		if errs := Check(pod); len(errs) != 1 || errs[0].Field != "metadata.annotations[vm.cocoonstack.io/hardware]" {
			t.Errorf("%s: %v", name, errs)
		}
	}
}

// A pod says which of its claims other VMs may use at the same time. Nothing else can be shared so.
func TestSharedClaim(t *testing.T) {
	with := func(hardware string, v corev1.VolumeSource) *corev1.Pod {
		return plain(annotate(contract.KeyHardware, hardware), func(p *corev1.Pod) {
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "disk", VolumeSource: v})
			p.Spec.Containers[0].VolumeDevices = []corev1.VolumeDevice{{Name: "disk", DevicePath: "/dev/disk"}}
		})
	}
	for hardware, want := range map[string]bool{
		`{"disks": {"disk": {"shared": true, "bus": "scsi"}}}`: true,
		`{"disks": {"disk": {"bus": "scsi"}}}`:                 false,
	} {
		pod := with(hardware, ofClaim("data", false))
		if errs := Check(pod); len(errs) > 0 {
			t.Fatal(errs.ToAggregate())
		}
		s := Spec(pod, Node{}, nil)
		if disks := s.DiskVolumes(); len(disks) != 1 || disks[0].Disk.Shared != want || s.Hardware.Disks["disk"] != (vm.DiskDevice{Bus: vm.DiskSCSI}) {
			t.Errorf("%s: %+v, %+v", hardware, disks, s.Hardware)
		}
	}
	file := corev1.HostPathFile
	for name, pod := range map[string]*corev1.Pod{
		"no volume":              with(`{"disks": {"other": {"shared": true}}}`, ofClaim("data", false)),
		"the image":              with(`{"disks": {"@image": {"shared": true}}}`, ofClaim("data", false)),
		"a claim of its own":     with(`{"disks": {"disk": {"shared": true}}}`, corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{}}}),
		"a file of the node":     withFile(with, file),
		"what is true or false":  with(`{"disks": {"disk": {"shared": "yes"}}}`, ofClaim("data", false)),
		"a word that nobody has": with(`{"disks": {"disk": {"shareable": true}}}`, ofClaim("data", false)),
	} {
		if errs := Check(pod); len(errs) != 1 || errs[0].Field != "metadata.annotations[vm.cocoonstack.io/hardware]" {
			t.Errorf("%s: %v", name, errs)
		}
	}
}

func withFile(with func(string, corev1.VolumeSource) *corev1.Pod, kind corev1.HostPathType) *corev1.Pod {
	pod := with(`{"hostDisks": {"disk": {}}, "disks": {"disk": {"shared": true}}}`, corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/srv/disk", Type: &kind}})
	pod.Spec.Containers[0].VolumeDevices = nil
	return pod
}
