package rooms

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// inRoom calls f in a mount namespace of its own, whose root has the files and links of an image. secret is a file outside of it.
func inRoom(t *testing.T, f func(t *testing.T)) (secret string) {
	t.Helper()
	need.Root(t)
	secret = filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		for _, m := range []struct {
			source, target, kind string
			flags                uintptr
		}{{"", "/", "", unix.MS_REC | unix.MS_PRIVATE}, {"tmpfs", dir, "tmpfs", 0}} {
			if err := unix.Mount(m.source, m.target, m.kind, m.flags, ""); err != nil {
				return err
			}
		}
		for _, folder := range []string{"dev", "proc", "etc/sub", filepath.Dir(secret)} {
			if err := os.MkdirAll(filepath.Join(dir, folder), 0o755); err != nil {
				return err
			}
		}
		for _, name := range []string{"dev", "proc"} {
			if err := unix.Mount("/"+name, filepath.Join(dir, name), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
				return err
			}
		}
		for name, to := range map[string]string{"top": "/", "up": "../../../..", "magic": "/proc/self/root/etc", "out": secret, "short": "etc/sub", "loop": "loop"} {
			if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
				return err
			}
		}
		for _, name := range []string{"etc/file", "etc/sub/file", secret} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte("text"), 0o600); err != nil {
				return err
			}
		}
		if err := unix.Chroot(dir); err != nil {
			return err
		}
		if err := unix.Chdir("/"); err != nil {
			return err
		}
		f(t)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return secret
}

func text(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Error(err)
	}
	return string(b)
}

// TestCovers: files become empty and folders too, nobody writes there, and what is missing is left out.
func TestCovers(t *testing.T) {
	inRoom(t, func(t *testing.T) {
		c := Covers{Masked: []string{"/etc/file", "/short", "/none", "/etc/file/x"}, ReadOnly: []string{"/etc", "/none/x"}}
		if err := c.impose(); err != nil {
			t.Fatal(err)
		}
		if got := text(t, "/etc/file"); got != "" {
			t.Errorf("a masked file has %q", got)
		}
		if all, err := os.ReadDir("/etc/sub"); err != nil || len(all) > 0 {
			t.Errorf("a masked folder has %v: %v", all, err)
		}
		for _, name := range []string{"/etc/sub/new", "/etc/new"} {
			if err := os.WriteFile(name, nil, 0o600); err == nil {
				t.Errorf("%s was written", name)
			}
		}
		if err := os.WriteFile("/new", nil, 0o600); err != nil {
			t.Error(err)
		}
	})
}

// TestCoversStayInside: links of an image cover nothing outside of it, and not all of it.
func TestCoversStayInside(t *testing.T) {
	secret := inRoom(t, func(t *testing.T) {
		for _, name := range []string{"/top", "/up", "/magic", "/loop"} {
			for _, c := range []Covers{{Masked: []string{name}}, {ReadOnly: []string{name}}} {
				if err := c.impose(); !errdefs.IsInvalid(err) {
					t.Errorf("%+v: %v", c, err)
				}
			}
		}
		if err := (Covers{Masked: []string{"/out"}}).impose(); err != nil {
			t.Fatal(err)
		}
		if got := text(t, "/out"); got != "" {
			t.Errorf("a link of the image is followed inside of it, and there is %q", got)
		}
	})
	if got := text(t, secret); got != "secret" {
		t.Errorf("a file outside has become %q", got)
	}
}

// TestAReplacedDevice: /dev/null covers nothing when a program has put something else in its place.
func TestAReplacedDevice(t *testing.T) {
	inRoom(t, func(t *testing.T) {
		if err := unix.Mount("/etc", "/dev", "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("/etc/sub/file", "/dev/null"); err != nil {
			t.Fatal(err)
		}
		if err := (Covers{Masked: []string{"/etc/file"}}).impose(); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%v", err)
		}
	})
}
