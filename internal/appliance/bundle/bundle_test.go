package bundle

import (
	"archive/tar"
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func key(name string) ed25519.PrivateKey {
	seed := sha256.Sum256([]byte(name))
	return ed25519.NewKeyFromSeed(seed[:])
}

func public(k ed25519.PrivateKey) []ed25519.PublicKey {
	return []ed25519.PublicKey{k.Public().(ed25519.PublicKey)}
}

// content is a version whose root has a whole chunk and a part of one.
func content() map[string]string {
	return map[string]string{
		Version: "v2\n", Kernel: "a kernel", Initramfs: strings.Repeat("i", ChunkSize), Root: strings.Repeat("r", ChunkSize) + "end",
	}
}

func sources(files map[string]string) []Source {
	var all []Source
	for _, name := range names {
		if text, ok := files[name]; ok {
			all = append(all, Source{name, strings.NewReader(text)})
		}
	}
	return all
}

func written(t testing.TB, m Manifest, files map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := Write(&b, m, sources(files), key("ours")); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// all reads a bundle to its end, or to the first error.
func all(b []byte, keys []ed25519.PublicKey) (map[string]string, Manifest, error) {
	got := map[string]string{}
	r, err := Open(bytes.NewReader(b), keys)
	if err != nil {
		return got, Manifest{}, err
	}
	for {
		f, in, err := r.Next()
		if errors.Is(err, io.EOF) {
			return got, r.Manifest(), nil
		}
		if err != nil {
			return got, r.Manifest(), err
		}
		text, err := io.ReadAll(in)
		got[f.Name] = string(text)
		if err != nil {
			return got, r.Manifest(), err
		}
	}
}

func TestRoundTrip(t *testing.T) {
	m := Manifest{Version: "v2", MinVersion: "v1", Architecture: "amd64"}
	b := written(t, m, content())
	if !bytes.Equal(b, written(t, m, content())) {
		t.Error("the same input gave other bytes")
	}
	got, read, err := all(b, append(public(key("another")), public(key("ours"))...))
	if err != nil {
		t.Fatal(err)
	}
	if read.Version != "v2" || read.MinVersion != "v1" || read.Architecture != "amd64" || len(read.ID()) != 16 {
		t.Errorf("the manifest is %+v", read)
	}
	for name, want := range content() {
		if got[name] != want {
			t.Errorf("%s has %d bytes that differ from the %d written", name, len(got[name]), len(want))
		}
	}
	r, err := Open(bytes.NewReader(b), public(key("ours")))
	if err != nil {
		t.Fatal(err)
	}
	var order []string
	for { // what is not read is verified as well
		f, _, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		order = append(order, f.Name)
	}
	if d := diff.Of(names, order); d != "" {
		t.Error(d)
	}
}

type entry struct{ name, text string }

func entries(t *testing.T, b []byte) []entry {
	t.Helper()
	var list []entry
	for r := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, entry{h.Name, string(text)})
	}
}

func archive(t *testing.T, list []entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range list {
		if err := put(w, e.name, []byte(e.text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestTampered(t *testing.T) {
	good := entries(t, written(t, Manifest{Version: "v2", Architecture: "amd64"}, content()))
	const manifest, signature, version, kernel, root = 0, 1, 2, 3, 5
	changed := func(i int, text string) []entry {
		list := slices.Clone(good)
		list[i].text = text
		return list
	}
	flipped := func(i, at int) []entry {
		b := []byte(good[i].text)
		b[at] ^= 1
		return changed(i, string(b))
	}
	for name, tt := range map[string]struct {
		list  []entry
		class errdefs.Class
		given string // of the root
	}{
		"the manifest":                    {flipped(manifest, 20), errdefs.FailedPrecondition, ""},
		"the signature":                   {flipped(signature, 3), errdefs.FailedPrecondition, ""},
		"no signature":                    {slices.Delete(slices.Clone(good), signature, signature+1), errdefs.InvalidArgument, ""},
		"no manifest":                     {good[1:], errdefs.InvalidArgument, ""},
		"the manifest is not first":       {append([]entry{good[version]}, good...), errdefs.InvalidArgument, ""},
		"a file of the boot partition":    {flipped(kernel, 0), errdefs.DataLoss, ""},
		"the first chunk of the root":     {flipped(root, 7), errdefs.DataLoss, ""},
		"the last chunk of the root":      {flipped(root, ChunkSize+2), errdefs.DataLoss, content()[Root][:ChunkSize]},
		"a root that is shorter":          {changed(root, "r"), errdefs.DataLoss, ""},
		"a file that is there twice":      {append(slices.Clone(good), good[kernel]), errdefs.DataLoss, content()[Root]},
		"a file is missing":               {good[:root], errdefs.DataLoss, ""},
		"an archive of something else":    {[]entry{{"README", "x"}}, errdefs.InvalidArgument, ""},
		"an archive without any member":   {nil, errdefs.InvalidArgument, ""},
		"a manifest of any size":          {changed(manifest, strings.Repeat(" ", maxManifest+1)), errdefs.InvalidArgument, ""},
		"signed, but with another format": {resigned(good, strings.Replace(good[0].text, `"format":1`, `"format":2`, 1)), errdefs.Unsupported, ""},
		"signed, but without a file":      {resigned(good, strings.Replace(good[0].text, Kernel, "other", 1)), errdefs.InvalidArgument, ""},
		"signed, but a name is a path":    {resigned(good, strings.Replace(good[0].text, Kernel, "../x", 1)), errdefs.InvalidArgument, ""},
		"signed, but no JSON":             {resigned(good, "{"), errdefs.InvalidArgument, ""},
		"signed, but of no version":       {resigned(good, strings.Replace(good[0].text, `"v2"`, `"v 2"`, 1)), errdefs.InvalidArgument, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, _, err := all(archive(t, tt.list), public(key("ours")))
			if !errdefs.Is(err, tt.class) {
				t.Errorf("got %v, want a %s error", err, tt.class)
			}
			if got[Root] != tt.given {
				t.Errorf("%d bytes of the root were given out, want %d", len(got[Root]), len(tt.given))
			}
		})
	}
	if got, _, err := all(archive(t, append(slices.Clone(good), entry{"other", "x"})), public(key("ours"))); err != nil || len(got) != len(names) {
		t.Errorf("with a member that the manifest does not name: %d files, %v", len(got), err)
	}
	for name, keys := range map[string][]ed25519.PublicKey{"another key": public(key("another")), "no key": nil, "an empty key": {nil}} {
		if _, _, err := all(archive(t, good), keys); !errdefs.Is(err, errdefs.FailedPrecondition) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if _, _, err := all(archive(t, good)[:ChunkSize], public(key("ours"))); !errdefs.Is(err, errdefs.InvalidArgument) {
		t.Errorf("a bundle that ends early: got %v", err)
	}
}

// resigned are the members with another manifest, signed with the key.
func resigned(list []entry, manifest string) []entry {
	list = slices.Clone(list)
	list[0].text = manifest
	list[1].text = string(ed25519.Sign(key("ours"), signed([]byte(manifest))))
	return list
}

func TestWriteRefuses(t *testing.T) {
	less := content()
	delete(less, Kernel)
	for name, m := range map[string]Manifest{"a version that is none": {Version: "v 2"}, "no version": {}} {
		if err := Write(io.Discard, m, sources(content()), key("ours")); !errdefs.IsInvalid(err) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if err := Write(io.Discard, Manifest{Version: "v2"}, sources(less), key("ours")); !errdefs.IsInvalid(err) {
		t.Errorf("without a kernel: got %v", err)
	}
}

func TestCheck(t *testing.T) {
	m := Manifest{Version: "v2", MinVersion: "v1.5", Architecture: "amd64", Files: []File{{Name: Root, Size: 100}}}
	fits := System{Version: "v1.9", Architecture: "amd64", SlotSize: 100}
	with := func(f func(*System)) System { s := fits; f(&s); return s }
	for name, tt := range map[string]struct {
		on    System
		class errdefs.Class
	}{
		"it fits":                  {fits, errdefs.Internal},
		"again":                    {with(func(s *System) { s.Version = "v2" }), errdefs.Internal},
		"an unknown version":       {with(func(s *System) { s.Version = "" }), errdefs.Internal},
		"another architecture":     {with(func(s *System) { s.Architecture = "arm64" }), errdefs.InvalidArgument},
		"a slot that is too small": {with(func(s *System) { s.SlotSize = 99 }), errdefs.FailedPrecondition},
		"a downgrade":              {with(func(s *System) { s.Version = "v2.1" }), errdefs.FailedPrecondition},
		"a downgrade, allowed":     {with(func(s *System) { s.Version, s.AllowDowngrade = "v2.1", true }), errdefs.Internal},
		"too old":                  {with(func(s *System) { s.Version = "v1.4" }), errdefs.FailedPrecondition},
	} {
		if err := m.Check(tt.on); tt.class == errdefs.Internal && err != nil || tt.class != errdefs.Internal && !errdefs.Is(err, tt.class) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestCompare(t *testing.T) {
	order := []string{"0.9", "v1.2~rc1", "1.2", "v1.2-5-gabc", "1.2.1", "1.10", "1.10-dirty", "2", "10"}
	for i, a := range order {
		for j, b := range order {
			want := min(1, max(-1, i-j))
			if got := Compare(a, b); got != want {
				t.Errorf("Compare(%s, %s) = %d, want %d", a, b, got, want)
			}
		}
	}
	if Compare("v1.02", "1.2") != 0 {
		t.Error("zeros before a number count")
	}
}

// Whatever the bytes are, nothing is given out that was not signed: not a file, nor a byte of one that differs.
func FuzzOpen(f *testing.F) {
	small := map[string]string{Version: "v2\n", Kernel: "k", Initramfs: "i", Root: "root"}
	whole := written(f, Manifest{Version: "v2", Architecture: "amd64"}, small)
	f.Add(whole)
	f.Add(whole[:len(whole)/2])
	f.Add([]byte("no archive"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, _, err := all(b, public(key("ours")))
		for name, text := range got {
			if err == nil && text != small[name] || !strings.HasPrefix(small[name], text) {
				t.Fatalf("%s is %q, which nobody signed", name, text)
			}
		}
	})
}
