package translate

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"cocoonstack.io/cocoon/internal/image"
)

// A mounted ConfigMap changes by one rename of the link ..data; the links to its files stay the same.
func TestConfigMapsAreFollowed(t *testing.T) {
	dir := t.TempDir()
	publish := func(version string) {
		if err := os.Mkdir(filepath.Join(dir, "..v"+version), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, "..v"+version), "m.yaml", "translations: [{name: x, url: example.net/v"+version+"}]")
		if err := os.Symlink("..v"+version, filepath.Join(dir, "..tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	publish("1")
	if err := os.Symlink("..data/m.yaml", filepath.Join(dir, "m.yaml")); err != nil {
		t.Fatal(err)
	}
	tr := newTranslator(t, Options{Dir: dir})
	wantURL(t, tr, "x", "https://example.net/v1")
	publish("2")
	wantURL(t, tr, "x", "https://example.net/v2")
	wantProblems(t, tr)
}

func TestFilesAreReadWhenTheyChanged(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "m.yaml", "translations: [{name: x, url: example.net/x}]")
	f := folder{path: dir}
	if !f.refresh() {
		t.Error("the first look sees nothing")
	}
	first := f.files["m.yaml"]
	if f.refresh() || f.files["m.yaml"] != first {
		t.Error("nothing changed, and something is told")
	}
	write(t, dir, "m.yaml", "translations: [{name: x, url: example.net/y}]")
	if !f.refresh() || f.files["m.yaml"] == first {
		t.Error("a change is not seen")
	}
}

func TestStrangeFilesDoNotHold(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("loop", filepath.Join(dir, "loop")); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "large", strings.Repeat("#", maxMapping+1))
	write(t, dir, "z", "translations: [{name: x, url: example.net/x}]")
	tr := newTranslator(t, Options{Dir: dir})
	wantURL(t, tr, "x", "https://example.net/x")
	wantProblems(t, tr, "larger than", "symbolic links", "not a regular file")

	tr = newTranslator(t, Options{Dir: filepath.Join(dir, "z")})
	wantProblems(t, tr, "folder of mappings cannot be read")
}

func TestAllAtOnce(t *testing.T) {
	dir := t.TempDir()
	tr := newTranslator(t, Options{Dir: dir, Regexps: true})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := range 20 {
				text := fmt.Sprintf("translations: [{name: x%d, url: example.net/%d}, {}]", i, n)
				tr.Set(fmt.Sprint("source", i), []image.Mapping{{Name: "m", YAML: []byte(text)}})
				if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), []byte(text), 0o600); err != nil {
					t.Error(err)
				}
				if _, err := tr.Translate(fmt.Sprintf("x%d", i)); err != nil {
					t.Error(err)
				}
				tr.Problems()
				tr.Warnings()
			}
		})
	}
	wg.Wait()
	if n := len(tr.Problems()); n != 8 {
		t.Errorf("%d problems", n)
	}
}
