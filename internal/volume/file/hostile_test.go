package file_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/file"
)

// replacements of the data of a volume by something that must not be opened, or not be used.
var replacements = map[string]func(path string) error{
	"nothing": os.Remove,
	"a link": func(path string) error {
		secret := filepath.Join(filepath.Dir(filepath.Dir(path)), "secret")
		return errors.Join(os.WriteFile(secret, make([]byte, mib), 0o600), os.Remove(path), os.Symlink(secret, path))
	},
	"a link to a device": func(path string) error { return errors.Join(os.Remove(path), os.Symlink("/dev/zero", path)) },
	"a pipe":             func(path string) error { return errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600)) },
	"a folder":           func(path string) error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o700)) },
	"a socket": func(path string) error {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return errors.Join(os.Remove(path), unix.Bind(fd, &unix.SockaddrUnix{Name: path}))
	},
	"a device": func(path string) error {
		return errors.Join(os.Remove(path), unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5)))) // needs root
	},
	"less": func(path string) error { return os.Truncate(path, mib-4096) },
}

// TestDataReplaced replaces the data of a volume while the store is open, and before it is opened.
func TestDataReplaced(t *testing.T) {
	for name, replace := range replacements {
		t.Run(name, func(t *testing.T) {
			dir := short(t)
			s := open(t, dir)
			v := create(t, s, "one")
			create(t, s, "good")
			if _, err := s.Snapshot(t.Context(), "one", volume.Spec{Name: "x"}); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, "volumes", string(v.ID), "data")
			if err := replace(path); err != nil {
				t.Skip(err)
			}
			for what, try := range uses(t, s, "one") {
				if err := try(); !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), "one") {
					t.Errorf("%s: %v (%v)", what, err, errdefs.ClassOf(err))
				}
			}
			s = reopen(t, s, dir)
			damaged(t, s, "one", v.ID)
			if _, err := os.Lstat(filepath.Join(dir, "volumes", string(v.ID))); err != nil {
				t.Error(err)
			}
			if _, _, err := s.Attach(t.Context(), "good", vm.NewID(), volume.Mode{}); err != nil {
				t.Error(err)
			}
		})
	}
}

// short returns a folder with a short name: sockets have only 107 characters.
func short(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "v")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// uses are the ways to reach the bytes of a volume.
func uses(t *testing.T, s *file.Store, ref string) map[string]func() error {
	return map[string]func() error{
		"attach":   func() error { _, _, err := s.Attach(t.Context(), ref, vm.NewID(), volume.Mode{}); return err },
		"resize":   func() error { _, err := s.Resize(t.Context(), ref, 2*mib); return err },
		"export":   func() error { return s.Export(t.Context(), ref, io.Discard) },
		"clone":    func() error { _, err := s.Clone(t.Context(), ref, volume.Spec{}); return err },
		"snapshot": func() error { _, err := s.Snapshot(t.Context(), ref, volume.Spec{}); return err },
	}
}

// damaged checks that a volume is in no list, cannot be used or removed, and keeps its name and its files.
func damaged(t *testing.T, s *file.Store, name string, id vm.ID) {
	t.Helper()
	all, err := s.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range all {
		if v.ID == id || v.Name == name {
			t.Errorf("it is listed: %+v", v)
		}
	}
	if u, err := s.Usage(t.Context()); err != nil || u[id].Size != 0 {
		t.Errorf("it has a usage: %+v, %v", u, err)
	}
	for _, ref := range []string{name, string(id)} {
		if ref == "" {
			continue
		}
		for what, try := range uses(t, s, ref) {
			if err := try(); !errdefs.Is(err, errdefs.DataLoss) {
				t.Errorf("%s: %v (%v)", what, err, errdefs.ClassOf(err))
			}
		}
		if err := s.Delete(t.Context(), ref); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("delete: %v", err)
		}
	}
	if name != "" {
		if _, err := s.Create(t.Context(), volume.Spec{Name: name, Size: mib}); !errdefs.IsAlreadyExists(err) {
			t.Errorf("its name was free: %v", err)
		}
	}
}

func TestDamagedRecords(t *testing.T) {
	change := func(edit func(*volume.Volume)) func(string, []byte) error {
		return func(path string, text []byte) error {
			var v volume.Volume
			err := json.Unmarshal(text, &v)
			edit(&v)
			text, err2 := json.Marshal(v)
			return errors.Join(err, err2, os.WriteFile(path, text, 0o600))
		}
	}
	for name, c := range map[string]struct {
		damage func(path string, text []byte) error
		known  bool // its name still is
	}{
		"missing": {func(path string, _ []byte) error { return os.Remove(path) }, false},
		"empty":   {func(path string, _ []byte) error { return os.WriteFile(path, nil, 0o600) }, false},
		"cut":     {func(path string, text []byte) error { return os.WriteFile(path, text[:len(text)/2], 0o600) }, false},
		"a link": {func(path string, _ []byte) error {
			return errors.Join(os.Rename(path, path+"2"), os.Symlink(path+"2", path))
		}, false},
		"much":         {func(path string, text []byte) error { return os.Truncate(path, 5<<20) }, false},
		"another id":   {change(func(v *volume.Volume) { v.ID = vm.NewID() }), false},
		"a path as id": {change(func(v *volume.Volume) { v.ID = "../x" }), false},
		"a path":       {change(func(v *volume.Volume) { v.Name = "../x" }), false},
		"a wrong type": {func(path string, text []byte) error {
			return os.WriteFile(path, bytes.Replace(text, []byte("1048576"), []byte(`"x"`), 1), 0o600)
		}, true},
		"another kind":  {change(func(v *volume.Volume) { v.Kind = "lvm" }), true},
		"an odd size":   {change(func(v *volume.Volume) { v.Size = 5000 }), true},
		"a larger size": {change(func(v *volume.Volume) { v.Size = 2 * mib }), true},
		"its source":    {change(func(v *volume.Volume) { v.From = "x" }), true},
		"labels":        {change(func(v *volume.Volume) { v.Labels = map[string]string{"": ""} }), true},
		"two writers": {change(func(v *volume.Volume) {
			v.Attachments = []volume.Attachment{{VM: vm.NewID()}, {VM: vm.NewID(), Mode: volume.Mode{ReadOnly: true}}}
		}), true},
		"one of two writers shares": {change(func(v *volume.Volume) {
			v.Attachments = []volume.Attachment{{VM: vm.NewID()}, {VM: vm.NewID(), Mode: volume.Mode{Shared: true}}}
		}), true},
		"no VM": {change(func(v *volume.Volume) { v.Attachments = []volume.Attachment{{VM: "x"}} }), true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, dir)
			v := create(t, s, "one")
			create(t, s, "good")
			path := filepath.Join(dir, "volumes", string(v.ID), "volume.json")
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := c.damage(path, text); err != nil {
				t.Fatal(err)
			}
			s = reopen(t, s, dir)
			known := ""
			if c.known {
				known = "one"
			}
			damaged(t, s, known, v.ID)
			if _, err := s.Get(vm.OnBehalf(t.Context(), vm.Owner{Namespace: "prod"}), string(v.ID)); !errdefs.IsNotFound(err) {
				t.Errorf("another owner: %v", err)
			}
			if all, err := s.List(t.Context()); err != nil || len(all) != 1 || all[0].Name != "good" {
				t.Errorf("the others: %+v, %v", all, err)
			}
			if err := os.RemoveAll(filepath.Dir(path)); err != nil { // as the error says
				t.Fatal(err)
			}
			create(t, reopen(t, s, dir), "one")
		})
	}
}

// TestOneNameTwice makes a record that claims the name of another volume. The other one is not affected.
func TestOneNameTwice(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	ids := map[vm.ID]bool{}
	for _, name := range []string{"one", "two"} {
		v := create(t, s, name)
		ids[v.ID] = true
		path := filepath.Join(dir, "volumes", string(v.ID), "volume.json")
		text, err := os.ReadFile(path)
		if err := errors.Join(err, os.WriteFile(path, bytes.Replace(text, []byte(`"two"`), []byte(`"one"`), 1), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	s = reopen(t, s, dir)
	v, err := s.Get(t.Context(), "one")
	if err != nil || !ids[v.ID] {
		t.Fatalf("it is %+v, %v", v, err)
	}
	delete(ids, v.ID)
	for id := range ids {
		if _, err := s.Get(t.Context(), string(id)); !errdefs.Is(err, errdefs.DataLoss) {
			t.Error(err)
		}
	}
	if err := s.Delete(t.Context(), "one"); err != nil {
		t.Error(err)
	}
}

// TestForeignEntries checks that what the store did not make stays, is logged, and blocks nothing.
func TestForeignEntries(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	create(t, s, "good")
	id := vm.NewID()
	foreign := []string{"notes", "volumes/README", "volumes/.draft-x", "volumes/.gone-..", "volumes/ABC", "volumes/.hidden", "snapshots/lost+found"}
	for _, name := range foreign {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	elsewhere := filepath.Join(t.TempDir(), "elsewhere")
	if err := errors.Join(
		os.Mkdir(elsewhere, 0o700), os.WriteFile(filepath.Join(elsewhere, "f"), nil, 0o600),
		os.Symlink(elsewhere, filepath.Join(dir, "volumes", string(id))),
		os.Symlink(elsewhere, filepath.Join(dir, "volumes", ".draft-"+string(id))),
		os.WriteFile(filepath.Join(dir, "volumes", ".gone-"+string(id)), nil, 0o600),
	); err != nil {
		t.Fatal(err)
	}
	foreign = append(foreign, "volumes/"+string(id), "volumes/.draft-"+string(id), "volumes/.gone-"+string(id))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	s, err := file.New(t.Context(), file.Config{Dir: dir, Log: slog.New(slog.NewTextHandler(&said, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	damaged(t, s, "", id)
	if all, err := s.List(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("there is %+v, %v", all, err)
	}
	for _, name := range foreign {
		if _, err := os.Lstat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
		if name != "notes" && !strings.Contains(said.String(), filepath.Join(dir, name)) {
			t.Errorf("%s is not logged", name)
		}
	}
	if _, err := os.Stat(filepath.Join(elsewhere, "f")); err != nil {
		t.Error(err)
	}
}

// TestDamagedSnapshots: what holds for volumes holds for snapshots.
func TestDamagedSnapshots(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	create(t, s, "one")
	var ids []vm.ID
	for _, name := range []string{"cut", "longer", "good"} {
		x, err := s.Snapshot(t.Context(), "one", volume.Spec{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, x.ID)
	}
	if err := errors.Join(
		os.Truncate(filepath.Join(dir, "snapshots", string(ids[0]), "data"), 4096),
		os.Truncate(filepath.Join(dir, "snapshots", string(ids[1]), "data"), 2*mib),
	); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s, dir)
	if all, err := s.Snapshots(t.Context()); err != nil || len(all) != 1 || all[0].ID != ids[2] {
		t.Errorf("there is %+v, %v", all, err)
	}
	for _, ref := range []string{"cut", "longer"} {
		for what, try := range map[string]func() error{
			"get":     func() error { _, err := s.GetSnapshot(t.Context(), ref); return err },
			"copy":    func() error { _, err := s.FromSnapshot(t.Context(), ref, volume.Spec{}); return err },
			"restore": func() error { _, err := s.Restore(t.Context(), "one", ref); return err },
			"delete":  func() error { return s.DeleteSnapshot(t.Context(), ref) },
		} {
			if err := try(); !errdefs.Is(err, errdefs.DataLoss) {
				t.Errorf("%s %s: %v", what, ref, err)
			}
		}
	}
}
