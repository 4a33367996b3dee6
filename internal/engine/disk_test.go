package engine_test

import (
	"bytes"
	"net/netip"
	"os"
	"testing"

	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// seedOf returns the content of the seed of rec, "" without one.
func seedOf(t *testing.T, rec vm.Record) string {
	t.Helper()
	var text string
	for i, d := range rec.Disks {
		if d.Role != vm.RoleCidat {
			continue
		}
		if i != len(rec.Disks)-1 || i == 0 || !d.ReadOnly || text != "" {
			t.Errorf("disks of the guest: %+v", rec.Disks)
		}
		b, err := os.ReadFile(d.Path)
		if err != nil {
			t.Fatal(err)
		}
		text = string(b)
	}
	return text
}

func TestDiskGuestWithAgent(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	s := cloud()
	s.CloudInit = &vm.CloudInit{UserData: "#cloud-config"}
	s.Volumes = []vm.Volume{{Name: "cfg", Kind: vm.VolumeFiles, Files: []vm.VolumeFile{{Path: "a", Data: []byte("first"), Mode: 0o644}}}}
	s.Mounts = []vm.Mount{{Volume: "cfg", Path: "/etc/cfg"}}
	rec := r.must(r.Create(ctx, s))
	if got := seedOf(t, rec); got != "web "+rec.NICs[0].IP+" a=first" {
		t.Errorf("seed of a created VM: %q", got)
	}
	r.must(r.Start(ctx, "web"))
	r.await("web", "ready", ready)
	var out bytes.Buffer
	if code, err := r.Exec(ctx, "web", guest.Exec{Command: []string{"echo", "hi"}}, guest.Streams{Stdout: &out}); code != 0 || err != nil || out.String() != "hi\n" {
		t.Errorf("exec: %d, %v, %q", code, err, out.String())
	}
	if err := r.UpdateVolume(ctx, "web", "cfg", []vm.VolumeFile{{Path: "a", Data: []byte("second"), Mode: 0o644}}); err != nil {
		t.Errorf("update of a volume: %v", err)
	}
	r.world.Guest(rec.ID).ACPI = false // the agent must do it
	rec = r.must(r.Stop(ctx, "web", -1))
	if rec.Reason != vm.ReasonStopped || rec.AgentReady || rec.ExitCode != nil {
		t.Errorf("stopped: %+v", rec)
	}
	if err := os.Remove(rec.Disks[len(rec.Disks)-1].Path); err != nil { // it is made again each time
		t.Fatal(err)
	}
	rec = r.must(r.Restart(ctx, "web", -1))
	if got := seedOf(t, rec); got != "web "+rec.NICs[0].IP+" a=second" || len(rec.Disks) != 2 {
		t.Errorf("after another start: seed %q, disks %+v", got, rec.Disks)
	}
	r.restart()
	if rec = r.await("web", "ready", ready); seedOf(t, rec) == "" {
		t.Error("the seed went with the daemon")
	}
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Error(err)
	}
	r.clean()
}

func TestSeedRefused(t *testing.T) {
	r := newRig(t)
	s := cloud()
	s.CloudInit = &vm.CloudInit{UserData: "bad"}
	_, err := r.Create(t.Context(), s)
	wantClass(t, "create", err, errdefs.InvalidArgument)
	_, err = r.Launch(t.Context(), s)
	wantClass(t, "launch", err, errdefs.InvalidArgument)
	s.Image = "demo"
	s.CloudInit.UserData = "good"
	_, err = r.Launch(t.Context(), s)
	wantClass(t, "of a container image", err, errdefs.InvalidArgument)
	r.clean()
}

func TestContainersHaveNoSeed(t *testing.T) {
	r := newRig(t)
	if rec := r.must(r.Launch(t.Context(), spec("web"))); seedOf(t, rec) != "" {
		t.Errorf("disks %+v", rec.Disks)
	}
}

// TestAddressesOfGuest makes a guest report addresses: only a NIC whose network knows none gets one.
func TestAddressesOfGuest(t *testing.T) {
	lies := []guest.Interface{{Name: "eth0", Addresses: []netip.Prefix{
		netip.MustParsePrefix("169.254.1.1/16"), netip.MustParsePrefix("fd00::1/64"), netip.MustParsePrefix("192.0.2.7/24"),
	}}}
	for name, unknown := range map[string]bool{"network knows": false, "network does not know": true} {
		t.Run(name, func(t *testing.T) {
			var w *enginetest.World
			r := newRig(t, func(r *rig) { w = r.world; w.NoIP = unknown })
			w.Reported = lies
			r.must(r.Launch(t.Context(), cloud()))
			if !unknown {
				if rec := r.await("web", "ready", ready); rec.NICs[0].IP == "192.0.2.7" || rec.NICs[0].IP == "" {
					t.Errorf("address %q", rec.NICs[0].IP)
				}
				return
			}
			rec := r.await("web", "addressed", func(v vm.Record) bool { return v.NICs[0].IP != "" })
			if rec.NICs[0].IP != "192.0.2.7" || rec.NICs[0].Prefix != 24 {
				t.Errorf("address %+v", rec.NICs[0])
			}
		})
	}
}
