//go:build replay

package replay

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// moments are what the boot environment goes through in an update that is confirmed: the write that vacates the slot, that arms the trial, with which the
// loader counts, and that confirms.
type moments struct{ vacated, armed, counted, confirmed int }

// find returns the writes with which the environment changes so.
func find(t *testing.T, writes []write) moments {
	t.Helper()
	m := moments{-1, -1, -1, -1}
	for i, w := range writes {
		at := bytes.Index(w.data, []byte("# GRUB Environment Block\n"))
		if at < 0 {
			continue
		}
		text := string(w.data[at : at+sector])
		switch {
		case m.vacated < 0 && strings.Contains(text, "files_b=\n"):
			m.vacated = i
		case m.armed < 0 && strings.Contains(text, "tries=2"):
			m.armed = i
		case m.counted < 0 && strings.Contains(text, "tries=1"):
			m.counted = i
		case m.confirmed < 0 && strings.Contains(text, "good=b"):
			m.confirmed = i
		}
	}
	if m.vacated < 0 || m.armed <= m.vacated || m.counted <= m.armed || m.confirmed <= m.counted {
		t.Fatalf("the log has an update in another order: %+v", m)
	}
	return m
}

// TestWholeSystem cuts the power in an update of the image itself, from before its first write to after its confirmation, and starts the whole system of a sample
// of the disks that are left. Each starts what its environment says, up to its API, for the same operator and with the same volume.
func TestWholeSystem(t *testing.T) {
	b := newMachines(t)
	base, disk, work, log, bundle := b.path("base.raw"), b.path("disk.raw"), b.path("work.raw"), b.path("log"), b.path("bundle.tar")
	for _, path := range []string{base, disk, work} {
		b.do("cp", "--sparse=always", need.Built(t, "bin/os/disk.raw", "make os-image"), path)
	}
	b.do(need.Built(t, "bin/os/cache/pack", "make os-image"), "bundle", need.Built(t, "bin/os/signing-key.pem", "make os-image"), "v999.1", "", filepath.Dir(need.Built(t, "bin/os/rootfs.sqsh", "make os-image")), bundle)
	b.write("log", nil)
	port := b.freePort()
	network := []string{"-netdev", fmt.Sprintf("user,id=net,hostfwd=tcp:127.0.0.1:%d-:50000", port), "-device", "virtio-net-pci,netdev=net,romfile="}
	b.running([]string{"10.0.2.15:50000", "nobody has adopted it"}, func(string) {
		b.capsulectl("adopt", "--capsule", fmt.Sprintf("127.0.0.1:%d", port), "--name", "box", "--yes")
		b.capsulectl("volume", "create", "data", "--size", "64")
		b.capsulectl("capsule", "update", "push", bundle, "--auto-confirm=5")
	}, append(append(drive(disk, log), "-device", "virtio-blk-pci,drive=d0,bootindex=0", "-action", "reboot=reset"), network...)...)

	writes, err := readLog(log)
	if err != nil {
		t.Fatal(err)
	}
	m := find(t, writes)
	sample := map[int]string{
		m.vacated - 1: "before the update", m.vacated: "slot vacated", m.vacated + (m.armed-m.vacated)/4: "a quarter is written", m.vacated + (m.armed-m.vacated)/2: "half is written",
		m.armed - 1: "not armed", m.armed: "armed", m.armed + (m.counted-m.armed)/2: "restarting", m.counted: "the loader has counted", m.counted + (m.confirmed-m.counted)/2: "on trial",
		m.confirmed - 1: "not confirmed", m.confirmed: "confirmed", len(writes) - 1: "all is written",
	}
	file, err := os.OpenFile(work, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	done := 0
	for _, at := range slices.Sorted(maps.Keys(sample)) {
		for ; done <= at; done++ {
			if _, err := file.WriteAt(writes[done].data, writes[done].sector*sector); err != nil {
				t.Fatal(err)
			}
		}
		env, err := b.environment(work)
		if err != nil {
			t.Fatal(err)
		}
		want, trial := env.Good, env.Open()
		if trial {
			want = env.Try
		}
		b.running([]string{"10.0.2.15:50000", "it is adopted"}, func(string) {
			info := b.capsulectl("capsule", "info")
			if !strings.Contains(info, "active slot      slot_"+string(want)) || strings.Contains(info, "pending slot") != trial {
				t.Errorf("%s: the environment says slot %s, on trial %v, and the machine:\n%s", sample[at], want, trial, info)
			}
			if out := b.capsulectl("volume", "list"); !strings.Contains(out, "data") {
				t.Errorf("%s: volumes:\n%s", sample[at], out)
			}
		}, append(append(drive(work, ""), "-device", "virtio-blk-pci,drive=d0,bootindex=0"), network...)...)
		t.Logf("write %6d of %d, %s: slot %s starts, on trial %v", at+1, len(writes), sample[at], want, trial)
	}
	for ; done < len(writes); done++ {
		if _, err := file.WriteAt(writes[done].data, writes[done].sector*sector); err != nil {
			t.Fatal(err)
		}
	}
	same(t, work, disk)
}
