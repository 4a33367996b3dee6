//go:build vm

package qemu

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/proc"
)

// TestLiveShare: a guest gives its live share back, is saved, and has it again, as often as it likes. A guest that resumes from what was saved gets
// a share of its own.
func TestLiveShare(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"source", "clone"} {
		if err := os.Mkdir(root+"/"+name, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(root+"/"+name+"/f", []byte("of the "+name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	live := func(name string) (hypervisor.Share, string) {
		s := hypervisor.Share{Tag: "live", Path: filepath.Join(root, "live-"+name), Live: true}
		t.Cleanup(func() {
			if err := errors.Join(proc.Detach(filepath.Join(s.Path, "c", "0")), proc.Detach(s.Path)); err != nil {
				t.Error(err)
			}
		})
		return s, filepath.Join(s.Path, "c", "0")
	}
	give := func(i hypervisor.Instance, name string) hypervisor.FolderPlugger {
		t.Helper()
		plugger, _ := hypervisor.As[hypervisor.FolderPlugger](i)
		_, at := live(name)
		if err := plugger.PlugFolder(t.Context(), at, hypervisor.Share{Root: root, Path: filepath.Join(root, name)}); err != nil {
			t.Fatal(err)
		}
		return plugger
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	p := a.plan(t)
	share, _ := live("source")
	p.Shares = []hypervisor.Share{share}
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	plugger := give(i, "source")
	const look = "mkdir -p /m; until mount -t virtiofs live /m 2>/dev/null; do sleep 0.05; done; cat /m/c/0/f"
	if got := told(t, i, look); got != "of the source" {
		t.Fatalf("at first: %q", got)
	}
	var s hypervisor.SavePlan
	for round := range 3 {
		told(t, i, "umount /m; echo end")
		must(plugger.UnplugShare(t.Context(), "live"))
		must(plugger.UnplugShare(t.Context(), "live"))
		s = saved(t)
		doSave(t, i, s)
		must(plugger.PlugShare(t.Context(), "live"))
		must(plugger.PlugShare(t.Context(), "live"))
		if got := told(t, i, look); got != "of the source" {
			t.Fatalf("round %d: %q", round, got)
		}
	}
	to := from(t, p, s)
	share, _ = live("clone")
	to.Shares, to.Incoming.Alone = []hypervisor.Share{share}, true
	j := start(t, d, to)
	plugger = give(j, "clone")
	must(plugger.PlugShare(t.Context(), "live"))
	if got := told(t, j, look); got != "of the clone" {
		t.Errorf("resumed: %q", got)
	}
	if got := told(t, i, "cat /m/c/0/f"); got != "of the source" {
		t.Errorf("the source: %q", got)
	}
}
