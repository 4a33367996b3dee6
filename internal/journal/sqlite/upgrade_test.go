package sqlite

import (
	"database/sql"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/vm"
)

// testdata/v1.sql is a journal as the first build wrote it: a running VM, and one whose start was interrupted. Every
// later build must find what that build left, or an upgrade would lose its guests.
func TestUpgrade(t *testing.T) {
	text, err := os.ReadFile("testdata/v1.sql")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	db, err := sql.Open("sqlite", filepath.Join(dir, "journal.db"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), string(text)); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	j := open(t, dir, 0)
	defer j.Close()
	records, intents, err := j.Load(t.Context())
	if err != nil || len(records) != 2 || len(intents) != 1 {
		t.Fatalf("%d records, %d intents, %v", len(records), len(intents), err)
	}
	byName := map[string]vm.Record{}
	for _, r := range records {
		byName[r.Spec.Name] = r
	}
	web, half := byName["web"], byName["half"]
	if web.State != vm.StateRunning || web.PID != 4711 || !web.AgentReady || web.Spec.Memory != 512<<20 || web.Spec.Labels["cocoonstack.io/node"] != "n" ||
		len(web.NICs) != 1 || web.NICs[0].IP != "10.88.0.2" || len(web.Disks) != 1 || web.Disks[0].Backing == nil || len(web.Handle) == 0 || web.StartedAt.IsZero() {
		t.Errorf("the VM that runs: %+v", web)
	}
	if !web.Itself() || web.Snapshot != "" || web.Cloned {
		t.Error("a VM from before snapshots is taken for a clone")
	}
	if half.State != vm.StateStopped || half.ExitCode == nil || *half.ExitCode != 3 || intents[0].ID != half.ID || intents[0].Op != "start" {
		t.Errorf("the VM that was cut off: %+v, %+v", half, intents[0])
	}
	events, err := j.Events(t.Context(), 0, 100)
	if err != nil || len(events) == 0 || events[len(events)-1].Revision != j.Revision() {
		t.Errorf("%d events, revision %d, %v", len(events), j.Revision(), err)
	}
	web.Message = "written by this build"
	if _, err := j.Update(t.Context(), web); err != nil {
		t.Errorf("the old journal cannot be written: %v", err)
	}
}
