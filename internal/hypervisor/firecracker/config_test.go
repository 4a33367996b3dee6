package firecracker

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
			{Path: "/var/lib/cocoon/layers/a", Format: vm.DiskRaw, ReadOnly: true, Serial: "cocoon-l000", Role: vm.RoleLayer},
			{Path: "/var/lib/cocoon/vms/x/cow.raw", Format: vm.DiskRaw, Serial: "cocoon-cow", Role: vm.RoleCOW},
		},
		NICs: []vm.NIC{{Tap: "tap0", MAC: "02:00:00:00:00:01", MTU: 1400}},
	}
}

// TestGolden compares the requests with those in testdata.
func TestGolden(t *testing.T) {
	bare, nics, resumed := ociPlan(), ociPlan(), ociPlan()
	bare.Disks, bare.NICs, bare.Agent, bare.Boot = nil, nil, "", vm.Boot{Kernel: "/usr/lib/cocoon/vmlinux"}
	nics.NICs = append(nics.NICs, vm.NIC{Tap: "tap3", MAC: "02:00:00:00:00:03", Place: 3})
	resumed.NICs = nics.NICs
	resumed.Incoming = &hypervisor.Incoming{State: "/var/lib/cocoon/snapshots/s/vmstate", Memory: "/var/lib/cocoon/snapshots/s/memory-ranges", Grown: []string{"cocoon-cow"}}
	limited, resumedLimited, unlimited := ociPlan(), ociPlan(), ociPlan()
	limited.DiskRate = vm.DiskRate{Bytes: 100 << 20}
	resumedLimited.DiskRate, resumedLimited.Incoming = vm.DiskRate{Bytes: 8 << 20, Ops: 500}, &hypervisor.Incoming{State: "/s/vmstate", Memory: "/s/memory-ranges"}
	unlimited.Incoming = &hypervisor.Incoming{State: "/s/vmstate", Memory: "/s/memory-ranges", DiskRate: vm.DiskRate{Ops: 500}}
	for name, p := range map[string]hypervisor.Plan{
		"oci": ociPlan(), "bare": bare, "nics": nics, "resumed": resumed, "limited": limited, "resumed-limited": resumedLimited, "resumed-unlimited": unlimited,
	} {
		t.Run(name, func(t *testing.T) {
			s, err := build(p, "/proc/self/fd/4")
			if err != nil {
				t.Fatal(err)
			}
			var b strings.Builder
			for _, r := range append(s.machine, s.last...) {
				body, err := json.MarshalIndent(r.Body, "", "\t")
				if err != nil {
					t.Fatal(err)
				}
				b.WriteString(r.Verb + " " + r.Path + " " + string(body) + "\n")
			}
			for _, f := range s.files {
				b.WriteString(f.At + " <- " + f.Path)
				if f.ReadOnly {
					b.WriteString(" (read-only)")
				}
				b.WriteString("\n")
			}
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

// TestRefused names what a plan asks for and Firecracker does not have. Check says so too, before anything is made.
func TestRefused(t *testing.T) {
	d, err := New(Config{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for names, change := range map[string]func(*hypervisor.Plan){
		"kvm":                 func(p *hypervisor.Plan) { p.Accel = vm.AccelTCG },
		"firmware":            func(p *hypervisor.Plan) { p.Boot = vm.Boot{} },
		"kernels of ours":     func(p *hypervisor.Plan) { p.Boot.Firmware = vm.FirmwareUEFI },
		"huge pages":          func(p *hypervisor.Plan) { p.Huge = vm.HugePages2M },
		"screen":              func(p *hypervisor.Plan) { p.Graphics = true },
		"topology":            func(p *hypervisor.Plan) { p.Topology = vm.Topology{Sockets: 1, Cores: 2, Threads: 1} },
		"grow":                func(p *hypervisor.Plan) { p.Growth.Memory = 1 << 40 },
		"other CPU":           func(p *hypervisor.Plan) { p.CPU.Model = "Skylake" },
		"clock":               func(p *hypervisor.Plan) { p.Clock.Local = true },
		"UEFI":                func(p *hypervisor.Plan) { p.UEFI.SecureBoot = true },
		"SMBIOS":              func(p *hypervisor.Plan) { p.SMBIOS = &vm.SMBIOS{} },
		"TPM":                 func(p *hypervisor.Plan) { p.TPM = vm.TPMEphemeral },
		"VSOCK":               func(p *hypervisor.Plan) { p.VSOCK = true },
		"watchdog":            func(p *hypervisor.Plan) { p.Watchdog = vm.WatchdogReset },
		"panics":              func(p *hypervisor.Plan) { p.Panic = vm.PanicPCI },
		"CD-ROM":              func(p *hypervisor.Plan) { p.Drive = &hypervisor.Drive{} },
		"shared folders":      func(p *hypervisor.Plan) { p.Shares = []hypervisor.Share{{Tag: "a"}} },
		"other buses":         func(p *hypervisor.Plan) { p.Devices = map[string]vm.DiskDevice{"a": {}} },
		"not virtio":          func(p *hypervisor.Plan) { p.Models = []vm.NICModel{vm.NICE1000} },
		"carrier":             func(p *hypervisor.Plan) { p.NICs[0].LinkDown = true },
		"plugged":             func(p *hypervisor.Plan) { p.Disks[0].Port = 1 },
		"qcow2":               func(p *hypervisor.Plan) { p.Disks[1].Format = vm.DiskQCOW2 },
		"character":           func(p *hypervisor.Plan) { p.Disks[1].Serial = "a,b" },
		"multiple of 1 MiB":   func(p *hypervisor.Plan) { p.Memory++ },
		"can have 32":         func(p *hypervisor.Plan) { p.CPUs = 33 },
		"can have 20 of ours": func(p *hypervisor.Plan) { p.Disks = make([]vm.Disk, maxDisks+1) },
		"can have 6 of ours":  func(p *hypervisor.Plan) { p.NICs = make([]vm.NIC, maxNICs+1) },
	} {
		p := ociPlan()
		change(&p)
		if err := d.Check(t.Context(), p); !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), names) || !strings.HasSuffix(err.Error(), "run the VM with the driver qemu") {
			t.Errorf("%s: %v", names, err)
		}
	}
	for name, change := range map[string]func(*hypervisor.Plan){
		"no folder":    func(p *hypervisor.Plan) { p.Dir = "" },
		"no CPUs":      func(p *hypervisor.Plan) { p.CPUs = 0 },
		"no memory":    func(p *hypervisor.Plan) { p.Memory = 1 },
		"paused":       func(p *hypervisor.Plan) { p.Paused, p.Incoming = true, &hypervisor.Incoming{} },
		"no format":    func(p *hypervisor.Plan) { p.Disks[0].Format = "" },
		"long serial":  func(p *hypervisor.Plan) { p.Disks[0].Serial = strings.Repeat("x", 21) },
		"long cmdline": func(p *hypervisor.Plan) { p.Boot.Cmdline = strings.Repeat("x", 2000) },
	} {
		p := ociPlan()
		change(&p)
		if _, err := build(p, ""); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestVersion(t *testing.T) {
	for text, want := range map[string]string{
		"Firecracker v1.16.1\n\n2026-11-29T13:56:51 [anonymous-instance:main] Firecracker exiting successfully. exit_code=0\n": "1.16.1",
		"Firecracker v2.0.0-dev\n": "2.0.0-dev", "Firecracker v1.13.9\n": "", "Firecracker v1\n": "", "QEMU emulator version 7.2\n": "", "": "",
	} {
		if got, err := versionOf(text); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	for text, want := range map[string]string{"v10.0.0\n2026 [x] y\n": "10.0.0", "10.0.0": "", "": ""} {
		if got, err := formatOf(text); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}

func TestHandle(t *testing.T) {
	h := handle{
		Handle: jail.Handle{Driver: Name, Version: handleVersion, ID: testID, PID: 7, Start: 8, UUID: jail.UUID(testID), Dir: "/run/vm/x", UID: 9}, Memory: 1 << 20, Agent: true,
		Disks: []jail.Drive{{Serial: "a", ReadOnly: true}}, Links: []tap{{1, "tap0", "/run/netns/x"}},
	}
	raw, err := jail.Encode(&h)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := decodeHandle(raw); err != nil || got.UUID != h.UUID || len(got.Disks) != 1 || got.Links[0] != h.Links[0] {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "{}", `{"driver":"qemu","version":1}`, `{"driver":"firecracker","version":2}`, `{"driver":"firecracker","version":1,"pid":1}`} {
		if _, err := decodeHandle(hypervisor.Handle(bad)); !errdefs.IsInvalid(err) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// The handle as the first build wrote it: every later build of this version must find a guest that the first build started.
func TestHandleOfTheFirstBuild(t *testing.T) {
	const want = `{"driver":"firecracker","version":1,"id":"abcdefghijklmnopqrstuvwxyz","pid":4711,"start":99,"uuid":"UUID","dir":"/run/x","uid":1879048192,"memory":134217728,` +
		`"agent":true,"disks":[{"serial":"cow"},{"serial":"l0","readOnly":true}],"links":[{"place":0,"name":"tap0","netns":"/run/netns/x"}]}`
	raw, err := jail.Encode(&handle{
		Handle: jail.Handle{Driver: Name, Version: 1, ID: testID, PID: 4711, Start: 99, UUID: jail.UUID(testID), Dir: "/run/x", UID: 1879048192}, Memory: 128 << 20, Agent: true,
		Disks: []jail.Drive{{Serial: "cow"}, {Serial: "l0", ReadOnly: true}}, Links: []tap{{0, "tap0", "/run/netns/x"}},
	})
	if got := strings.Replace(string(raw), jail.UUID(testID), "UUID", 1); err != nil || got != want {
		t.Errorf("%s, %v\nwant %s", got, err, want)
	}
}

// FuzzDecodeHandle: whatever a record has as a handle, it is refused as invalid, or is one of this driver that is complete.
func FuzzDecodeHandle(f *testing.F) {
	raw, err := jail.Encode(&handle{
		Handle: jail.Handle{Driver: Name, Version: handleVersion, ID: testID, PID: 7, Start: 8, UUID: jail.UUID(testID), Dir: "/run/vm/x", UID: 9}, Disks: []jail.Drive{{Serial: "a", ReadOnly: true}},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(raw))
	f.Add([]byte(`{"driver":"firecracker","version":1}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		h, err := decodeHandle(raw)
		if err != nil {
			if !errdefs.IsInvalid(err) {
				t.Errorf("%q: %v", raw, err)
			}
			return
		}
		if h.Driver != Name || h.PID <= 1 || h.Dir == "" || h.UUID != jail.UUID(h.ID) {
			t.Errorf("%q is %+v", raw, h)
		}
	})
}
