//go:build lvmguest

package lvm_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/lvm"
)

// contents are those of the volumes one and two, and of the snapshots of the same names.
var contents = map[string][]byte{"one": bytes.Repeat([]byte("a"), mib), "two": bytes.Repeat([]byte("b"), mib)}

// action is one operation of a process that is killed, by the number of lvm commands that it runs.
type action struct {
	name     string
	commands int
	do       func(ctx context.Context, s *lvm.Store) error
	content  string // of the volume new afterwards, one of contents; "": zeros
}

var actions = []action{
	{"create", 1, func(ctx context.Context, s *lvm.Store) error {
		_, err := s.Create(ctx, volume.Spec{Name: "new", Size: mib})
		return err
	}, ""},
	{"import", 3, func(ctx context.Context, s *lvm.Store) error {
		_, err := s.Import(ctx, volume.Spec{Name: "new"}, bytes.NewReader(contents["one"]), nil)
		return err
	}, "one"},
	{"clone", 2, func(ctx context.Context, s *lvm.Store) error {
		_, err := s.Clone(ctx, "two", volume.Spec{Name: "new", Size: 2 * mib})
		return err
	}, "two"},
	{"copy", 1, func(ctx context.Context, s *lvm.Store) error {
		_, err := s.FromSnapshot(ctx, "one", volume.Spec{Name: "new"})
		return err
	}, "one"},
	{"snapshot", 1, func(ctx context.Context, s *lvm.Store) error {
		_, err := s.Snapshot(ctx, "one", volume.Spec{Name: "new"})
		return err
	}, ""},
	{"resize", 1, func(ctx context.Context, s *lvm.Store) error {
		v, err := s.Get(ctx, "large")
		if err == nil {
			_, err = s.Resize(ctx, "large", v.Size+mib)
		}
		return err
	}, ""},
	{"restore", 2, func(ctx context.Context, s *lvm.Store) error {
		_, err := s.Restore(ctx, "large", "two")
		return err
	}, ""},
	{"attach", 1, func(ctx context.Context, s *lvm.Store) error {
		_, _, err := s.Attach(ctx, "large", user, volume.Mode{})
		return err
	}, ""},
	{"delete", 1, func(ctx context.Context, s *lvm.Store) error { return s.Delete(ctx, "victim") }, ""},
	{"delete snapshot", 1, func(ctx context.Context, s *lvm.Store) error { return s.DeleteSnapshot(ctx, "victim") }, ""},
}

const user = vm.ID("aaaaaaaaaaaaaaaaaaaaaaaaaa")

// act is a process that opens the store and does one thing. It is killed if the wrapper says so.
func act(ctx context.Context, dir, name string) error {
	s, err := lvm.New(ctx, lvm.Config{Dir: dir, Pool: pool})
	if err != nil {
		return err
	}
	if err := errors.Join(os.Setenv("PATH", "/wrap:"+os.Getenv("PATH")), os.Rename("/wrap/armed", "/wrap/kill")); err != nil {
		return err
	}
	i := slices.IndexFunc(actions, func(a action) bool { return a.name == name })
	return actions[i].do(ctx, s)
}

// TestKilled kills a process before and after each command of each operation. Then the operation is done as a whole or not at all, there
// is no logical volume without a record, and no volume has lost its content.
func TestKilled(t *testing.T) {
	if !user.Valid() {
		t.Fatal("not an id")
	}
	s := fresh(t)
	for name, content := range contents {
		_, err1 := s.Import(t.Context(), volume.Spec{Name: name}, bytes.NewReader(content), nil)
		_, err2 := s.Snapshot(t.Context(), name, volume.Spec{Name: name})
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Clone(t.Context(), "one", volume.Spec{Name: "large"}); err != nil {
		t.Fatal(err)
	}
	for _, a := range actions {
		for n := 1; n <= a.commands; n++ {
			for _, when := range []string{"before", "after"} {
				t.Run(fmt.Sprintf("%s, %s command %d", a.name, when, n), func(t *testing.T) { killed(t, s, a, when, n) })
			}
		}
	}
}

func killed(t *testing.T, s *store, a action, when string, n int) {
	ctx := t.Context()
	switch a.name {
	case "delete":
		if _, err := s.Clone(ctx, "two", volume.Spec{Name: "victim"}); err != nil && !errdefs.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	case "delete snapshot":
		if _, err := s.Snapshot(ctx, "two", volume.Spec{Name: "victim"}); err != nil && !errdefs.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
	s.Close()
	if err := errors.Join(os.WriteFile("/wrap/armed", fmt.Appendf(nil, "%s %d\n", when, n), 0o600), os.WriteFile("/wrap/count", []byte("0\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, os.Args[0], a.name)
	cmd.Env = append(os.Environ(), childDir+"="+s.cfg.Dir)
	if out, err := cmd.CombinedOutput(); err == nil || err.Error() != "signal: killed" || len(out) > 0 {
		t.Fatalf("it was not killed: %v, %s", err, out)
	}
	*s = *open(t, s.cfg) // it waits for a command that still runs
	sound(t, s)

	v, err := s.Get(ctx, "new")
	switch {
	case err == nil:
		want := append(slices.Clone(contents[a.content]), make([]byte, v.Size-int64(len(contents[a.content])))...)
		if got := content(t, s, "new"); !bytes.Equal(got, want) {
			t.Errorf("the new volume has another content of %d bytes", len(got))
		}
		err = s.Delete(ctx, "new")
	case errdefs.IsNotFound(err):
		err = nil
	}
	if err != nil {
		t.Error(err)
	}
	if err := s.DeleteSnapshot(ctx, "new"); err != nil && !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	if a.name != "resize" && a.name != "restore" && a.name != "attach" { // the others do not know it
		return
	}
	got := content(t, s, "large")
	is := func(c []byte) bool {
		return bytes.Equal(got[:mib], c) && bytes.Equal(got[mib:], make([]byte, len(got)-mib))
	}
	if !is(contents["one"]) && !is(contents["two"]) {
		t.Error("the volume that was grown and restored has another content")
	}
	if err := s.Detach(ctx, "large", user); err != nil {
		t.Error(err)
	}
}

func content(t *testing.T, s *store, name string) []byte {
	t.Helper()
	_ = s.Detach(t.Context(), name, user)
	var out bytes.Buffer
	if err := s.Export(t.Context(), name, &out); err != nil {
		t.Error(err)
		return make([]byte, mib)
	}
	return out.Bytes()
}

// sound checks that each record has its logical volume, and each logical volume its record.
func sound(t *testing.T, s *store) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(s.cfg.Dir, "*", "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, file := range files {
		var rec struct {
			LV   string
			Gone []string
		}
		text, err := os.ReadFile(file)
		if err := errors.Join(err, json.Unmarshal(text, &rec)); err != nil || rec.LV == "" || len(rec.Gone) > 0 {
			t.Errorf("%s: %s, %v", file, text, err)
		}
		want = append(want, rec.LV)
	}
	got := logicals(t)
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("there are %v; the records name %v", got, want)
	}
	volumes, err1 := s.List(t.Context())
	snapshots, err2 := s.Snapshots(t.Context())
	if err := errors.Join(err1, err2); err != nil || len(volumes)+len(snapshots) != len(want) {
		t.Errorf("listed are %d volumes and %d snapshots, %v; the records are %v", len(volumes), len(snapshots), err, want)
	}
	if said := s.log.String(); strings.Contains(said, "without a record") || strings.Contains(said, "damaged") {
		t.Errorf("the log says %s", said)
	}
}
