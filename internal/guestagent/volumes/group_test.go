package volumes

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// A group gets all files of a volume, but nothing that links of the volume lead to, and nothing twice.
func TestRegroup(t *testing.T) {
	need.Root(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	const gid = 2000
	dir := t.TempDir()
	outside, volume := filepath.Join(dir, "outside"), filepath.Join(dir, "volume")
	must(os.WriteFile(outside, nil, 0o600))
	must(os.MkdirAll(volume+"/a/b", 0o700))
	must(os.WriteFile(volume+"/a/file", nil, 0o600))
	must(os.WriteFile(volume+"/a/program", nil, 0o600))
	must(unix.Chmod(volume+"/a/program", 0o4755))
	must(os.Symlink(outside, volume+"/a/link"))
	must(os.Symlink("..", volume+"/a/b/up"))
	must(unix.Mkfifo(volume+"/a/b/pipe", 0o600))
	must(os.Chmod(volume, 0o700))
	root, err := os.Open(volume)
	must(err)
	defer root.Close()
	look := func(path string) (gid, mode uint32) {
		t.Helper()
		var st unix.Stat_t
		must(unix.Lstat(path, &st))
		return st.Gid, st.Mode & permissions
	}

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := regroup(ended, root, gid, false); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of the context: %v", err)
	}
	if got, _ := look(volume); got == gid {
		t.Error("an interrupted change looks complete")
	}
	for range 2 {
		must(regroup(t.Context(), root, gid, true))
	}
	for path, want := range map[string]uint32{
		volume: 0o2770, volume + "/a": 0o2770, volume + "/a/b": 0o2770, volume + "/a/file": 0o660, volume + "/a/program": 0o4775,
		volume + "/a/b/pipe": 0o660, volume + "/a/link": 0o777, volume + "/a/b/up": 0o777,
	} {
		if got, mode := look(path); got != gid || mode != want {
			t.Errorf("%s: group %d, mode %#o, want %#o", path, got, mode, want)
		}
	}
	if got, mode := look(outside); got != 0 || mode != 0o600 {
		t.Errorf("a file outside of the volume: group %d, mode %#o", got, mode)
	}

	must(os.Chown(volume+"/a/file", 0, 7))
	must(regroup(t.Context(), root, gid, true))
	if got, _ := look(volume + "/a/file"); got != 7 {
		t.Error("files have changed though the root matches")
	}
	must(regroup(t.Context(), root, gid, false))
	if got, _ := look(volume + "/a/file"); got != gid {
		t.Error("files have not changed")
	}
}
