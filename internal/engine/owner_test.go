package engine_test

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// as returns the context of a request on behalf of a namespace.
func (r *rig) as(namespace string) context.Context {
	return vm.OnBehalf(r.t.Context(), vm.Owner{Namespace: namespace})
}

// TestOwners calls every verb that names a VM or a snapshot on behalf of another owner: all return NotFound, and
// nothing changes.
func TestOwners(t *testing.T) {
	r := newRig(t)
	mine := r.must(r.Launch(r.as("prod"), spec("db")))
	r.must(r.Launch(r.as("dev"), spec("db"))) // names are unique per owner
	if _, err := r.Launch(r.as("prod"), spec("db")); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a second db of prod: %v", err)
	}
	r.await(string(mine.ID), "ready", ready)
	saved, err := r.SaveSnapshot(t.Context(), "prod/db", vm.SaveSpec{Name: "kept"}) // by the operator
	if err != nil || saved.Owner.Namespace != "prod" {
		t.Fatalf("saved by the operator it belongs to %+v, %v", saved.Owner, err)
	}
	ctx := r.as("dev")
	for _, ref := range []string{string(mine.ID), string(mine.ID)[:12], "prod/db"} {
		for what, try := range map[string]func() error{
			"inspect":   func() error { _, err := r.Inspect(ctx, ref); return err },
			"start":     func() error { _, err := r.Start(ctx, ref); return err },
			"stop":      func() error { _, err := r.Stop(ctx, ref, 0); return err },
			"restart":   func() error { _, err := r.Restart(ctx, ref, 0); return err },
			"remove":    func() error { return r.Remove(ctx, ref, true) },
			"save":      func() error { _, err := r.SaveSnapshot(ctx, ref, vm.SaveSpec{Name: "x"}); return err },
			"hibernate": func() error { _, err := r.Hibernate(ctx, ref, ""); return err },
			"wake":      func() error { _, err := r.Wake(ctx, ref); return err },
			"restore":   func() error { _, err := r.Restore(ctx, ref, "kept"); return err },
			"exec": func() error {
				_, err := r.Exec(ctx, ref, guest.Exec{Command: []string{"true"}}, guest.Streams{})
				return err
			},
			"attach":       func() error { return r.Attach(ctx, ref, guest.Attach{}, guest.Streams{}) },
			"forward":      func() error { return r.Forward(ctx, ref, 80, guest.Streams{Stdin: os.Stdin, Stdout: io.Discard}) },
			"logs":         func() error { return r.Logs(ctx, ref, guest.LogOptions{}, func(guest.LogEntry) error { return nil }) },
			"console":      func() error { _, err := r.Console(ctx, ref); return err },
			"screen":       func() error { _, err := r.Display(ctx, ref, false); return err },
			"picture":      func() error { _, err := r.Screenshot(ctx, ref, false); return err },
			"stats":        func() error { _, err := r.Stats(ctx, ref); return err },
			"what":         func() error { _, err := r.Describe(ctx, ref); return err },
			"logins":       func() error { return r.SetLogins(ctx, ref, guest.Logins{}) },
			"attach NIC":   func() error { _, err := r.AttachNIC(ctx, ref, vm.NICSpec{Network: "lab"}); return err },
			"detach NIC":   func() error { _, err := r.DetachNIC(ctx, ref, mine.NICs[0].MAC); return err },
			"set link":     func() error { _, err := r.SetLink(ctx, ref, mine.NICs[0].MAC, true); return err },
			"release NICs": func() error { _, err := r.ReleaseNICs(ctx, ref); return err },
			"pause":        func() error { _, err := r.Pause(ctx, ref); return err },
			"unpause":      func() error { _, err := r.Unpause(ctx, ref); return err },
			"reboot":       func() error { _, err := r.Reboot(ctx, ref, true); return err },
			"size":         func() error { _, err := r.Resize(ctx, ref, mine.Spec.Size()); return err },
			"freeze":       func() error { return r.Freeze(ctx, ref, time.Minute) },
			"thaw":         func() error { _, err := r.Thaw(ctx, ref); return err },
			"volume":       func() error { return r.UpdateVolume(ctx, ref, "v", nil) },
			"kill":         func() error { return r.KillContainer(ctx, ref, "c", 1, 0) },
			"release":      func() error { return r.ReleaseContainer(ctx, ref, "c") },
			"add": func() error {
				_, err := r.AddContainer(ctx, ref, vm.Container{Name: "c", Image: "demo", Kind: vm.ContainerEphemeral})
				return err
			},
			"start container":  func() error { _, err := r.StartContainer(ctx, ref, "c"); return err },
			"remove container": func() error { return r.RemoveContainer(ctx, ref, "c") },
			"resize": func() error {
				_, err := r.ResizeContainers(ctx, ref, map[string]vm.Resources{"c": {}})
				return err
			},
		} {
			if err := try(); !errdefs.IsNotFound(err) {
				t.Errorf("%s %s on behalf of dev: %v", what, ref, err)
			}
		}
	}
	for _, ref := range []string{"kept", saved.ID, "prod/kept"} {
		if _, err := r.Clone(ctx, vm.CloneSpec{Snapshot: ref, Name: "thief"}); !errdefs.IsNotFound(err) {
			t.Errorf("clone of %s on behalf of dev: %v", ref, err)
		}
		if err := r.RemoveSnapshot(ctx, ref); !errdefs.IsNotFound(err) {
			t.Errorf("removal of %s on behalf of dev: %v", ref, err)
		}
	}
	if got := r.must(r.Inspect(t.Context(), "prod/db")); got.State != vm.StateRunning || got.ID != mine.ID || got.Owner.Namespace != "prod" || got.NICs[0].LinkDown || got.Paused != "" {
		t.Errorf("after all that prod's VM is %+v", got)
	}
	all, err := r.List(ctx)
	if err != nil || len(all) != 1 || all[0].Owner.Namespace != "dev" {
		t.Errorf("dev has %+v, %v", all, err)
	}
	clone := r.must(r.Clone(r.as("prod"), vm.CloneSpec{Snapshot: "kept", Name: "db-2"}))
	if clone.Owner.Namespace != "prod" {
		t.Errorf("the clone belongs to %+v", clone.Owner)
	}
}

// TestOperatorShares checks that others can use what the operator offers and lists, and nothing else of the
// operator's.
func TestOperatorShares(t *testing.T) {
	r := newRig(t)
	offered := spec("hand-made")
	offered.Offered = []string{"prod"}
	r.must(r.Launch(t.Context(), offered))
	if _, err := r.Inspect(r.as("dev"), "hand-made"); !errdefs.IsNotFound(err) {
		t.Errorf("dev finds what is offered to prod: %v", err)
	}
	if got := r.must(r.Inspect(r.as("prod"), "hand-made")); !got.Owner.Operator() {
		t.Errorf("what is offered belongs to %+v", got.Owner)
	}
	r.source()
	r.saved("golden")
	dir := filepath.Join(r.dir, "exports", "golden")
	h, err := r.world.Snapshots().Hold(t.Context(), "golden")
	if err == nil {
		err = r.world.Snapshots().ExportDir(t.Context(), h, dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Clone(r.as("prod"), vm.CloneSpec{FromDir: dir, Name: "a"}); !errdefs.IsNotFound(err) {
		t.Errorf("clone from a folder that nobody lists: %v", err)
	}
	r.cfg.CloneDirs = []string{filepath.Dir(dir)}
	r.restart()
	r.must(r.Clone(r.as("prod"), vm.CloneSpec{FromDir: dir, Name: "a"}))
	if _, err := r.Clone(r.as("prod"), vm.CloneSpec{FromDir: filepath.Join(dir, "..", "..", "state"), Name: "b"}); !errdefs.IsNotFound(err) {
		t.Errorf("clone from beside the listed folder: %v", err)
	}
	if err := os.Symlink(filepath.Join(r.dir, "world", "snapshots"), filepath.Join(r.dir, "exports", "link")); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Clone(r.as("prod"), vm.CloneSpec{FromDir: filepath.Join(r.dir, "exports", "link"), Name: "c"}); !errdefs.IsNotFound(err) {
		t.Errorf("clone by a link that leads out of the listed folder: %v", err)
	}
}

// TestOwnersOfOldRecords opens a journal from before owners existed: VMs and their hibernation snapshots get the
// owners that their labels name.
func TestOwnersOfOldRecords(t *testing.T) {
	r := newRig(t)
	s := spec("db")
	s.Labels = map[string]string{"namespace": "prod"}
	r.must(r.Launch(t.Context(), s))
	r.await("db", "ready", ready)
	r.must(r.Hibernate(t.Context(), "db", "old"))
	r.cfg.OwnerOf = func(labels map[string]string) vm.Owner { return vm.Owner{Namespace: labels["namespace"]} }
	for range 2 { // a finished migration is not repeated
		r.restart()
		if got := r.must(r.Inspect(r.as("prod"), "db")); got.Owner.Namespace != "prod" || got.State != vm.StateHibernated {
			t.Errorf("the old VM is %+v", got)
		}
		if x, err := r.world.Snapshots().Get(r.as("prod"), "old"); err != nil || x.Owner.Namespace != "prod" {
			t.Errorf("what it sleeps in is %+v, %v", x, err)
		}
	}
	r.must(r.Wake(r.as("prod"), "db"))
}
