package cocoond

import (
	"log/slog"
	"slices"
	"testing"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/desired"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/journal/journaltest"
)

// Of the workloads that ran before an update, those are missed that shall run and do not run in this boot.
func TestMissedWorkloads(t *testing.T) {
	store, err := desired.Open(t.Context(), journaltest.NewDocuments(), time.Now, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	add := func(name string, fn func(*workload.Row)) {
		t.Helper()
		w := &capsulev1.Workload{Name: name, Kind: capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER, Container: &capsulev1.ContainerSpec{Image: "x"}}
		if _, err := store.Apply(t.Context(), w, false, func([]workload.Row) error { return nil }); err != nil {
			t.Fatal(err)
		}
		if _, err := store.Change(t.Context(), name, func(r *workload.Row) error { fn(r); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	add("runs", func(r *workload.Row) { r.Boot, r.Status().Ready = "now", true })
	add("ran-before-the-boot", func(r *workload.Row) { r.Boot, r.Status().Ready = "before", true })
	add("not-ready", func(r *workload.Row) { r.Boot = "now" })
	add("stopped", func(r *workload.Row) { r.Workload.DesiredState = capsulev1.DesiredState_DESIRED_STATE_STOPPED })
	add("done", func(r *workload.Row) { r.Done, r.Status().ExitCode = r.Hash(), new(int32) })
	add("new", func(*workload.Row) {})
	g := gates{desired: store, boot: "now"}
	if got, want := g.missing([]string{"runs", "ran-before-the-boot", "not-ready", "stopped", "done", "deleted"}), []string{"not-ready", "ran-before-the-boot"}; !slices.Equal(got, want) {
		t.Errorf("missing %q, want %q", got, want)
	}
	if got, want := g.running(), []string{"runs"}; !slices.Equal(got, want) {
		t.Errorf("running %q, want %q", got, want)
	}
}

// A folder of the root is no file system of its own; that of the kernel's processes is.
func TestOwnFileSystem(t *testing.T) {
	for dir, want := range map[string]bool{"/": false, "/proc": true} {
		if got, err := ownFileSystem(dir); err != nil || got != want {
			t.Errorf("%s: %v, %v", dir, got, err)
		}
	}
	if _, err := ownFileSystem("/none"); err == nil {
		t.Error("a folder that is missing has a file system")
	}
}
