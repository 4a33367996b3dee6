package local_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
)

// aged fills a store with images a, b and c of about 1 MiB each, used three, two and one hours ago.
func aged(t *testing.T) (s *local.Store, dir string, ids map[string]string) {
	t.Helper()
	dir, ids = t.TempDir(), map[string]string{}
	s = open(t, dir)
	for i, name := range []string{"a", "b", "c"} {
		img := put(t, s, name, strings.Repeat(name, 1<<20), web)
		ids[name] = img.ID
		at := time.Now().Add(time.Duration(i-3) * time.Hour)
		if err := os.Chtimes(filepath.Join(dir, "data", strings.TrimPrefix(img.ID, "sha256:"), "used"), at, at); err != nil {
			t.Fatal(err)
		}
	}
	return s, dir, ids
}

func TestCollectByLimits(t *testing.T) {
	const gib = 1 << 30
	for name, c := range map[string]struct {
		limits      image.GCLimits
		used, avail int64 // MiB of the file system
		busy        string
		keep        string
	}{
		"nothing to do":        {keep: "abc"},
		"age":                  {limits: image.GCLimits{MaxAge: 90 * time.Minute}, keep: "c"},
		"age, in use":          {limits: image.GCLimits{MaxAge: time.Minute}, busy: "b", keep: "b"},
		"age, young":           {limits: image.GCLimits{MaxAge: time.Minute, MinAge: 90 * time.Minute}, keep: "c"},
		"size":                 {limits: image.GCLimits{MaxSize: 2*(1<<20) + 1<<19}, keep: "bc"},
		"size of nothing":      {limits: image.GCLimits{MaxSize: 1}, keep: ""},
		"size, in use":         {limits: image.GCLimits{MaxSize: 2*(1<<20) + 1<<19}, busy: "a", keep: "ac"},
		"size, plenty":         {limits: image.GCLimits{MaxSize: gib}, keep: "abc"},
		"pressure":             {limits: image.GCLimits{High: 85, Low: 84}, used: 86, avail: 14, keep: "c"},
		"pressure, not yet":    {limits: image.GCLimits{High: 87, Low: 10}, used: 86, avail: 14, keep: "abc"},
		"pressure, no low":     {limits: image.GCLimits{High: 86}, used: 86, avail: 14, keep: "bc"},
		"pressure, by others":  {limits: image.GCLimits{High: 85, Low: 80}, used: 99, avail: 1, keep: ""},
		"pressure, young":      {limits: image.GCLimits{High: 85, Low: 80, MinAge: 24 * time.Hour}, used: 99, avail: 1, keep: "abc"},
		"pressure, dry run":    {limits: image.GCLimits{High: 85, Low: 80, DryRun: true}, used: 99, avail: 1, keep: "abc"},
		"size, first of all":   {limits: image.GCLimits{MaxSize: 1, DryRun: true}, keep: "abc"},
		"unnamed, all allowed": {limits: image.GCLimits{MaxAge: 1000 * time.Hour, MaxSize: gib}, keep: "abc"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, dir, ids := aged(t)
			if c.used > 0 {
				s.SetDisk(c.used<<20, c.avail<<20)
			}
			before, err := s.Usage(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			got, err := s.Collect(t.Context(), c.limits, func(d string) bool { return d == ids[c.busy] })
			if err != nil {
				t.Fatal(err)
			}
			if left := strings.Join(names(t, s), ""); left != c.keep {
				t.Errorf("left: %q, want %q", left, c.keep)
			}
			after, err := s.Usage(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			want := 3 - len(c.keep)
			if c.limits.DryRun {
				want = 3
			}
			if len(got.Images) != want || (got.Freed > 0) != (want > 0) {
				t.Errorf("reported %+v", got)
			}
			if freed := before - after; !c.limits.DryRun && freed < got.Freed {
				t.Errorf("freed %d bytes and said %d", freed, got.Freed)
			}
			if d, o := entries(t, dir, "data"), entries(t, dir, "origins"); len(d) != len(c.keep) || len(o) != len(c.keep) {
				t.Errorf("data %v, origins %v", d, o)
			}
			if left := leftovers(t, dir); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

func TestCollectRefusesNonsense(t *testing.T) {
	s := open(t, t.TempDir())
	for _, l := range []image.GCLimits{{High: 101}, {High: -1}, {Low: 101}, {High: 50, Low: 60}, {MaxSize: -1}, {MaxAge: -1}, {MinAge: -1}} {
		if _, err := s.Collect(t.Context(), l, nil); !errdefs.IsInvalid(err) {
			t.Errorf("%+v: %v", l, err)
		}
	}
}

func TestUseKeepsAnImageYoung(t *testing.T) {
	s, _, ids := aged(t)
	img, err := s.Get(t.Context(), ids["a"])
	if err != nil || time.Since(img.UsedAt) < time.Hour {
		t.Fatalf("%+v %v", img, err)
	}
	if _, err := s.Prepare(t.Context(), img, image.Layout{Dir: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	s.Touch(ids["b"])
	s.Touch("sha256:nonsense")
	s.Touch("../../x")
	if _, err := s.Collect(t.Context(), image.GCLimits{MaxAge: 30 * time.Minute}, nil); err != nil {
		t.Fatal(err)
	}
	equal(t, "names", names(t, s), []string{"a", "b"})
}

func TestUnnamedContentGoesFirst(t *testing.T) {
	s, _, ids := aged(t)
	put(t, s, "c", "another", web) // the newest content loses its name
	got, err := s.Collect(t.Context(), image.GCLimits{MaxSize: 3 << 20}, nil)
	if err != nil || len(got.Images) != 0 {
		t.Errorf("%+v %v", got, err)
	}
	if _, err := s.Get(t.Context(), ids["c"]); !errdefs.IsNotFound(err) {
		t.Errorf("the unnamed content: %v", err)
	}
	equal(t, "names", names(t, s), []string{"a", "b", "c"})
}

func TestUnknownFilesStay(t *testing.T) {
	s, dir, _ := aged(t)
	unknown := []string{"data/notes", "data/" + strings.Repeat("g", 64), "origins/notes", "origins/x.txt", "links/.hidden", "layers/notes"}
	for _, f := range unknown {
		if err := os.WriteFile(filepath.Join(dir, f), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Collect(t.Context(), image.GCLimits{MaxSize: 1}, nil); err != nil {
		t.Fatal(err)
	}
	for _, f := range unknown {
		if _, err := os.Stat(filepath.Join(dir, f)); err != nil {
			t.Errorf("%s: %v", f, err)
		}
	}
}

func TestDamagedRecords(t *testing.T) {
	s, dir, ids := aged(t)
	record := func(name string) string {
		return filepath.Join(dir, "data", strings.TrimPrefix(ids[name], "sha256:"), "image.json")
	}
	layer := filepath.Join(dir, "layers", strings.Repeat("1", 64))
	if err := os.Mkdir(layer, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(record("a"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Collect(t.Context(), image.GCLimits{MaxSize: 1}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(record("a")); err != nil {
		t.Errorf("a named image that cannot be read went: %v", err)
	}
	if _, err := os.Stat(layer); err != nil {
		t.Errorf("a layer went while it is not known who needs it: %v", err)
	}
	if err := s.Remove(t.Context(), "a", nil); err != nil {
		t.Fatal(err)
	}
	if got := entries(t, dir, "data"); len(got) != 0 {
		t.Errorf("data holds %v", got)
	}
	if _, err := s.Collect(t.Context(), image.GCLimits{}, nil); err != nil {
		t.Fatal(err)
	}
	if got := entries(t, dir, "layers"); len(got) != 0 {
		t.Errorf("layers holds %v", got)
	}
}

// TestLayersGoWithTheirLastImage creates layers in the form in which records of container images name them.
func TestLayersGoWithTheirLastImage(t *testing.T) {
	s, dir, ids := aged(t)
	for _, k := range []string{"1", "2", "3"} {
		if err := os.Mkdir(filepath.Join(dir, "layers", strings.Repeat(k, 64)), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	name := func(image string, layers ...string) {
		path := filepath.Join(dir, "data", strings.TrimPrefix(ids[image], "sha256:"), "image.json")
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var quoted []string
		for _, l := range layers {
			quoted = append(quoted, `"`+strings.Repeat(l, 64)+`"`)
		}
		out := strings.Replace(string(data), "{", `{"layers": [`+strings.Join(quoted, ",")+`],`, 1)
		if err := os.WriteFile(path, []byte(out), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	name("a", "1", "2")
	name("b", "2", "2")
	for _, step := range []struct {
		do   func() error
		left []string
	}{
		{func() error { _, err := s.Collect(t.Context(), image.GCLimits{}, nil); return err }, []string{"1", "2"}},
		{func() error { return s.Remove(t.Context(), "a", func(d string) bool { return d == ids["a"] }) }, []string{"1", "2"}},
		{func() error { return s.Remove(t.Context(), "c", nil) }, []string{"2"}},
		{func() error { _, err := s.Collect(t.Context(), image.GCLimits{MaxSize: 1}, nil); return err }, nil},
	} {
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		var left []string
		for _, l := range entries(t, dir, "layers") {
			left = append(left, l[:1])
		}
		if !slices.Equal(left, step.left) {
			t.Errorf("layers %v, want %v", left, step.left)
		}
	}
}
