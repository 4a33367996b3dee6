package netns_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/netns"
	testns "cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestMain(m *testing.M) { os.Exit(testns.Main(m)) }

func made(t *testing.T, f netns.Folder, id vm.ID) string {
	t.Helper()
	path, err := f.Make(id)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Remove(id) })
	return path
}

func TestFolder(t *testing.T) {
	testns.Require(t)
	f := netns.Folder(filepath.Join(t.TempDir(), "netns"))
	if all, err := f.List(); err != nil || len(all) > 0 {
		t.Errorf("without a folder: %v, %v", all, err)
	}
	a, b := vm.NewID(), vm.NewID()
	path := made(t, f, a)
	made(t, f, b)
	identity := func(path string) (id string) {
		err := host.Space{Path: path}.Do(func() (err error) {
			links, err := host.ListLinks()
			if err != nil {
				return err
			}
			if len(links) != 1 || links[0].Type() != "device" && links[0].Attrs().Name != "lo" || links[0].Attrs().OperState == netlink.OperUp {
				t.Errorf("it has links %v", links)
			}
			id, err = host.Identity()
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	first := identity(path)
	if again := made(t, f, a); again != path || identity(again) != first {
		t.Error("a second call has made another namespace")
	}
	if identity(f.Path(b)) == first {
		t.Error("two ids have one namespace")
	}
	if all, err := f.List(); err != nil || !slices.Equal(all, slices.Sorted(slices.Values([]vm.ID{a, b}))) {
		t.Errorf("%v, %v", all, err)
	}
	for range 2 {
		if err := f.Remove(a); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file is left: %v", err)
	}
	if all, err := f.List(); err != nil || !slices.Equal(all, []vm.ID{b}) {
		t.Errorf("%v, %v", all, err)
	}
}

// A daemon was killed after it made the file and before it mounted the namespace. Or two daemons have each mounted a namespace.
func TestFolderAfterACrash(t *testing.T) {
	testns.Require(t)
	f := netns.Folder(t.TempDir())
	id := vm.NewID()
	if err := os.WriteFile(f.Path(id), nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if all, err := f.List(); err != nil || !slices.Equal(all, []vm.ID{id}) {
		t.Errorf("%v, %v", all, err)
	}
	if path := made(t, f, id); !(host.Space{Path: path}).Exists() {
		t.Error("there is no namespace")
	}
	other := made(t, f, vm.NewID())
	if err := unix.Mount(other, f.Path(id), "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	if err := f.Remove(id); err != nil {
		t.Fatal(err)
	}
	if (host.Space{Path: f.Path(id)}).Exists() || !(host.Space{Path: other}).Exists() {
		t.Error("a mount is left, or the wrong one is gone")
	}
}

func TestFolderOfOthers(t *testing.T) {
	testns.Require(t)
	f := netns.Folder(t.TempDir())
	file, link, dir := vm.NewID(), vm.NewID(), vm.NewID()
	if err := errors.Join(os.WriteFile(f.Path(file), []byte("data"), 0o600), os.Symlink(f.Path(file), f.Path(link)), os.Mkdir(f.Path(dir), 0o700)); err != nil {
		t.Fatal(err)
	}
	for _, id := range []vm.ID{file, link, dir} {
		if _, err := f.Make(id); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("make: %v", err)
		}
		if err := f.Remove(id); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("remove: %v", err)
		}
	}
	if got, err := os.ReadFile(f.Path(file)); err != nil || string(got) != "data" {
		t.Errorf("%q, %v", got, err)
	}
	for _, id := range []vm.ID{"", "..", "../x", "a/b"} {
		if _, err := f.Make(id); !errdefs.IsInvalid(err) {
			t.Errorf("%q: %v", id, err)
		}
		if err := f.Remove(id); !errdefs.IsInvalid(err) {
			t.Errorf("%q: %v", id, err)
		}
	}
	if _, err := netns.Folder("run").Make(vm.NewID()); !errdefs.IsInvalid(err) {
		t.Errorf("a relative folder: %v", err)
	}
}
