package cloudhypervisor

import (
	"encoding/json"
	"flag"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

var update = flag.Bool("update", false, "rewrite golden files")

const testID = "abcdefghijklmnopqrstuvwxyz"

func ociPlan() hypervisor.Plan {
	return hypervisor.Plan{
		ID: testID, Name: "web-1", CPUs: 2, Memory: 512 << 20, Agent: "cocoon.agent", Dir: "/run/vm/x",
		Boot: vm.Boot{Kernel: "/usr/lib/cocoon/vmlinux", Initrd: "/usr/lib/cocoon/initramfs", Cmdline: "cocoon.x=1"},
		Disks: []vm.Disk{
			{Path: "/var/lib/cocoon/layers/a", Format: vm.DiskRaw, ReadOnly: true, Serial: "layer0", Role: vm.RoleLayer},
			{Path: "/var/lib/cocoon/vms/x/cow.raw", Format: vm.DiskRaw, Serial: "cow", Role: vm.RoleCOW},
		},
		NICs: []vm.NIC{{Tap: "tap0", MAC: "02:00:00:00:00:01", MTU: 1400}},
	}
}

func diskPlan() hypervisor.Plan {
	p := ociPlan()
	p.Boot, p.Agent = vm.Boot{}, ""
	p.Disks = []vm.Disk{{Path: "/dev/vg/root", Device: true, Format: vm.DiskRaw, Serial: "root", Role: vm.RoleCOW}}
	return p
}

// TestGolden compares the requests with those in testdata.
func TestGolden(t *testing.T) {
	huge, sockets := ociPlan(), ociPlan()
	huge.Huge, huge.Memory = vm.HugePages2M, 1<<30
	sockets.CPUs, sockets.Topology = 8, vm.Topology{Sockets: 2, Cores: 2, Threads: 2}
	sockets.SMBIOS = &vm.SMBIOS{UUID: "6ba7b810-9dad-11d1-80b4-00c04fd430c8", Serial: "s-1"}
	sockets.NICs = append(sockets.NICs, vm.NIC{Tap: "tap3", MAC: "02:00:00:00:00:03", Place: 3})
	resumed, alone := ociPlan(), diskPlan()
	resumed.Incoming = &hypervisor.Incoming{State: "/var/lib/cocoon/snapshots/x/vmstate", Memory: "/var/lib/cocoon/snapshots/x/memory"}
	alone.Incoming = &hypervisor.Incoming{State: "/var/lib/cocoon/vms/x/vmstate", Memory: "/var/lib/cocoon/vms/x/memory", Alone: true}
	limited, resumedLimited := ociPlan(), ociPlan()
	limited.DiskRate = vm.DiskRate{Bytes: 100 << 20}
	resumedLimited.DiskRate, resumedLimited.Incoming = vm.DiskRate{Bytes: 8 << 20, Ops: 500}, resumed.Incoming
	plugged, resumedPlugged := limited, resumed
	plugged.Disks = []vm.Disk{ // in the order in which the VM got them
		limited.Disks[0],
		{Path: "/var/lib/cocoon/volumes/a.raw", Format: vm.DiskRaw, Serial: "vol-a", Role: vm.RoleVolume, Port: 7},
		limited.Disks[1],
		{Path: "/dev/vg/b", Device: true, Format: vm.DiskRaw, ReadOnly: true, Serial: "vol-b", Role: vm.RoleVolume, Port: 1},
	}
	resumedPlugged.Disks = plugged.Disks
	resumedPlugged.NICs, resumedPlugged.BootNICs = []vm.NIC{resumed.NICs[0], {Tap: "tap5", MAC: "02:00:00:00:00:05", Place: 5}}, 2
	for name, p := range map[string]hypervisor.Plan{"plugged": plugged, "resumed-plugged": resumedPlugged, "oci": ociPlan(), "disk": diskPlan(), "huge-pages": huge, "sockets": sockets, "resumed": resumed, "alone": alone, "limited": limited, "resumed-limited": resumedLimited} {
		t.Run(name, func(t *testing.T) {
			s, err := build(p, "/usr/share/CLOUDHV.fd", "/proc/self/fd/6")
			if err != nil {
				t.Fatal(err)
			}
			got, err := json.MarshalIndent(s, "", "\t")
			if err != nil {
				t.Fatal(err)
			}
			var b strings.Builder
			b.Write(got)
			for _, f := range s.files {
				b.WriteString("\n" + f.At + " <- " + f.Path)
				if f.ReadOnly {
					b.WriteString(" (read-only)")
				}
			}
			b.WriteString("\n")
			path := filepath.Join("testdata", name+".golden")
			if *update {
				if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if b.String() != string(want) {
				t.Errorf("%s differs (-update accepts it):\n%s\nwant:\n%s", path, b.String(), want)
			}
		})
	}
}

// TestRefused names what a plan asks for and Cloud Hypervisor does not have.
func TestRefused(t *testing.T) {
	for names, change := range map[string]func(*hypervisor.Plan){
		"kvm":               func(p *hypervisor.Plan) { p.Accel = vm.AccelTCG },
		"saved state":       func(p *hypervisor.Plan) { p.Incoming, p.Huge = &hypervisor.Incoming{}, vm.HugePages2M },
		"MiB":               func(p *hypervisor.Plan) { p.Memory += 4096 },
		"qcow2":             func(p *hypervisor.Plan) { p.Disks[1].Format = vm.DiskQCOW2 },
		"raw disks only":    func(p *hypervisor.Plan) { p.Disks[0].Backing = &vm.Disk{} },
		"screen":            func(p *hypervisor.Plan) { p.Graphics = true },
		"grow":              func(p *hypervisor.Plan) { p.Growth.Memory = 1 << 40 },
		"CPU":               func(p *hypervisor.Plan) { p.CPU.Model = "Skylake" },
		"clock":             func(p *hypervisor.Plan) { p.Clock.Local = true },
		"BIOS":              func(p *hypervisor.Plan) { p.Boot.Firmware = vm.FirmwareBIOS },
		"boots a kernel":    func(p *hypervisor.Plan) { p.Boot.Firmware = vm.FirmwareUEFI },
		"signatures":        func(p *hypervisor.Plan) { p.UEFI.SecureBoot = true },
		"TPM":               func(p *hypervisor.Plan) { p.TPM = vm.TPMEphemeral },
		"VSOCK":             func(p *hypervisor.Plan) { p.VSOCK = true },
		"6300ESB":           func(p *hypervisor.Plan) { p.Watchdog = vm.WatchdogReset },
		"panics":            func(p *hypervisor.Plan) { p.Panic = vm.PanicPCI },
		"CD-ROM":            func(p *hypervisor.Plan) { p.Drive = &hypervisor.Drive{} },
		"shared folders":    func(p *hypervisor.Plan) { p.Shares = []hypervisor.Share{{Tag: "a"}} },
		"other buses":       func(p *hypervisor.Plan) { p.Devices = map[string]vm.DiskDevice{"a": {}} },
		"not virtio":        func(p *hypervisor.Plan) { p.Models = []vm.NICModel{vm.NICE1000} },
		"carrier":           func(p *hypervisor.Plan) { p.NICs[0].LinkDown = true },
		"chassis":           func(p *hypervisor.Plan) { p.SMBIOS = &vm.SMBIOS{Chassis: vm.Chassis{Serial: "x"}} },
		"boots by firmware": func(p *hypervisor.Plan) { p.Boot = vm.Boot{} },
		"can have 24":       func(p *hypervisor.Plan) { p.Disks = make([]vm.Disk, maxDisks+1) },
		"can have 4":        func(p *hypervisor.Plan) { p.NICs = make([]vm.NIC, maxNICs+1) },
		"all of its memory": func(p *hypervisor.Plan) { p.Incoming = &hypervisor.Incoming{Feed: "/feed"} },
	} {
		p := ociPlan()
		change(&p)
		_, err := build(p, "", "")
		if !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), names) || !strings.HasSuffix(err.Error(), "run the VM with the driver qemu") && p.Incoming == nil {
			t.Errorf("%s: %v", names, err)
		}
		if p.Incoming != nil && p.Incoming.Feed != "" && !strings.Contains(err.Error(), "; clone it when") {
			t.Errorf("%s: %v", names, err)
		}
	}
	for name, change := range map[string]func(*hypervisor.Plan){
		"no folder":    func(p *hypervisor.Plan) { p.Dir = "" },
		"no CPUs":      func(p *hypervisor.Plan) { p.CPUs = 0 },
		"no memory":    func(p *hypervisor.Plan) { p.Memory = 5 },
		"odd memory":   func(p *hypervisor.Plan) { p.Huge = vm.HugePages1G },
		"nothing":      func(p *hypervisor.Plan) { p.Boot, p.Disks = vm.Boot{}, nil },
		"equal ports":  func(p *hypervisor.Plan) { p.Disks[0].Port, p.Disks[1].Port = 1, 1 },
		"high port":    func(p *hypervisor.Plan) { p.Disks[0].Port = vm.MaxPort + 1 },
		"no serial":    func(p *hypervisor.Plan) { p.Disks[0].Port, p.Disks[0].Serial = 1, "" },
		"equal places": func(p *hypervisor.Plan) { p.NICs = append(p.NICs, vm.NIC{}, vm.NIC{Place: 1}) },
		"long serial":  func(p *hypervisor.Plan) { p.Disks[0].Serial = strings.Repeat("x", 21) },
		"odd format":   func(p *hypervisor.Plan) { p.Disks[0].Format = "vhd" },
		"paused saved": func(p *hypervisor.Plan) { p.Paused, p.Incoming = true, &hypervisor.Incoming{} },
		"odd topology": func(p *hypervisor.Plan) { p.Topology = vm.Topology{Sockets: 3, Cores: 1, Threads: 1} },
	} {
		p := ociPlan()
		change(&p)
		if _, err := build(p, "", ""); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestConfigIsChecked(t *testing.T) {
	for _, cfg := range []Config{{UIDBase: 5}, {Cgroup: "a/b"}, {LogLimit: 5}, {LaunchTime: -1}, {Firmware: []string{"hypervisor-fw"}}} {
		if _, err := New(cfg, slog.New(slog.DiscardHandler)); !errdefs.IsInvalid(err) {
			t.Errorf("New(%+v): %v", cfg, err)
		}
	}
	d, err := New(Config{Binary: "/none"}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Probe(t.Context()); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "releases") {
		t.Errorf("without the program: %v", err)
	}
}

func TestVersionOf(t *testing.T) {
	for text, want := range map[string]string{"cloud-hypervisor v53.0\n": "53.0", "cloud-hypervisor v53.0-12-gabc\n": "53.0-12-gabc", "cloud-hypervisor 54": "54"} {
		if got, err := versionOf(text); err != nil || got != want {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "qemu v53", "cloud-hypervisor", "cloud-hypervisor v52.9", "cloud-hypervisor vx"} {
		if got, err := versionOf(text); !errdefs.IsUnavailable(err) {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}

// The stream of events as version 53 writes it.
const events = `{
  "timestamp": {
    "secs": 0,
    "nanos": 1
  },
  "source": "vmm",
  "event": "starting",
  "properties": null
}

{
  "timestamp": {
    "secs": 0,
    "nanos": 2
  },
  "source": "vm",
  "event": "booted",
  "properties": null
}

`

func eventOf(name string) string {
	return strings.ReplaceAll(events[strings.Index(events, "}\n\n")+3:], "booted", name)
}

func TestLifeOf(t *testing.T) {
	for text, want := range map[string]life{
		"": lifeUnknown, events: lifeRunning, events[:len(events)-2]: lifeUnknown, events + eventOf("shutdown"): lifeEnded,
		events + eventOf("rebooting"): lifeResetting, events + eventOf("rebooting") + eventOf("rebooted"): lifeRunning,
		events[200:] + eventOf("shutdown"):                lifeEnded, // cut
		events + eventOf("shutdown") + `{"source": "vm"`:  lifeEnded,
		events + "\n}\n\n" + eventOf("shutdown"):          lifeEnded,
		events + eventOf("shutdown") + eventOf("booting"): lifeRunning,

		eventOf("device-removed"): lifeRunning, events + eventOf("rebooting") + eventOf("device-removed"): lifeResetting,
		strings.ReplaceAll(eventOf("activated"), `"vm"`, `"virtio-device"`): lifeRunning,
		strings.ReplaceAll(events, `"vm"`, `"virtio"`):                      lifeUnknown,
	} {
		if got := lifeOf([]byte(text)); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
}

// FuzzEvents cuts any bytes into events: it ends, keeps little, and finds what comes after them.
func FuzzEvents(f *testing.F) {
	f.Add([]byte(events))
	f.Add([]byte("\n}\n\n{\n}\n\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if rest := func() []byte {
			for d := data; ; {
				_, rest, ok := cutEvent(d)
				if !ok {
					return rest
				}
				if len(rest) >= len(d) {
					t.Fatal("it does not end")
				}
				d = rest
			}
		}(); len(rest) > maxEvent {
			t.Errorf("it keeps %d bytes", len(rest))
		}
		if got := lifeOf(append(append(append([]byte(nil), data...), "\n}\n\n"...), eventOf("shutdown")...)); got != lifeEnded {
			t.Errorf("after them: %d", got)
		}
	})
}

func testHandle(t testing.TB) string {
	t.Helper()
	h := handle{Handle: jail.Handle{Driver: Name, Version: handleVersion, ID: testID, PID: 4711, Start: 99, UUID: jail.UUID(testID), Dir: "/run/x", UID: 1879048192}, Agent: true}
	b, err := jail.Encode(&h)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func FuzzDecodeHandle(f *testing.F) {
	f.Add([]byte(testHandle(f)))
	f.Add([]byte(`{"driver":"cloud-hypervisor","version":1,"pid":-1}`))
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

// The handle as the first build wrote it: every later build of this version must find a guest that the first build started.
func TestHandleOfTheFirstBuild(t *testing.T) {
	const want = `{"driver":"cloud-hypervisor","version":1,"id":"abcdefghijklmnopqrstuvwxyz","pid":4711,"start":99,"uuid":"UUID","dir":"/run/x","uid":1879048192,"agent":true}`
	if got := strings.Replace(testHandle(t), jail.UUID(testID), "UUID", 1); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}
