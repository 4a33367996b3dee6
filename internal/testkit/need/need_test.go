package need

import (
	"fmt"
	"os"
	"path/filepath"
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

func TestHypervisorIsFoundOrSkipped(t *testing.T) {
	dir := t.TempDir()
	want := filepath.Join(dir, "no-such-vmm")
	t.Setenv("PATH", t.TempDir())
	t.Setenv(RequireEnv, "1")
	t.Setenv("COCOON_TEST_BIN", dir)
	r := &recorder{TB: t}
	Hypervisor(r, "no-such-vmm")
	if r.failed != "" || !strings.Contains(r.skipped, "make hypervisors") {
		t.Errorf("skipped %q, failed %q", r.skipped, r.failed)
	}
	if err := os.WriteFile(want, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if got := Hypervisor(t, "no-such-vmm"); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
