package local_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/testkit/ociimage"
)

// layerKeys returns the layers that an image boots from.
func layerKeys(t *testing.T, dir, id string) []string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "data", strings.TrimPrefix(id, "sha256:"), "image.json"))
	if err != nil {
		t.Fatal(err)
	}
	var rec struct{ Layers []string }
	if err := json.Unmarshal(data, &rec); err != nil {
		t.Fatal(err)
	}
	return rec.Layers
}

func TestWhenLayersAreShared(t *testing.T) {
	base, other := ociimage.Of(ociimage.Dir("d"), ociimage.File("d/a", "1")), ociimage.Of(ociimage.Entry{Name: "d/", Type: '5', Mode: 0o700}, ociimage.File("d/b", "2"))
	for name, c := range map[string]struct {
		top    ociimage.Layer
		shared bool
	}{
		"names its folders":         {ociimage.Of(ociimage.Dir("d"), ociimage.File("d/x", "y"), ociimage.Opaque("d")), true},
		"only files":                {ociimage.Of(ociimage.File("x", "y")), true},
		"implies a folder":          {ociimage.Of(ociimage.File("d/x", "y")), false},
		"hides something":           {ociimage.Of(ociimage.Whiteout(".", "d")), false},
		"links to a lower file":     {ociimage.Of(ociimage.File("x", "y"), ociimage.HardLink("l", "d/a")), false},
		"links to its own file":     {ociimage.Of(ociimage.File("x", "y"), ociimage.HardLink("l", "x")), true},
		"would replace by a device": {ociimage.Of(ociimage.Device("null")), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			s := open(t, dir)
			var keys []string
			for n, b := range []ociimage.Layer{base, other} {
				if name == "links to a lower file" && n == 1 {
					b = ociimage.Of(ociimage.Dir("d"), ociimage.File("d/a", "other"))
				}
				img, err := s.Import(t.Context(), fmt.Sprint("app", n), bytes.NewReader(ociimage.Image{Layers: []ociimage.Layer{b, c.top}}.OCI()), nil)
				if err != nil {
					t.Fatal(err)
				}
				keys = append(keys, layerKeys(t, dir, img.ID)[1])
			}
			if (keys[0] == keys[1]) != c.shared {
				t.Errorf("over two different layers it is %v", keys)
			}
			if c.shared && keys[0] != ociimage.Digest(c.top.Tar)[7:] {
				t.Errorf("it is called %s", keys[0])
			}
		})
	}
}

func TestManyLayersAreMerged(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	var img ociimage.Image
	for n := range 70 {
		img.Layers = append(img.Layers, ociimage.Of(ociimage.File(fmt.Sprint("f", n), "x"), ociimage.File("last", fmt.Sprint(n))))
	}
	for range 2 { // the second time, the store has everything
		stored, err := s.Import(t.Context(), "app", bytes.NewReader(img.OCI()), nil)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(layerKeys(t, dir, stored.ID)); n != 64 {
			t.Errorf("%d layers", n)
		}
		root, err := s.Prepare(t.Context(), stored, image.Layout{Dir: t.TempDir(), Storage: 64 << 20})
		if err != nil || len(root.Disks) != 65 || root.Disks[63].Serial != "cocoon-l063" {
			t.Errorf("%d disks, %v", len(root.Disks), err)
		}
	}
}

func TestUnusedLayersAreCollected(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	base := ociimage.Of(ociimage.File("base", "x"))
	for _, name := range []string{"one", "two"} {
		img := ociimage.Image{Layers: []ociimage.Layer{base, ociimage.Of(ociimage.File(name, "x"))}}
		if _, err := s.Import(t.Context(), name, bytes.NewReader(img.OCI()), nil); err != nil {
			t.Fatal(err)
		}
	}
	count := func(want int) {
		t.Helper()
		if all, _ := filepath.Glob(filepath.Join(dir, "layers", "*")); len(all) != want {
			t.Errorf("%d layers, want %d", len(all), want)
		}
	}
	count(3)
	if err := s.Remove(t.Context(), "one", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Collect(t.Context(), image.GCLimits{}, nil); err != nil {
		t.Fatal(err)
	}
	count(2)
	if err := s.Remove(t.Context(), "two", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Collect(t.Context(), image.GCLimits{}, nil); err != nil {
		t.Fatal(err)
	}
	count(0)
}

// TestLayersComeBackByteForByte exports an imported image and imports the export.
func TestLayersComeBackByteForByte(t *testing.T) {
	img := app(strings.Repeat("body", 10000))
	img.Layers = append(img.Layers,
		ociimage.Of(ociimage.Whiteout("bin", "gone"), ociimage.Symlink("s", "bin"), ociimage.File("s/through", "x"), ociimage.HardLink("l", "bin/app"), ociimage.Device("null")),
		ociimage.Of(ociimage.File("twice", "first"), ociimage.File("twice", "second"), ociimage.Opaque("bin")))
	s := open(t, t.TempDir())
	first, err := s.Import(t.Context(), "app", bytes.NewReader(img.OCI()), nil)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := s.Export(t.Context(), "app", &out); err != nil {
		t.Fatal(err)
	}
	again := open(t, t.TempDir())
	second, err := again.Import(t.Context(), "app", bytes.NewReader(out.Bytes()), nil)
	if err != nil || second.ID != first.ID || second.ID != img.ID() {
		t.Errorf("%+v, %v; want %s", second, err, img.ID())
	}
	var more bytes.Buffer
	if err := again.Export(t.Context(), "app", &more); err != nil || !bytes.Equal(out.Bytes(), more.Bytes()) {
		t.Errorf("two exports differ, %v", err)
	}
}

func TestMergedImagesCannotBeExported(t *testing.T) {
	var img ociimage.Image
	for n := range 65 {
		img.Layers = append(img.Layers, ociimage.Of(ociimage.File(fmt.Sprint("f", n), "x")))
	}
	s := open(t, t.TempDir())
	if _, err := s.Import(t.Context(), "app", bytes.NewReader(img.OCI()), nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Export(t.Context(), "app", &bytes.Buffer{}); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("got %v", err)
	}
}
