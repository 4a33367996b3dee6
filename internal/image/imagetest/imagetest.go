// Package imagetest is the test suite that every image.Store must pass.
//
// It has no images of its own: the caller supplies small ones, so that the suite depends on no format.
package imagetest

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// Fixtures are images to import.
type Fixtures struct {
	OCI   []byte // a container image with an entrypoint
	Other []byte // a different container image
	Disk  []byte // a disk of DiskSize bytes
	Size  int64  // virtual size of Disk
}

// Run runs the suite. open returns an empty store; it may be called many times.
func Run(t *testing.T, open func(t *testing.T) image.Store, fix Fixtures) {
	s := suite{fix: fix}
	for name, f := range map[string]func(*testing.T, image.Store){
		"import":     s.importsAndFinds,
		"dedupe":     s.storesContentOnce,
		"retag":      s.movesNames,
		"bad names":  s.refusesNames,
		"bad bytes":  s.leavesNothingOfBadContent,
		"remove":     s.removes,
		"prepare":    s.preparesOCI,
		"disk":       s.preparesDisk,
		"concurrent": s.importsConcurrently,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, open(t))
		})
	}
}

type suite struct{ fix Fixtures }

func put(t *testing.T, s image.Store, name string, data []byte) image.Image {
	t.Helper()
	img, err := s.Import(t.Context(), name, bytes.NewReader(data), nil)
	if err != nil {
		t.Fatalf("import %s: %v", name, err)
	}
	return img
}

func list(t *testing.T, s image.Store) (names []string) {
	t.Helper()
	all, err := s.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		names = append(names, i.Name)
	}
	return names
}

func want(t *testing.T, err error, class errdefs.Class) {
	t.Helper()
	if !errdefs.Is(err, class) {
		t.Errorf("error %v is %v, want %v", err, errdefs.ClassOf(err), class)
	}
}

func (x suite) importsAndFinds(t *testing.T, s image.Store) {
	var last int64
	img, err := s.Import(t.Context(), "team/app", bytes.NewReader(x.fix.OCI), func(n int64) { last = n })
	if err != nil {
		t.Fatal(err)
	}
	if img.Name != "team/app:latest" || img.Type != vm.ImageOCI || !strings.HasPrefix(img.ID, "sha256:") || img.Size <= 0 || img.CreatedAt.IsZero() {
		t.Errorf("imported %+v", img)
	}
	if len(img.Config.Entrypoint) == 0 {
		t.Error("the entrypoint is lost")
	}
	if last != int64(len(x.fix.OCI)) {
		t.Errorf("progress ended at %d of %d bytes", last, len(x.fix.OCI))
	}
	for _, ref := range []string{"team/app", "team/app:latest", img.ID, img.ID[:19], strings.TrimPrefix(img.ID, "sha256:")[:12]} {
		got, err := s.Get(t.Context(), ref)
		if err != nil || got.ID != img.ID || got.Name != img.Name {
			t.Errorf("Get(%q) = %+v, %v", ref, got, err)
		}
	}
	for _, ref := range []string{"team/app:v2", "nobody", "sha256:" + strings.Repeat("0", 64)} {
		_, err := s.Get(t.Context(), ref)
		want(t, err, errdefs.NotFound)
	}
}

func (x suite) storesContentOnce(t *testing.T, s image.Store) {
	a, b := put(t, s, "b", x.fix.OCI), put(t, s, "a:1", x.fix.OCI)
	put(t, s, "disk", x.fix.Disk)
	if a.ID != b.ID || !a.CreatedAt.Equal(b.CreatedAt) {
		t.Errorf("the same content is two images: %+v %+v", a, b)
	}
	if got := list(t, s); strings.Join(got, " ") != "a:1 b:latest disk:latest" {
		t.Errorf("list is %v", got)
	}
}

func (x suite) movesNames(t *testing.T, s image.Store) {
	a, b := put(t, s, "app", x.fix.OCI), put(t, s, "app", x.fix.Other)
	if a.ID == b.ID {
		t.Fatal("the fixtures are one image")
	}
	if got, err := s.Get(t.Context(), "app"); err != nil || got.ID != b.ID {
		t.Errorf("the name points at %v, %v", got.ID, err)
	}
}

func (x suite) refusesNames(t *testing.T, s image.Store) {
	for _, name := range []string{"", "/", "a//b", "../x", "a/../b", "A", "a:", "a:b:c", "a b", "a%b", "-a", "a\x00", "a@sha256:1", strings.Repeat("a", 300)} {
		_, err := s.Import(t.Context(), name, bytes.NewReader(x.fix.OCI), nil)
		want(t, err, errdefs.InvalidArgument)
	}
	if got := list(t, s); len(got) != 0 {
		t.Errorf("there is %v", got)
	}
}

type failing struct{ io.Reader }

var errGone = errdefs.Unavailablef("the peer went away")

func (f failing) Read(p []byte) (int, error) {
	n, err := f.Reader.Read(p)
	if errors.Is(err, io.EOF) {
		err = errGone
	}
	return n, err
}

func (x suite) leavesNothingOfBadContent(t *testing.T, s image.Store) {
	for class, data := range map[errdefs.Class][]byte{
		errdefs.DataLoss:        x.fix.OCI[:len(x.fix.OCI)/2],
		errdefs.InvalidArgument: []byte("no image at all"),
	} {
		_, err := s.Import(t.Context(), "bad", bytes.NewReader(data), nil)
		want(t, err, class)
	}
	_, err := s.Import(t.Context(), "bad", bytes.NewReader(nil), nil)
	want(t, err, errdefs.InvalidArgument)
	_, err = s.Import(t.Context(), "bad", failing{bytes.NewReader(x.fix.OCI[:len(x.fix.OCI)/2])}, nil)
	want(t, err, errdefs.Unavailable)
	if got := list(t, s); len(got) != 0 {
		t.Errorf("there is %v", got)
	}
}

func (x suite) removes(t *testing.T, s image.Store) {
	img := put(t, s, "app", x.fix.OCI)
	put(t, s, "app:2", x.fix.OCI)
	busy := true
	inUse := func(d string) bool { return busy && d == img.ID }
	remove := func(ref string) {
		t.Helper()
		if err := s.Remove(t.Context(), ref, inUse); err != nil {
			t.Errorf("remove %s: %v", ref, err)
		}
	}
	remove("app")
	if got := list(t, s); strings.Join(got, " ") != "app:2" {
		t.Errorf("after the first name went there is %v", got)
	}
	remove(img.ID)
	if got := list(t, s); len(got) != 0 {
		t.Errorf("after the id went there is %v", got)
	}
	if _, err := s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir()}); err != nil {
		t.Errorf("content in use is gone: %v", err)
	}
	busy = false
	put(t, s, "other", x.fix.Other)
	remove("other")
	_, err := s.Get(t.Context(), img.ID)
	want(t, err, errdefs.NotFound)
	want(t, s.Remove(t.Context(), "other", nil), errdefs.NotFound)
	_, err = s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir()})
	want(t, err, errdefs.NotFound)
}

func (x suite) preparesOCI(t *testing.T, s image.Store) {
	img := put(t, s, "app", x.fix.OCI)
	dir := t.TempDir()
	root, err := s.Prepare(t.Context(), img, image.Layout{Dir: dir, Storage: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if len(root.Disks) != 2 {
		t.Fatalf("disks are %+v", root.Disks)
	}
	base, cow := root.Disks[0], root.Disks[1]
	if base.Serial != image.SerialLayer(0) || !base.ReadOnly || base.Role != vm.RoleLayer || base.Format != vm.DiskRaw {
		t.Errorf("root disk is %+v", base)
	}
	if cow.Serial != image.SerialCOW || cow.ReadOnly || cow.Role != vm.RoleCOW {
		t.Errorf("writable disk is %+v", cow)
	}
	again, err := s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir(), Storage: 64 << 20})
	if err != nil || again.Disks[0].Path != base.Path || again.Disks[1].Path == cow.Path {
		t.Errorf("a second VM has %+v, %v", again.Disks, err)
	}
	x.keepsContent(t, s, img, image.Layout{Dir: dir, Storage: 64 << 20}, cow)
	_, err = s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir(), Storage: 1})
	want(t, err, errdefs.InvalidArgument)
	dir = t.TempDir()
	blank, err := s.Prepare(t.Context(), image.Blank(), image.Layout{Dir: dir, Storage: 64 << 20})
	if err != nil || len(blank.Disks) != 1 || blank.Disks[0].Serial != image.SerialCOW || blank.Disks[0].Role != vm.RoleCOW {
		t.Fatalf("without an image: %+v, %v", blank.Disks, err)
	}
	x.keepsContent(t, s, image.Blank(), image.Layout{Dir: dir, Storage: 64 << 20}, blank.Disks[0])
	whole := image.Layout{Dir: t.TempDir(), Storage: 64 << 20, Raw: true}
	if root, err = s.Prepare(t.Context(), img, whole); err != nil {
		t.Fatal(err)
	}
	x.isRaw(t, root.Disks[1], 64<<20)
	x.keepsContent(t, s, img, whole, root.Disks[1])
}

// isRaw checks that d is a raw disk of size bytes that uses no other file.
func (x suite) isRaw(t *testing.T, d vm.Disk, size int64) {
	t.Helper()
	st, err := os.Stat(d.Path)
	if err != nil || st.Size() != size || d.Format != vm.DiskRaw || d.Backing != nil || d.ReadOnly {
		t.Errorf("a raw disk of %d bytes is %+v, %v", size, d, err)
	}
}

func (x suite) preparesDisk(t *testing.T, s image.Store) {
	img := put(t, s, "disk", x.fix.Disk)
	if img.Type != vm.ImageDisk {
		t.Errorf("type is %s", img.Type)
	}
	dir := t.TempDir()
	root, err := s.Prepare(t.Context(), img, image.Layout{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if len(root.Disks) != 1 || root.Disks[0].Backing == nil || root.Disks[0].ReadOnly {
		t.Fatalf("disks are %+v", root.Disks)
	}
	x.keepsContent(t, s, img, image.Layout{Dir: dir}, root.Disks[0])
	whole := image.Layout{Dir: t.TempDir(), Storage: 2 * x.fix.Size, Raw: true}
	if root, err = s.Prepare(t.Context(), img, whole); err != nil {
		t.Fatal(err)
	}
	x.isRaw(t, root.Disks[0], 2*x.fix.Size)
	x.keepsContent(t, s, img, whole, root.Disks[0])
	_, err = s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir(), Storage: x.fix.Size - 1})
	want(t, err, errdefs.InvalidArgument)
}

// keepsContent checks that what a guest wrote survives a second Prepare.
func (x suite) keepsContent(t *testing.T, s image.Store, img image.Image, l image.Layout, d vm.Disk) {
	t.Helper()
	f, err := os.OpenFile(d.Path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteString("written by the guest")
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Prepare(t.Context(), img, l); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(d.Path); err != nil || !bytes.HasSuffix(data, []byte("written by the guest")) {
		t.Errorf("a second Prepare lost what was written: %v", err)
	}
}

func (x suite) importsConcurrently(t *testing.T, s image.Store) {
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			data := x.fix.OCI
			if i%2 == 1 {
				data = x.fix.Other
			}
			if _, err := s.Import(t.Context(), "app:"+string(rune('a'+i)), bytes.NewReader(data), nil); err != nil {
				t.Errorf("import: %v", err)
			}
		})
	}
	wg.Wait()
	if got := list(t, s); len(got) != 8 {
		t.Errorf("there is %v", got)
	}
}
