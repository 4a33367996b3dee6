package qemu

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

var update = flag.Bool("update", false, "write the golden files")

func ociPlan() hypervisor.Plan {
	return hypervisor.Plan{
		ID: "abcdefghijklmnopqrstuvwxyz", Name: "web-1", CPUs: 2, Memory: 512 << 20, Agent: "cocoon.agent", Dir: "/run/vm/x",
		Boot: vm.Boot{Kernel: "/guest/vmlinux", Initrd: "/guest/initrd", Cmdline: "cocoon.root=layer0"},
		Disks: []vm.Disk{
			{Path: "/images/layer0", Format: vm.DiskRaw, ReadOnly: true, Serial: "layer0", Role: vm.RoleLayer},
			{Path: "/vms/x/cow", Format: vm.DiskRaw, Serial: "cow", Role: vm.RoleCOW},
		},
		NICs: []vm.NIC{{Tap: "tap0", MAC: "02:00:00:00:00:01"}},
	}
}

func diskPlan() hypervisor.Plan {
	p := ociPlan()
	p.Agent, p.Boot = "org.qemu.guest_agent.0", vm.Boot{Firmware: vm.FirmwareBIOS}
	p.Disks = []vm.Disk{
		{
			Path: "/vms/x/overlay.qcow2", Format: vm.DiskQCOW2, Serial: "root", Role: vm.RoleCOW,
			Backing: &vm.Disk{Path: "/images/base.qcow2", Format: vm.DiskQCOW2, ReadOnly: true, Backing: &vm.Disk{Path: "/images/root.raw", Format: vm.DiskRaw}},
		},
		{Path: "/vms/x/cidata.iso", Format: vm.DiskRaw, ReadOnly: true, Serial: "cidata", Role: vm.RoleCidat},
	}
	return p
}

func testFacts(accel vm.Accel) facts {
	return facts{
		binary: "/usr/bin/qemu-system-x86_64", machine: "pc-q35-7.2", uuid: jail.UUID("abcdefghijklmnopqrstuvwxyz"), accel: accel, tbSize: 128, tscKHz: 2595124, spare: 4,
		qboot: "/usr/share/qemu/qboot.rom", ovmfCode: "/fw/OVMF_CODE_4M.fd", ovmfVars: "/run/vm/x/efivars.fd",
	}
}

func TestBuildGolden(t *testing.T) {
	uefi := diskPlan()
	uefi.Boot.Firmware = vm.FirmwareUEFI
	uefi.SMBIOS = &vm.SMBIOS{
		UUID: "5d307ca9-b3ef-428c-8861-06e72d69f223", Serial: "a,uuid=b", Chassis: vm.Chassis{Manufacturer: "Cocoon", Version: "1", Serial: "2", Asset: "3", SKU: "4"},
	}
	secure := uefi
	secure.SMBIOS, secure.UEFI, secure.TPM = nil, vm.UEFI{SecureBoot: true}, vm.TPMPersistent
	nics := ociPlan()
	for i := 2; i <= 10; i++ {
		nics.NICs = append(nics.NICs, vm.NIC{Tap: fmt.Sprintf("tap%d", i), NetNS: "/run/netns/x", MAC: fmt.Sprintf("02:00:00:00:00:%02x", i), MTU: 1450})
	}
	huge := diskPlan()
	huge.Huge = vm.HugePages2M
	plugged := ociPlan()
	plugged.Incoming = &hypervisor.Incoming{State: "/snap/state", Memory: "/snap/memory"}
	plugged.Disks = append([]vm.Disk{
		{Path: "/images/debug1", Format: vm.DiskRaw, ReadOnly: true, Serial: "debug1", Role: vm.RoleLayer, Port: 7},
		{Path: "/volumes/v.qcow2", Format: vm.DiskQCOW2, Serial: "v", Role: vm.RoleData, Port: 255, Backing: &vm.Disk{Path: "/volumes/base.raw", Format: vm.DiskRaw}},
	}, plugged.Disks...)
	linkless := ociPlan()
	linkless.NICs = slices.Clone(linkless.NICs)
	linkless.NICs[0].LinkDown = true
	pluggedNICs := ociPlan()
	pluggedNICs.Incoming, pluggedNICs.Disks = plugged.Incoming, plugged.Disks
	pluggedNICs.BootNICs = 2 // the second is gone, and another one is behind the controller of the plugged disks
	pluggedNICs.NICs = append(pluggedNICs.NICs[:1:1], vm.NIC{Tap: "tap2", NetNS: "/run/netns/x", MAC: "02:00:00:00:00:02", MTU: 1450, Place: 2})
	screen := diskPlan()
	screen.Graphics = true
	buses := diskPlan()
	buses.CPUs, buses.Topology, buses.Watchdog, buses.Devices = 8, vm.Topology{Sockets: 2, Cores: 2, Threads: 2}, vm.WatchdogPowerOff, map[string]vm.DiskDevice{
		"root": {Bus: vm.DiskSATA}, "cidata": {Bus: vm.DiskSATA, CDROM: true}, "s1": {Bus: vm.DiskSCSI}, "s2": {Bus: vm.DiskSCSI, CDROM: true},
		"u1": {Bus: vm.DiskUSB, ReadOnly: true}, "u2": {Bus: vm.DiskUSB}, "v1": {Bus: vm.DiskVirtio, ReadOnly: true, Serial: "WD-1", Blocks: vm.Blocks{Logical: 512, Physical: 4096}},
	}
	for _, serial := range []string{"s1", "s2", "u1", "u2", "v1"} {
		buses.Disks = append(buses.Disks, vm.Disk{Path: "/volumes/" + serial, Format: vm.DiskRaw, Serial: serial, Role: vm.RoleVolume})
	}
	models := diskPlan()
	models.NICs, models.Models = nil, []vm.NICModel{vm.NICE1000, vm.NICE1000E, "", vm.NICRTL8139}
	for i := range 5 {
		models.NICs = append(models.NICs, vm.NIC{Tap: fmt.Sprintf("tap%d", i), MAC: fmt.Sprintf("02:00:00:00:00:%02x", i), MTU: 1450})
	}
	windows := diskPlan()
	windows.Clock, windows.Panic = vm.Clock{Timezone: "Europe/Berlin", CatchUp: true, Guest: true, NoHPET: true}, vm.PanicPCI
	windows.CPU = vm.CPU{
		Model: "Haswell", HideKVM: true, Features: []vm.CPUFeature{{Name: "lahf_lm"}, {Name: "vmx", Policy: vm.FeatureDisable}},
		HyperV: vm.HyperV{Features: []string{"relaxed", "stimer-direct", "vapic"}, Spinlocks: 8191, VendorID: "cocoon"},
	}
	late := testFacts(vm.AccelKVM)
	late.east = -(3600 + 30*60)
	drive := windows
	drive.Drive, drive.Devices = &hypervisor.Drive{ISO: "/usr/share/virtio-win.iso"}, map[string]vm.DiskDevice{"root": {Bus: vm.DiskSATA}, "cidata": {Bus: vm.DiskSATA, CDROM: true}}
	device := ociPlan()
	device.Disks = append(device.Disks, vm.Disk{Path: "/dev/sdx", Device: true, Format: vm.DiskRaw, Serial: "vol-x", Role: vm.RoleVolume})
	together := diskPlan()
	together.Devices = map[string]vm.DiskDevice{"vol-b": {Bus: vm.DiskSCSI}}
	together.Disks = append(together.Disks, vm.Disk{Path: "/volumes/a", Shared: true, Format: vm.DiskRaw, Serial: "vol-a", Role: vm.RoleVolume},
		vm.Disk{Path: "/dev/sdx", Device: true, Shared: true, Format: vm.DiskRaw, Serial: "vol-b", Role: vm.RoleVolume})
	shared := ociPlan()
	shared.Shares = []hypervisor.Share{{Tag: "a", Root: "/srv", Path: "/srv/a"}, {Tag: "b", Root: "/srv", Path: "/srv/b", ReadOnly: true}}
	live := ociPlan()
	live.Shares = []hypervisor.Share{{Tag: "live", Path: "/run/live", Live: true}}
	liveResumed := live
	liveResumed.Incoming = &hypervisor.Incoming{State: "/snap/state", Memory: "/snap/memory", Alone: true}
	file := diskPlan()
	file.Devices = map[string]vm.DiskDevice{"cocoon-h001": {Bus: vm.DiskSCSI}}
	file.Disks = append(file.Disks, vm.Disk{Path: "/srv/a/disk", Root: "/srv", Format: vm.DiskRaw, Serial: "cocoon-h000", Role: vm.RoleHost},
		vm.Disk{Path: "/srv/shared", Root: "/srv", Shared: true, Format: vm.DiskRaw, Serial: "cocoon-h001", Role: vm.RoleHost})
	socket := diskPlan()
	socket.VSOCK = true
	user := testFacts(vm.AccelTCG)
	user.uid = 500017
	kernel := diskPlan()
	kernel.Boot = vm.Boot{Firmware: vm.FirmwareBIOS, Kernel: "/vms/x/kernel", Initrd: "/vms/x/initrd", Cmdline: "console=ttyS0 a=b,c=d"}
	diskless := kernel
	diskless.Disks, diskless.Boot = nil, vm.Boot{Firmware: vm.FirmwareUEFI, Kernel: "/vms/x/kernel"}
	unknown := testFacts(vm.AccelTCG)
	unknown.tscKHz = 0
	tests := []struct {
		name  string
		plan  hypervisor.Plan
		facts facts
	}{
		{"oci-tcg-unknown-tsc", ociPlan(), unknown},
		{"plugged", plugged, testFacts(vm.AccelTCG)},
		{"plugged-nics", pluggedNICs, testFacts(vm.AccelTCG)},
		{"link-down", linkless, testFacts(vm.AccelTCG)},
		{"device", device, testFacts(vm.AccelTCG)},
		{"shared", shared, testFacts(vm.AccelTCG)},
		{"live", live, testFacts(vm.AccelTCG)},
		{"live-resumed", liveResumed, testFacts(vm.AccelTCG)},
		{"shared-disks", together, testFacts(vm.AccelTCG)},
		{"oci-tcg", ociPlan(), testFacts(vm.AccelTCG)},
		{"oci-kvm", ociPlan(), testFacts(vm.AccelKVM)},
		{"disk-bios", diskPlan(), testFacts(vm.AccelTCG)},
		{"disk-uefi", uefi, testFacts(vm.AccelTCG)},
		{"disk-secure-boot", secure, testFacts(vm.AccelTCG)},
		{"disk-graphics", screen, testFacts(vm.AccelTCG)},
		{"disk-buses", buses, testFacts(vm.AccelTCG)},
		{"disk-huge-pages", huge, testFacts(vm.AccelTCG)},
		{"nic-models", models, testFacts(vm.AccelTCG)},
		{"disk-cpu-kvm", windows, late},
		{"disk-cpu-tcg", windows, testFacts(vm.AccelTCG)},
		{"disk-drive", drive, testFacts(vm.AccelTCG)},
		{"disk-of-node", file, testFacts(vm.AccelTCG)},
		{"vsock", socket, user},
		{"kernel", kernel, testFacts(vm.AccelTCG)},
		{"kernel-without-disk", diskless, testFacts(vm.AccelKVM)},
		{"multi-nic", nics, testFacts(vm.AccelTCG)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := build(tt.plan, tt.facts)
			if err != nil {
				t.Fatal(err)
			}
			golden(t, tt.name, c.String())
		})
	}
}

// String returns the format of the golden files: one option per line, then the inherited files.
func (c command) String() string {
	var b strings.Builder
	for _, a := range c.args {
		if strings.HasPrefix(a, "-") {
			b.WriteString("\n" + a)
		} else {
			b.WriteString(" " + a)
		}
	}
	b.WriteString("\n\n")
	for i, f := range c.files {
		fmt.Fprintf(&b, "%d %s %s\n", firstFileFd+i, f.kind, f.path)
	}
	return strings.TrimPrefix(b.String(), " ")
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (-update accepts it):\n%s\nwant:\n%s", path, got, want)
	}
}

// A screen needs memory of its own, which the limit of the process leaves room for.
func TestOverhead(t *testing.T) {
	p := diskPlan()
	without := bounds(p, 128).Overhead
	p.Graphics = true
	if with := bounds(p, 128).Overhead; without != qemuOverhead+128<<20 || with != without+graphicsOverhead {
		t.Errorf("%d bytes, with a screen %d", without, with)
	}
}

func TestSmallPagesAreForEmulatedClones(t *testing.T) {
	for _, tt := range []struct {
		name  string
		in    *hypervisor.Incoming
		accel vm.Accel
		want  bool
	}{
		{"clone", &hypervisor.Incoming{State: "/s/state", Memory: "/s/memory"}, vm.AccelTCG, true},
		{"clone under KVM", &hypervisor.Incoming{State: "/s/state", Memory: "/s/memory"}, vm.AccelKVM, false},
		{"alone on its memory", &hypervisor.Incoming{State: "/s/state", Memory: "/s/memory", Alone: true}, vm.AccelTCG, false},
		{"boot", nil, vm.AccelTCG, false},
	} {
		p := ociPlan()
		p.Incoming = tt.in
		c, err := build(p, testFacts(tt.accel))
		if err != nil || c.smallPages != tt.want {
			t.Errorf("%s: %v, %v", tt.name, c.smallPages, err)
		}
	}
}

// TestOnlyBootingGuestsHaveTheirKernelAgain checks that a guest that resumes gets its kernel only if its firmware may still be
// reading it.
func TestOnlyBootingGuestsHaveTheirKernelAgain(t *testing.T) {
	for _, booting := range []bool{false, true} {
		p := ociPlan()
		p.Incoming = &hypervisor.Incoming{State: "/s/state", Memory: "/s/memory", Booting: booting}
		c, err := build(p, testFacts(vm.AccelTCG))
		if err != nil {
			t.Fatal(err)
		}
		for _, arg := range []string{"-kernel", "-initrd", "-append"} {
			if slices.Contains(c.args, arg) != booting {
				t.Errorf("booting %v: %v", booting, c.args)
			}
		}
	}
}

func TestBuildRefuses(t *testing.T) {
	deep := vm.Disk{Path: "x", Format: vm.DiskQCOW2}
	for range maxBacking + 1 {
		below := deep
		deep = vm.Disk{Path: "x", Format: vm.DiskQCOW2, Backing: &below}
	}
	tests := []struct {
		name  string
		spoil func(*hypervisor.Plan, *facts)
		class errdefs.Class
	}{
		{"no id", func(p *hypervisor.Plan, _ *facts) { p.ID = "" }, errdefs.InvalidArgument},
		{"no cpu", func(p *hypervisor.Plan, _ *facts) { p.CPUs = 0 }, errdefs.InvalidArgument},
		{"1000 cpus", func(p *hypervisor.Plan, _ *facts) { p.CPUs = 1000 }, errdefs.InvalidArgument},
		{"no memory", func(p *hypervisor.Plan, _ *facts) { p.Memory = 0 }, errdefs.InvalidArgument},
		{"a virtio socket that resumes", func(p *hypervisor.Plan, _ *facts) {
			p.VSOCK, p.Incoming = true, &hypervisor.Incoming{State: "s", Memory: "m"}
		}, errdefs.InvalidArgument},
		{"nothing to boot", func(p *hypervisor.Plan, _ *facts) { p.Boot.Kernel, p.Disks = "", nil }, errdefs.InvalidArgument},
		{"format", func(p *hypervisor.Plan, _ *facts) { p.Disks[0].Format = "vmdk" }, errdefs.InvalidArgument},
		{"raw on raw", func(p *hypervisor.Plan, _ *facts) { p.Disks[0].Backing = &vm.Disk{Format: vm.DiskRaw} }, errdefs.InvalidArgument},
		{"serial", func(p *hypervisor.Plan, _ *facts) { p.Disks[0].Serial = strings.Repeat("x", 21) }, errdefs.InvalidArgument},
		{"too deep", func(p *hypervisor.Plan, _ *facts) { p.Disks[0] = deep }, errdefs.InvalidArgument},
		{"too many disks", func(p *hypervisor.Plan, _ *facts) { p.Disks = make([]vm.Disk, maxDisks+1) }, errdefs.InvalidArgument},
		{"firmware", func(p *hypervisor.Plan, _ *facts) { p.Boot = vm.Boot{Firmware: "coreboot"} }, errdefs.InvalidArgument},
		{"port name", func(p *hypervisor.Plan, _ *facts) { p.Agent = strings.Repeat("x", 65) }, errdefs.InvalidArgument},
		{"a tag twice", func(p *hypervisor.Plan, _ *facts) { p.Shares = []hypervisor.Share{{Tag: "a"}, {Tag: "a"}} }, errdefs.InvalidArgument},
		{"a tag with options", func(p *hypervisor.Plan, _ *facts) { p.Shares = []hypervisor.Share{{Tag: "a,fd=3"}} }, errdefs.InvalidArgument},
		{"a long tag", func(p *hypervisor.Plan, _ *facts) {
			p.Shares = []hypervisor.Share{{Tag: strings.Repeat("x", maxTag+1)}}
		}, errdefs.InvalidArgument},
		{"a folder and saved state", func(p *hypervisor.Plan, _ *facts) {
			p.Shares, p.Incoming = []hypervisor.Share{{Tag: "a"}}, &hypervisor.Incoming{State: "s", Memory: "m", Alone: true}
		}, errdefs.InvalidArgument},
		{"a live folder and memory of others", func(p *hypervisor.Plan, _ *facts) {
			p.Shares, p.Incoming = []hypervisor.Share{{Tag: "a", Live: true}}, &hypervisor.Incoming{State: "s", Memory: "m"}
		}, errdefs.InvalidArgument},
		{"two live folders", func(p *hypervisor.Plan, _ *facts) {
			p.Shares = []hypervisor.Share{{Tag: "a", Live: true}, {Tag: "b", Live: true}}
		}, errdefs.InvalidArgument},
		{"a drive with our kernel", func(p *hypervisor.Plan, _ *facts) { p.Drive = &hypervisor.Drive{} }, errdefs.InvalidArgument},
		{"no port for the drive", func(p *hypervisor.Plan, _ *facts) {
			*p = diskPlan()
			p.Drive, p.Disks, p.Devices = &hypervisor.Drive{}, nil, map[string]vm.DiskDevice{}
			for i := range 6 {
				serial := fmt.Sprint("s", i)
				p.Disks, p.Devices[serial] = append(p.Disks, vm.Disk{Path: "x", Format: vm.DiskRaw, Serial: serial}), vm.DiskDevice{Bus: vm.DiskSATA}
			}
		}, errdefs.InvalidArgument},
		{"no ovmf", func(p *hypervisor.Plan, f *facts) {
			p.Boot, f.ovmfCode = vm.Boot{Firmware: vm.FirmwareUEFI}, ""
		}, errdefs.Unsupported},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, f := ociPlan(), testFacts(vm.AccelTCG)
			tt.spoil(&p, &f)
			if _, err := build(p, f); !errdefs.Is(err, tt.class) {
				t.Errorf("build: %v, want %v", err, tt.class)
			}
		})
	}
}

func TestResolveAccel(t *testing.T) {
	good := jail.KVM{Flags: true, Mode: 0o660, Group: 104}
	tests := []struct {
		name  string
		facts jail.KVM
		want  vm.Accel
		got   vm.Accel
		why   string
		err   bool
	}{
		{"auto on a good host", good, vm.AccelAuto, vm.AccelKVM, "can be opened", false},
		{"empty is auto", good, "", vm.AccelKVM, "can be opened", false},
		{"tcg forced", good, vm.AccelTCG, vm.AccelTCG, "requested", false},
		{"kvm forced", good, vm.AccelKVM, vm.AccelKVM, "requested", false},
		{"no device", jail.KVM{OpenErr: errors.New("gone"), Flags: true}, vm.AccelAuto, vm.AccelTCG, "gone", false},
		{"no flag", jail.KVM{Mode: 0o666}, vm.AccelAuto, vm.AccelTCG, "neither vmx nor svm", false},
		{"root only", jail.KVM{Flags: true, Mode: 0o600}, vm.AccelAuto, vm.AccelTCG, "unprivileged", false},
		{"forced without flag", jail.KVM{Mode: 0o666}, vm.AccelKVM, "", "", true},
		{"nonsense", good, "xen", "", "", true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, why, err := resolve(tt.facts, tt.want)
			if got != tt.got || !strings.Contains(why, tt.why) || (err != nil) != tt.err {
				t.Errorf("resolve = %q, %q, %v", got, why, err)
			}
		})
	}
}

func TestLastMessage(t *testing.T) {
	const stamp = "2026-11-21T11:00:00.000000Z qemu-system-x86_64: "
	tests := []struct{ name, log, want string }{
		{"nothing", "", ""},
		{"plain", stamp + "terminating on signal 15\n", "terminating on signal 15"},
		{"of many", stamp + "warning: x\n" + stamp + "fatal: y\n", "fatal: y"},
		{"two lines", stamp + `-device {"a":"b"}: Failed to get "write" lock` + "\nIs another process using the image [/dev/fdset/10]?\n", `Failed to get "write" lock Is another process using the image [/dev/fdset/10]?`},
		{"from the loader", "error while loading shared libraries: libx.so\n", "error while loading shared libraries: libx.so"},
		{"endless", stamp + strings.Repeat("x", 5000), strings.Repeat("x", 500)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := lastMessage(tt.log); got != tt.want {
				t.Errorf("lastMessage = %q, want %q", got, tt.want)
			}
		})
	}
	c := command{files: make([]file, 20)}
	c.files[7].path, c.files[0].path = "/disk", "/wrong" // descriptors 10 and 3
	if got := c.named("[/dev/fdset/10]"); got != "[/disk]" {
		t.Errorf("named = %q", got)
	}
}

func FuzzDecodeHandle(f *testing.F) {
	h := handle{Handle: jail.Handle{Driver: Name, Version: handleVersion, ID: "abc", PID: 77, Start: 5, UUID: jail.UUID("abc"), Dir: "/x", UID: 1}}
	good, err := jail.Encode(&h)
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(good))
	f.Add([]byte(`{"driver":"qemu","version":1,"pid":-1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		h, err := decodeHandle(data)
		if err != nil && !errdefs.IsInvalid(err) {
			t.Fatalf("class of %v", err)
		}
		if err == nil && (h.PID <= 1 || h.UUID != jail.UUID(h.ID)) {
			t.Fatalf("accepted %+v", h)
		}
	})
}

func TestConfigIsChecked(t *testing.T) {
	for _, cfg := range []Config{{UIDBase: 5}, {UIDBase: 1 << 31, UIDCount: 1<<31 + 1}, {Cgroup: "a/b"}, {Cgroup: ".."}, {LogLimit: 5}, {TBSize: -1}} {
		if _, err := New(cfg, slog.New(slog.DiscardHandler)); !errdefs.IsInvalid(err) {
			t.Errorf("New(%+v): %v", cfg, err)
		}
	}
}
