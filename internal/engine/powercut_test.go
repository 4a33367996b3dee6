package engine_test

import (
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// disk is what remains of a journal after a power cut: its files as they were at the last sync.
type disk struct {
	t   *testing.T
	dir string
}

func (d disk) synced(path string) func() {
	return func() {
		for _, suffix := range []string{"", "-wal"} {
			text, err := os.ReadFile(path + suffix)
			if err != nil {
				d.t.Error(err)
			}
			if err := os.WriteFile(filepath.Join(d.dir, "journal.db"+suffix), text, 0o600); err != nil {
				d.t.Error(err)
			}
		}
	}
}

// records returns the records that a power cut now would leave, by name.
func (d disk) records() map[string]vm.Record {
	d.t.Helper()
	copied := d.t.TempDir()
	for _, suffix := range []string{"", "-wal"} {
		text, err := os.ReadFile(filepath.Join(d.dir, "journal.db"+suffix))
		if err != nil {
			d.t.Fatalf("nothing was ever synced: %v", err)
		}
		if err := os.WriteFile(filepath.Join(copied, "journal.db"+suffix), text, 0o600); err != nil {
			d.t.Fatal(err)
		}
	}
	j, err := sqlite.Open(d.t.Context(), sqlite.Config{Path: filepath.Join(copied, "journal.db")})
	if err != nil {
		d.t.Fatal(err)
	}
	defer j.Close()
	all, unsettled, err := j.Load(d.t.Context())
	if err != nil || len(unsettled) > 0 {
		d.t.Errorf("unsettled: %+v, %v", unsettled, err)
	}
	out := map[string]vm.Record{}
	for _, r := range all {
		out[r.Spec.Name] = r
	}
	return out
}

// TestPowerCut cuts the power after each verb has returned: its result is on the disk.
func TestPowerCut(t *testing.T) {
	d := disk{t, t.TempDir()}
	r := newRig(t, func(r *rig) { r.file.Synced = d.synced(filepath.Join(r.dir, "state", "journal.db")) })
	ctx := t.Context()
	holds := func(verb, name string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", verb, err)
		}
		want, err := r.Inspect(ctx, name)
		got, there := d.records()[name] //nolint:contextcheck // it opens a copy of the files, on a context of its own
		if errdefs.IsNotFound(err) {
			if there {
				t.Errorf("%s: a power cut brings %s back", verb, name)
			}
			return
		}
		if !there || got.ID != want.ID || got.State != want.State || got.PID != want.PID || got.Snapshot != want.Snapshot {
			t.Errorf("%s: what a power cut leaves, compared with what the verb answered: %s", verb, diff.Of(want, got))
		}
	}
	_, err := r.Create(ctx, spec("cold"))
	holds("create", "cold", err)
	_, err = r.Start(ctx, "cold")
	holds("start", "cold", err)
	_, err = r.Launch(ctx, spec("web"))
	holds("launch", "web", err)
	r.await("web", "ready", ready)
	_, err = r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	holds("save", "web", err)
	_, err = r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "copy"})
	holds("clone", "copy", err)
	_, err = r.Hibernate(ctx, "web", "")
	holds("hibernate", "web", err)
	_, err = r.Wake(ctx, "web")
	holds("wake", "web", err)
	_, err = r.Restore(ctx, "web", "gold")
	holds("restore", "web", err)
	_, err = r.Restart(ctx, "cold", 0)
	holds("restart", "cold", err)
	_, err = r.Stop(ctx, "cold", 0)
	holds("stop", "cold", err)
	holds("remove", "cold", r.Remove(ctx, "cold", true))
}
