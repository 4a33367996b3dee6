package snapshottest

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// raws copies raw disks: one that goes on being written to, for a snapshot, and that of a snapshot, for a VM.
func raws(t *testing.T, s snapshot.Store) {
	g := NewGuest(t)
	x := Save(t, s, g, "overlays")
	h, err := s.Hold(t.Context(), x.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Release()
	_, err = s.RawDisks(t.Context(), h, g.Disks, t.TempDir(), 0)
	class(t, "overlays for a VM with raw disks", err, errdefs.Unsupported)

	own := vm.Disk{Path: filepath.Join(t.TempDir(), "disk.raw"), Format: vm.DiskRaw, Serial: "cow", Role: vm.RoleCOW}
	write(t, own.Path, append(make([]byte, Storage-7), "instant"...))
	d, err := s.Create(t.Context(), "raw")
	if err != nil {
		t.Fatal(err)
	}
	x.Live, x.Disks = false, nil
	for _, disk := range []vm.Disk{g.Disks[0], own} {
		kept, err := d.Copy(t.Context(), disk, g.OfImage)
		if err != nil {
			t.Fatal(err)
		}
		x.Disks = append(x.Disks, kept)
	}
	write(t, own.Path, append(make([]byte, Storage-5), "later"...))
	if x, err = d.Commit(t.Context(), x); err != nil {
		t.Fatal(err)
	}
	raw, err := s.Hold(t.Context(), x.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Release()
	dir := t.TempDir()
	for range 2 { // the second time the guest has written to it
		got, err := s.RawDisks(t.Context(), raw, g.Disks, dir, 2*Storage)
		if err != nil || len(got) != 2 || !reflect.DeepEqual(got[0], g.Disks[0]) {
			t.Fatalf("raw disks are %+v, %v", got, err)
		}
		top := got[1]
		data, err := os.ReadFile(top.Path)
		if err != nil || top.Format != vm.DiskRaw || top.Backing != nil || top.ReadOnly || int64(len(data)) != 2*Storage || string(data[Storage-7:Storage]) != "instant" {
			t.Errorf("the writable disk is %+v of %d bytes, %v", top, len(data), err)
		}
	}
	for _, layer := range x.Disks[1].Layers {
		if data, err := os.ReadFile(filepath.Join(raw.Dir(), layer.File)); err != nil || int64(len(data)) != Storage {
			t.Errorf("the snapshot's own file has %d bytes, %v", len(data), err)
		}
	}
}
