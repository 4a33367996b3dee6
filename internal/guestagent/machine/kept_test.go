package machine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func keep(t *testing.T, content string) *kept {
	t.Helper()
	k := &kept{path: filepath.Join(t.TempDir(), "file"), own: true}
	if err := os.WriteFile(k.path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.close)
	return k
}

func (k *kept) mustWrite(t *testing.T, text, want string) {
	t.Helper()
	if err := k.write(text); err != nil {
		t.Fatal(err)
	}
	k.is(t, want)
}

func (k *kept) mustTrim(t *testing.T, want string) {
	t.Helper()
	if err := k.trim(); err != nil {
		t.Fatal(err)
	}
	k.is(t, want)
}

func (k *kept) is(t *testing.T, want string) {
	t.Helper()
	if got, err := os.ReadFile(k.path); err != nil || string(got) != want {
		t.Errorf("the file holds %q (%v), want %q", got, err, want)
	}
}

// TestKept writes into the same file repeatedly, and shortens it later.
func TestKept(t *testing.T) {
	k := keep(t, "source-with-a-long-name\n")
	var before, after unix.Stat_t
	if err := unix.Stat(k.path, &before); err != nil {
		t.Fatal(err)
	}
	k.mustWrite(t, "clone\n", "clone\n"+strings.Repeat("\n", 18))
	k.mustWrite(t, "cl\n", "cl\n"+strings.Repeat("\n", 21))
	k.mustTrim(t, "cl\n")
	k.mustTrim(t, "cl\n")
	k.mustWrite(t, "longer\n", "longer\n")
	k.mustTrim(t, "longer\n")
	if err := unix.Stat(k.path, &after); err != nil || after.Ino != before.Ino {
		t.Errorf("it has become another file: %d, %d, %v", before.Ino, after.Ino, err)
	}
	k.mustWrite(t, "short\n", "short\n\n")
	if err := os.WriteFile(k.path, []byte("of another program\n\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	k.mustTrim(t, "of another program\n\n")
	k.mustWrite(t, "short\n", "short\n"+strings.Repeat("\n", 14))
	if err := os.WriteFile(k.path, []byte("short\n\nx\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	k.mustTrim(t, "short\n\nx\n")
}

// TestKeptElsewhere never writes to a file that its path no longer names, or that is not ours.
func TestKeptElsewhere(t *testing.T) {
	k := keep(t, "source\n")
	k.mustWrite(t, "a\n", "a\n\n\n\n\n\n")
	other := k.path + ".other"
	if err := os.Rename(k.path, other); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(k.path, []byte("from an editor\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	k.mustWrite(t, "b\n", "b\n"+strings.Repeat("\n", 13))
	target := k.path + ".target"
	if err := os.WriteFile(target, []byte("of systemd\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(k.path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, k.path); err != nil {
		t.Fatal(err)
	}
	k.mustTrim(t, "of systemd\n")
	k.mustWrite(t, "c\n", "c\n")
	if st, err := os.Lstat(k.path); err != nil || !st.Mode().IsRegular() {
		t.Errorf("the link was followed: %v, %v", st, err)
	}
	if err := os.Link(k.path, k.path+".link"); err != nil {
		t.Fatal(err)
	}
	k.mustWrite(t, "d\n", "d\n")
	for path, want := range map[string]string{other: "a\n\n\n\n\n\n", target: "of systemd\n", k.path + ".link": "c\n"} {
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("%s holds %q, %v", path, got, err)
		}
	}
	if err := os.Truncate(k.path, largest+1); err != nil {
		t.Fatal(err)
	}
	k.mustWrite(t, "e\n", "e\n")
	none := &kept{path: k.path + ".none"}
	if err := none.write("x\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(none.path); !os.IsNotExist(err) {
		t.Errorf("a file that is not ours to make was made: %v", err)
	}
}
