package engine_test

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

func withVolumes() vm.Spec {
	s := spec("web")
	s.Volumes = []vm.Volume{
		{Name: "conf", Kind: vm.VolumeFiles, Files: content("one")},
		{Name: "tmp", Kind: vm.VolumeEmpty},
	}
	s.Mounts = []vm.Mount{{Volume: "conf", Path: "/etc/conf"}, {Volume: "tmp", Path: "/data"}}
	return s
}

func content(text string) []vm.VolumeFile {
	return []vm.VolumeFile{{Path: "key", Data: []byte(text), Mode: 0o644}}
}

func (r *rig) volume(id vm.ID) string {
	files := r.world.Guest(id).Volume("conf")
	if len(files) != 1 {
		return ""
	}
	return string(files[0].Data)
}

func TestVolumesReachTheGuest(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec := r.must(r.Launch(ctx, withVolumes()))
	if len(rec.Spec.Volumes[0].Files) > 0 {
		t.Error("the record holds the content of a volume")
	}
	r.await("web", "ready", ready)
	told := r.world.Guest(rec.ID).Identity()
	if r.volume(rec.ID) != "one" || len(told.Volumes) != 2 || len(told.Mounts) != 2 || len(told.Volumes[0].Files) > 0 {
		t.Errorf("the guest has %q and was told %+v", r.volume(rec.ID), told)
	}
	update := func(text string) {
		t.Helper()
		if err := r.UpdateVolume(ctx, "web", "conf", content(text)); err != nil {
			t.Fatal(err)
		}
	}
	update("two")
	if got := r.volume(rec.ID); got != "two" {
		t.Errorf("after an update the guest has %q", got)
	}
	r.restart() // of the daemon: the guest gets the last content again
	r.await("web", "ready", ready)
	update("three")
	r.must(r.Stop(ctx, "web", 0))
	update("four")
	rec = r.must(r.Start(ctx, "web"))
	r.await("web", "ready again", ready)
	if got := r.volume(rec.ID); got != "four" {
		t.Errorf("after a start the guest has %q", got)
	}
	r.world.Guest(rec.ID).Drop()
	update("five") // whether the session is lost, connecting or open again
	r.await("web", "ready", ready)
	for { // the lost session may still count as ready
		_, err := r.Stats(ctx, "web")
		if err == nil {
			break
		}
		if !errdefs.IsUnavailable(err) {
			t.Fatal(err)
		}
	}
	if got := r.volume(rec.ID); got != "five" {
		t.Errorf("after a lost session the guest has %q", got)
	}
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	r.clean()
}

func TestUpdateVolumeRefuses(t *testing.T) {
	var full atomic.Bool // the guest has no memory left
	r, ctx := newRig(t, func(r *rig) {
		r.world.Fault = func(call string) error {
			if full.Load() && call == "agent.PutVolume" {
				return errdefs.Exhaustedf("no memory left")
			}
			return nil
		}
	}), t.Context()
	rec := r.must(r.Launch(ctx, withVolumes()))
	r.await("web", "ready", ready)
	for name, tt := range map[string]struct {
		ref, volume, path string
		want              errdefs.Class
	}{
		"unknown vm":     {"nope", "conf", "a", errdefs.NotFound},
		"unknown volume": {"web", "nope", "a", errdefs.NotFound},
		"empty volume":   {"web", "tmp", "a", errdefs.InvalidArgument},
		"path":           {"web", "conf", "../../a", errdefs.InvalidArgument},
	} {
		err := r.UpdateVolume(ctx, tt.ref, tt.volume, []vm.VolumeFile{{Path: tt.path}})
		wantClass(t, name, err, tt.want)
	}
	full.Store(true)
	wantClass(t, "a guest that cannot take it", r.UpdateVolume(ctx, "web", "conf", content("two")), errdefs.ResourceExhausted)
	full.Store(false)
	if got := r.volume(rec.ID); got != "one" {
		t.Errorf("the guest has %q", got)
	}
}

func TestContentIsSecretAndPrivate(t *testing.T) {
	const secret = "s3cr3t-content"
	r, ctx := newRig(t), t.Context()
	s := withVolumes()
	s.Volumes[0].Files = content(secret)
	rec := r.must(r.Launch(ctx, s))
	r.await("web", "ready", ready)
	if text, err := json.Marshal(rec); err != nil || bytes.Contains(text, []byte(secret)) {
		t.Errorf("the record's JSON holds it (%v)", err)
	}
	found := 0
	err := filepath.WalkDir(filepath.Join(r.dir, "state"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var files []vm.VolumeFile
		if json.Unmarshal(text, &files) == nil && len(files) == 1 && string(files[0].Data) == secret {
			found++
			file, dir := must(t, path), must(t, filepath.Dir(path))
			if file != 0o600 || dir != 0o700 {
				t.Errorf("%s has mode %o in a folder of %o", path, file, dir)
			}
		} else if bytes.Contains(text, []byte(secret)) {
			t.Errorf("%s holds it", path)
		}
		return nil
	})
	if err != nil || found != 1 {
		t.Errorf("found %d times: %v", found, err)
	}
	path := filepath.Join(r.dir, "state/vms", string(rec.ID), "volumes/conf.json")
	r.must(r.Stop(ctx, "web", 0))
	if err := os.WriteFile(path, []byte(`[{"path":"`+secret), 0o600); err != nil {
		t.Fatal(err)
	}
	r.must(r.Start(ctx, "web"))
	rec = r.await("web", "stopped again", stopped)
	if rec.Reason != vm.ReasonStartFailed || !strings.Contains(rec.Message, "damaged") || strings.Contains(rec.Message, secret) {
		t.Errorf("with damaged content: %s, %s", rec.Reason, rec.Message)
	}
}

func must(t *testing.T, path string) fs.FileMode {
	t.Helper()
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return st.Mode().Perm()
}

// TestUpdatesRace: however updates and reconnects overlap, the guest ends up with the last content.
func TestUpdatesRace(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	rec := r.must(r.Launch(ctx, withVolumes()))
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 25 {
				if err := r.UpdateVolume(ctx, "web", "conf", content(string(rune('a'+i)))); err != nil {
					t.Error(err)
				}
				r.world.Guest(rec.ID).Drop()
			}
		})
	}
	wg.Wait()
	r.await("web", "ready", ready)
	// Once a session answers that is not one of the dropped ones, the guest has the volumes.
	for _, err := r.Stats(ctx, "web"); err != nil; _, err = r.Stats(ctx, "web") {
		if !errdefs.IsUnavailable(err) {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(filepath.Join(r.dir, "state/vms", string(rec.ID), "volumes/conf.json"))
	if err != nil {
		t.Fatal(err)
	}
	var files []vm.VolumeFile
	if err := json.Unmarshal(text, &files); err != nil || r.volume(rec.ID) != string(files[0].Data) {
		t.Errorf("the guest has %q, written is %s (%v)", r.volume(rec.ID), text, err)
	}
}
