package need

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// recorder is a testing.TB that records what a gate did to it.
type recorder struct {
	testing.TB
	skipped, failed string
}

func (r *recorder) Helper()           {}
func (r *recorder) Skip(args ...any)  { r.skipped = fmt.Sprint(args...) }
func (r *recorder) Fatal(args ...any) { r.failed = fmt.Sprint(args...) }

func TestMissingSkipsOrFails(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	t.Setenv(RequireEnv, "")
	r := &recorder{TB: t}
	Tool(r, "no-such-tool")
	if r.failed != "" || !strings.Contains(r.skipped, "no-such-tool is needed") {
		t.Errorf("on a laptop: skipped %q, failed %q", r.skipped, r.failed)
	}
	t.Setenv(RequireEnv, "1")
	r = &recorder{TB: t}
	Tool(r, "no-such-tool")
	if r.skipped != "" || !strings.Contains(r.failed, "no-such-tool is needed") {
		t.Errorf("where required: skipped %q, failed %q", r.skipped, r.failed)
	}
}

func TestToolFindsAProgram(t *testing.T) {
	dir := t.TempDir()
	want := filepath.Join(dir, "tool")
	if err := os.WriteFile(want, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir)
	if got := Tool(t, "tool"); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestBuiltFindsTheCheckout(t *testing.T) {
	if got := Built(t, "go.mod", "true"); !filepath.IsAbs(got) {
		t.Errorf("got %q", got)
	}
}

// TestHypervisorIsFoundOrSkipped: a program is found in PATH, in COCOON_TEST_BIN, in bin/hypervisors and in shared/bin beside the checkout. Where
// it is in none of them, the test is skipped and says where it may be.
func TestHypervisorIsFoundOrSkipped(t *testing.T) {
	top, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	checkout, inPath, named := filepath.Join(top, "checkout"), filepath.Join(top, "path"), filepath.Join(top, "named")
	for _, dir := range []string{checkout, inPath, named, filepath.Join(checkout, "bin/hypervisors"), filepath.Join(top, "shared/bin")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(checkout, "go.mod"), []byte("module cocoonstack.io/cocoon\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Chdir(checkout)
	t.Setenv("PATH", inPath)
	t.Setenv(RequireEnv, "1")
	for _, bin := range []string{"", named} {
		t.Setenv("COCOON_TEST_BIN", bin)
		r := &recorder{TB: t}
		Hypervisor(r, "vmm")
		if r.failed != "" || !strings.Contains(r.skipped, "make hypervisors") || !strings.Contains(r.skipped, "PATH or ../shared/bin") || !strings.Contains(r.skipped, "COCOON_TEST_BIN") {
			t.Errorf("skipped %q, failed %q", r.skipped, r.failed)
		}
	}
	for _, dir := range []string{inPath, named, filepath.Join(checkout, "bin/hypervisors"), filepath.Join(top, "shared/bin")} {
		want := filepath.Join(dir, "vmm")
		if err := os.WriteFile(want, []byte("#!/bin/sh\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		if got := Hypervisor(t, "vmm"); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		if dir != inPath && !slices.Contains(HypervisorDirs(), dir) {
			t.Errorf("scripts do not find what is in %s", dir)
		}
		if err := os.Remove(want); err != nil {
			t.Fatal(err)
		}
	}
}
