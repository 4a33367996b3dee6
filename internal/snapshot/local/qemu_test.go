package local_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"cocoonstack.io/cocoon/internal/snapshot/snapshottest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// node describes a disk to QEMU as the driver does: the record gives the backing chain, never the image headers.
func node(d vm.Disk) map[string]any {
	n := map[string]any{"driver": string(d.Format), "file": map[string]any{"driver": "file", "filename": d.Path}}
	if d.Format == vm.DiskQCOW2 {
		n["backing"] = nil
		if d.Backing != nil {
			n["backing"] = node(*d.Backing)
		}
	}
	return n
}

func image(t *testing.T, d vm.Disk) string {
	t.Helper()
	text, err := json.Marshal(node(d))
	if err != nil {
		t.Fatal(err)
	}
	return "json:" + string(text)
}

// TestDisksThatQEMUWrote saves a guest's disk twice while QEMU writes to it, exports the second snapshot and imports it
// elsewhere, and reads what a clone of it would read.
func TestDisksThatQEMUWrote(t *testing.T) {
	tool, io := need.Tool(t, "qemu-img"), need.Tool(t, "qemu-io")
	write := func(d vm.Disk, command string) {
		t.Helper()
		if out, err := exec.Command(io, "-c", command, image(t, d)).CombinedOutput(); err != nil || bytes.Contains(out, []byte("failed")) {
			t.Fatalf("%v: %s", err, out)
		}
	}
	s, g := open(t, t.TempDir()), snapshottest.NewGuest(t)
	base := slices.Clone(g.Disks)
	write(g.Disks[1], "write -P 1 0 128k")
	snapshottest.Save(t, s, g, "one")
	write(g.Disks[1], "write -P 2 64k 128k")
	snapshottest.Save(t, s, g, "two")
	write(g.Disks[1], "write -P 3 0 1M") // after it: in neither

	want := bytes.Repeat([]byte{0}, snapshottest.Storage)
	copy(want, bytes.Repeat([]byte{1}, 64<<10))
	copy(want[64<<10:], bytes.Repeat([]byte{2}, 128<<10))
	for name, grown := range map[string]int64{"two": 0, "elsewhere": 2 << 20} {
		if name == "elsewhere" {
			h, err := s.Hold(t.Context(), "two")
			if err != nil {
				t.Fatal(err)
			}
			var stream bytes.Buffer
			err = s.Export(t.Context(), h, &stream)
			h.Release()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.Import(t.Context(), name, "", &stream, nil); err != nil {
				t.Fatal(err)
			}
		}
		h, err := s.Hold(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Release()
		disks, err := s.Disks(t.Context(), h, base, t.TempDir(), grown)
		if err != nil {
			t.Fatal(err)
		}
		raw := filepath.Join(t.TempDir(), "raw")
		if out, err := exec.Command(tool, "convert", "-O", "raw", image(t, disks[1]), raw).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		got, err := os.ReadFile(raw)
		if err != nil || len(got) != int(max(grown, snapshottest.Storage)) {
			t.Fatalf("%s: the guest sees %d bytes, %v", name, len(got), err)
		}
		if !bytes.Equal(got[:len(want)], want) {
			t.Errorf("%s: the guest sees other data", name)
		}
	}
}
