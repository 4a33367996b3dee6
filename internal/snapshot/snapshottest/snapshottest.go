// Package snapshottest is the contract of snapshot.Store as a test suite that runs against any implementation.
//
// It starts no guest: memory and devices are arbitrary bytes here.
package snapshottest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/qcow2"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// Sizes of the guest of the suite, bytes.
const (
	Memory  = 8 << 20
	Storage = 1 << 20
)

// Guest is a VM's folder with the disks of a container guest: a shared layer and a writable one on an empty file system.
type Guest struct {
	Dir   string
	Image string // folder of the image store
	Disks []vm.Disk
}

// NewGuest makes a guest.
func NewGuest(t testing.TB) *Guest {
	t.Helper()
	g, err := MakeGuest(t.TempDir(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// MakeGuest makes a guest in the given folders.
func MakeGuest(dir, image string) (*Guest, error) {
	layer, template, cow := filepath.Join(image, "layer.ext4"), filepath.Join(dir, "template.raw"), filepath.Join(dir, "cow.qcow2")
	err := errors.Join(
		os.WriteFile(layer, bytes.Repeat([]byte("shared  "), 512), 0o600),
		os.WriteFile(template, append([]byte("empty file system"), make([]byte, Storage-17)...), 0o600),
		qcow2.Overlay{VirtualSize: Storage, Backing: template, BackingFormat: vm.DiskRaw}.Create(cow))
	return &Guest{Dir: dir, Image: image, Disks: []vm.Disk{
		{Path: layer, Format: vm.DiskRaw, ReadOnly: true, Serial: "layer0", Role: vm.RoleLayer},
		{
			Path: cow, Format: vm.DiskQCOW2, Serial: "cow", Role: vm.RoleCOW,
			Backing: &vm.Disk{Path: template, Format: vm.DiskRaw, ReadOnly: true, Role: vm.RoleLayer},
		},
	}}, err
}

// OfImage recognizes the files of the image store.
func (g *Guest) OfImage(path string) bool { return filepath.Dir(path) == g.Image }

func write(t testing.TB, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// Begin makes a draft and does everything except Commit; it also returns the snapshot to commit.
func Begin(t testing.TB, s snapshot.Store, g *Guest, name string) (snapshot.Draft, snapshot.Snapshot) {
	t.Helper()
	d, snap, err := Fill(t.Context(), s, g, name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Discard() })
	return d, snap
}

// Fill is Begin outside of a test.
func Fill(ctx context.Context, s snapshot.Store, g *Guest, name string) (snapshot.Draft, snapshot.Snapshot, error) {
	snap := snapshot.Snapshot{
		Image: "app", ImageDigest: "sha256:1", ImageType: vm.ImageOCI, ImageBlobIDs: []string{"b"}, Hypervisor: "fake", CPU: 2, Memory: Memory, Storage: Storage, NICs: 1,
		Live: true, Method: "stopped", Labels: map[string]string{"k": "v"}, Source: snapshot.Source{VMID: vm.NewID(), VMName: "source"},
		NIC: []vm.NIC{{MAC: "02:00:00:00:00:01", Tap: "tap0"}}, Record: vm.Record{PID: 4711, Spec: vm.Spec{Name: "source"}},
	}
	d, err := s.Create(ctx, name)
	if err != nil {
		return nil, snap, err
	}
	f, err := os.OpenFile(filepath.Join(d.Dir(), snapshot.FileMemory), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return d, snap, err
	}
	_, err = f.WriteAt([]byte("memory"), Memory/2)
	if err := errors.Join(err, f.Truncate(Memory), f.Close(), os.WriteFile(filepath.Join(d.Dir(), snapshot.FileState), []byte("devices"), 0o600)); err != nil {
		return d, snap, err
	}
	for n, disk := range g.Disks {
		if disk.Role == vm.RoleCOW { // as the engine does: it freezes the old top
			if g.Disks[n], err = s.Overlay(ctx, disk, g.Dir, "top-"+d.ID()+".qcow2"); err != nil {
				return d, snap, err
			}
		}
		of, err := d.Link(ctx, disk, g.OfImage)
		if err != nil {
			return d, snap, err
		}
		snap.Disks = append(snap.Disks, of)
	}
	return d, snap, nil
}

// Save saves a snapshot.
func Save(t testing.TB, s snapshot.Store, g *Guest, name string) snapshot.Snapshot {
	t.Helper()
	d, snap := Begin(t, s, g, name)
	snap, err := d.Commit(t.Context(), snap)
	if err != nil {
		t.Fatal(err)
	}
	return snap
}

// Run checks a store. open makes an empty store whose folders are on the file system of t.TempDir.
func Run(t *testing.T, open func(t *testing.T) snapshot.Store) {
	for name, test := range map[string]func(t *testing.T, s snapshot.Store){
		"Life":         life,
		"Names":        names,
		"Draft":        drafts,
		"Hold":         holds,
		"Owners":       owners,
		"Update":       updates,
		"Disks":        disks,
		"Grow":         grows,
		"Raw":          raws,
		"Incremental":  incremental,
		"Stream":       streams,
		"Truncated":    truncated,
		"Foreign":      foreign,
		"Folder":       folders,
		"FolderChecks": folderChecks,
		"Concurrent":   concurrent,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
}

func class(t *testing.T, what string, err error, want errdefs.Class) {
	t.Helper()
	if !errdefs.Is(err, want) {
		t.Errorf("%s: got %v (%v), want %v", what, err, errdefs.ClassOf(err), want)
	}
}

func life(t *testing.T, s snapshot.Store) {
	g := NewGuest(t)
	snap := Save(t, s, g, "one")
	if !vm.ID(snap.ID).Valid() || snap.Name != "one" || snap.CreatedAt.IsZero() || snap.Size < 4096 || snap.Size > Memory {
		t.Errorf("committed as %+v", snap)
	}
	for _, ref := range []string{"one", snap.ID, snap.ID[:3]} {
		if got, err := s.Get(t.Context(), ref); err != nil || !reflect.DeepEqual(got, snap) {
			t.Errorf("%s is %+v, %v; want %+v", ref, got, err, snap)
		}
	}
	_, err := s.Get(t.Context(), "on")
	class(t, "a prefix of the name", err, errdefs.NotFound)
	_, err = s.Get(t.Context(), snap.ID[:2])
	class(t, "two characters", err, errdefs.NotFound)
	Save(t, s, NewGuest(t), "a")
	all, err := s.List(t.Context())
	if err != nil || len(all) != 2 || all[0].Name != "a" || all[1].Name != "one" {
		t.Errorf("list is %+v, %v", all, err)
	}
	all[0].Labels["k"] = "changed"
	if got, _ := s.Get(t.Context(), "a"); got.Labels["k"] != "v" {
		t.Error("what was returned is the store's own")
	}
	if err := s.Remove(t.Context(), "one"); err != nil {
		t.Error(err)
	}
	_, err = s.Get(t.Context(), "one")
	class(t, "removed", err, errdefs.NotFound)
	class(t, "removed twice", s.Remove(t.Context(), snap.ID), errdefs.NotFound)
	Save(t, s, g, "one")
}

func names(t *testing.T, s snapshot.Store) {
	for _, bad := range []string{"", "a/b", "..", ".hidden", "-x", "a b", "a\x00", strings.Repeat("x", 128), "é"} {
		_, err := s.Create(t.Context(), bad)
		class(t, "name "+bad, err, errdefs.InvalidArgument)
	}
	for _, good := range []string{"a", "A.b_c-d:1", strings.Repeat("x", 127), "7"} {
		d, err := s.Create(t.Context(), good)
		if err != nil {
			t.Error(err)
			continue
		}
		_, err = s.Create(t.Context(), good)
		class(t, "the name of a draft", err, errdefs.AlreadyExists)
		if err := d.Discard(); err != nil {
			t.Error(err)
		}
	}
	Save(t, s, NewGuest(t), "taken")
	_, err := s.Create(t.Context(), "taken")
	class(t, "a taken name", err, errdefs.AlreadyExists)
}

func drafts(t *testing.T, s snapshot.Store) {
	d, snap := Begin(t, s, NewGuest(t), "draft")
	_, err := s.Get(t.Context(), "draft")
	class(t, "a draft", err, errdefs.NotFound)
	if err := os.Remove(filepath.Join(d.Dir(), snapshot.FileState)); err != nil {
		t.Fatal(err)
	}
	_, err = d.Commit(t.Context(), snap)
	class(t, "a file is missing", err, errdefs.DataLoss)
	write(t, filepath.Join(d.Dir(), snapshot.FileState), []byte("devices"))
	bad := snap.Clone()
	bad.Disks[1].Layers[0].File = "../cow"
	_, err = d.Commit(t.Context(), bad)
	class(t, "a file elsewhere", err, errdefs.InvalidArgument)
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = d.Commit(canceled, snap)
	class(t, "canceled", err, errdefs.Canceled)
	if _, err := d.Commit(t.Context(), snap); err != nil {
		t.Fatal(err)
	}
	if err := d.Discard(); err != nil {
		t.Error(err)
	}
	if _, err := s.Get(t.Context(), "draft"); err != nil {
		t.Errorf("discarded after Commit: %v", err)
	}
	_, err = d.Commit(t.Context(), snap)
	class(t, "twice", err, errdefs.FailedPrecondition)

	d, _ = Begin(t, s, NewGuest(t), "given-up")
	if err := errors.Join(d.Discard(), d.Discard()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(d.Dir()); !os.IsNotExist(err) {
		t.Errorf("its folder: %v", err)
	}
	Save(t, s, NewGuest(t), "given-up")
}

func holds(t *testing.T, s snapshot.Store) {
	_, err := s.Hold(t.Context(), "none")
	class(t, "nothing", err, errdefs.NotFound)
	snap := Save(t, s, NewGuest(t), "held")
	first, err := s.Hold(t.Context(), "held")
	if err != nil {
		t.Fatal(err)
	}
	second, err := s.Hold(t.Context(), snap.ID)
	if err != nil {
		t.Fatal(err)
	}
	if first.Snapshot().ID != snap.ID || !filepath.IsAbs(first.Dir()) {
		t.Errorf("held is %+v in %s", first.Snapshot(), first.Dir())
	}
	if data, err := os.ReadFile(filepath.Join(first.Dir(), snapshot.FileState)); err != nil || string(data) != "devices" {
		t.Errorf("its devices are %q, %v", data, err)
	}
	if got, err := s.Get(t.Context(), "held"); err != nil || got.UsedAt.Before(got.CreatedAt) {
		t.Errorf("used at %v, %v", got.UsedAt, err)
	}
	first.Release()
	first.Release()
	class(t, "held", s.Remove(t.Context(), "held"), errdefs.FailedPrecondition)
	second.Release()
	if err := s.Remove(t.Context(), "held"); err != nil {
		t.Error(err)
	}
}

func updates(t *testing.T, s snapshot.Store) {
	snap := Save(t, s, NewGuest(t), "old")
	Save(t, s, NewGuest(t), "other")
	got, err := s.Update(t.Context(), "old", func(x *snapshot.Snapshot) {
		x.ID, x.Disks, x.Live, x.Size = "x", nil, false, 0
		x.Digest, x.Labels["new"], x.Name = "sha256:2", "label", "new"
	})
	want := snap.Clone()
	want.Digest, want.Labels["new"], want.Name = "sha256:2", "label", "new"
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("updated to %+v, %v", got, err)
	}
	if got, err := s.Get(t.Context(), "new"); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("it is %+v, %v", got, err)
	}
	_, err = s.Get(t.Context(), "old")
	class(t, "the old name", err, errdefs.NotFound)
	_, err = s.Update(t.Context(), "new", func(x *snapshot.Snapshot) { x.Name = "other" })
	class(t, "a taken name", err, errdefs.AlreadyExists)
	_, err = s.Update(t.Context(), "none", func(*snapshot.Snapshot) {})
	class(t, "nothing", err, errdefs.NotFound)
	Save(t, s, NewGuest(t), "old")
}

func disks(t *testing.T, s snapshot.Store) {
	g := NewGuest(t)
	base := slices.Clone(g.Disks)
	frozen, err := os.Stat(g.Disks[1].Path)
	if err != nil {
		t.Fatal(err)
	}
	snap := Save(t, s, g, "template")
	if d := snap.Disks; len(d) != 2 || !d[0].Image || len(d[0].Layers) != 0 || d[1].Image || len(d[1].Layers) != 2 || d[1].Size != Storage {
		t.Fatalf("the disks are %+v", d)
	}
	h, err := s.Hold(t.Context(), "template")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	got, err := s.Disks(t.Context(), h, base, dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || !reflect.DeepEqual(got[0], base[0]) {
		t.Errorf("the shared disk is %+v", got)
	}
	top := got[1]
	if top.ReadOnly || top.Serial != "cow" || top.Role != vm.RoleCOW || top.Format != vm.DiskQCOW2 || filepath.Dir(top.Path) != dir ||
		top.Backing == nil || !top.Backing.ReadOnly || top.Backing.Backing == nil || top.Backing.Backing.Backing != nil {
		t.Fatalf("the writable disk is %+v", top)
	}
	if info, err := os.Stat(top.Backing.Path); err != nil || !os.SameFile(info, frozen) {
		t.Errorf("the layer was copied: %v", err)
	}
	write(t, top.Path, append([]byte(qcow2.Magic), "written by the guest"...))
	again, err := s.Disks(t.Context(), h, base, dir, 0)
	if data, _ := os.ReadFile(top.Path); err != nil || !reflect.DeepEqual(again, got) || !bytes.HasSuffix(data, []byte("guest")) {
		t.Errorf("the second time: %+v, %v", again, err)
	}
	h.Release()
	if err := s.Remove(t.Context(), "template"); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(top.Backing.Backing.Path); err != nil || !bytes.HasPrefix(data, []byte("empty file system")) {
		t.Errorf("without the snapshot the VM's layer is %.20q, %v", data, err)
	}
}

func virtual(t *testing.T, path string) int64 {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	h, err := qcow2.ParseLayer(data)
	if err != nil {
		t.Fatal(err)
	}
	return h.VirtualSize
}

func grows(t *testing.T, s snapshot.Store) {
	g := NewGuest(t)
	base := slices.Clone(g.Disks)
	Save(t, s, g, "template")
	h, err := s.Hold(t.Context(), "template")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Release()
	for storage, want := range map[int64]int64{0: Storage, Storage: Storage, Storage + 1: Storage + 4096, 1 << 30: 1 << 30} {
		got, err := s.Disks(t.Context(), h, base, t.TempDir(), storage)
		if err != nil {
			t.Fatal(err)
		}
		if n := virtual(t, got[1].Path); n != want {
			t.Errorf("storage %d: %d bytes", storage, n)
		}
	}
	dir := t.TempDir()
	_, err = s.Disks(t.Context(), h, base, dir, Storage-4096)
	class(t, "smaller", err, errdefs.InvalidArgument)
	_, err = s.Disks(t.Context(), h, nil, dir, 0)
	class(t, "without the image", err, errdefs.DataLoss)
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("refused, but it made %v", left)
	}
}

// incremental saves a second snapshot of the same guest: it stores only what is new.
func incremental(t *testing.T, s snapshot.Store) {
	g := NewGuest(t)
	Save(t, s, g, "one")
	second := Save(t, s, g, "two")
	layers := second.Disks[1].Layers
	if len(layers) != 3 {
		t.Fatalf("the layers are %v", layers)
	}
	one, err := s.Hold(t.Context(), "one")
	if err != nil {
		t.Fatal(err)
	}
	defer one.Release()
	two, err := s.Hold(t.Context(), "two")
	if err != nil {
		t.Fatal(err)
	}
	defer two.Release()
	for n, l := range one.Snapshot().Disks[1].Layers {
		a, err1 := os.Stat(filepath.Join(one.Dir(), l.File))
		b, err2 := os.Stat(filepath.Join(two.Dir(), layers[n].File))
		if err1 != nil || err2 != nil || !os.SameFile(a, b) {
			t.Errorf("layer %d is stored twice: %v, %v", n, err1, err2)
		}
	}
}

// concurrent runs everything at the same time, for the race detector.
func concurrent(t *testing.T, s snapshot.Store) {
	Save(t, s, NewGuest(t), "shared")
	data := export(t, s, "shared")
	var wg sync.WaitGroup
	defer wg.Wait()
	created := make(chan error, 8)
	for range 8 {
		wg.Go(func() {
			for range 3 {
				if h, err := s.Hold(t.Context(), "shared"); err == nil {
					_ = s.Export(t.Context(), h, io.Discard)
					h.Release()
				}
				_, _ = s.Update(t.Context(), "shared", func(x *snapshot.Snapshot) { x.Labels["k"] += "v" })
				_, _ = s.List(t.Context())
			}
			_, err := s.Import(t.Context(), "racer", "", bytes.NewReader(data), nil)
			created <- err
		})
	}
	won := 0
	for range 8 {
		if err := <-created; err == nil {
			won++
		} else if !errdefs.IsAlreadyExists(err) {
			t.Error(err)
		}
	}
	if won != 1 {
		t.Errorf("%d of 8 imports of one name succeeded", won)
	}
	if got, err := s.Get(t.Context(), "shared"); err != nil || got.Labels["k"] != strings.Repeat("v", 25) {
		t.Errorf("updates were lost: %q, %v", got.Labels["k"], err)
	}
	if err := errors.Join(s.Remove(t.Context(), "shared"), s.Remove(t.Context(), "racer")); err != nil {
		t.Error(err)
	}
}
