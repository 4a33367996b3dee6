package file_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/file"
)

// TestFullDisk runs the store in a process with a mount namespace of its own, on a small tmpfs.
func TestFullDisk(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), fullDir+"="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Skip("this host grants no user namespace: ", err)
	}
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// fillDisk checks that nothing is left of what did not fit, and that the rest goes on.
func fillDisk(ctx context.Context, dir string) error {
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		return err
	}
	s, err := file.New(ctx, file.Config{Dir: filepath.Join(dir, "store")})
	if err != nil {
		return err
	}
	v, err := s.Import(ctx, volume.Spec{Name: "one"}, bytes.NewReader(bytes.Repeat([]byte("x"), 3*mib)), nil)
	if err != nil {
		return err
	}
	if _, err := s.Snapshot(ctx, "one", volume.Spec{Name: "x"}); err != nil {
		return err
	}
	free := func() uint64 {
		var st unix.Statfs_t
		_ = unix.Statfs(dir, &st)
		return st.Bfree
	}
	before := free()
	var problems error
	expect := func(what string, err error) {
		if !errdefs.Is(err, errdefs.ResourceExhausted) {
			problems = errors.Join(problems, fmt.Errorf("%s: %w (%v)", what, err, errdefs.ClassOf(err)))
		}
		if now := free(); now != before {
			problems = errors.Join(problems, fmt.Errorf("%s: %d blocks are free, not %d", what, now, before))
		}
	}
	_, err = s.Clone(ctx, "one", volume.Spec{Name: "two"})
	expect("clone", err)
	_, err = s.Snapshot(ctx, "one", volume.Spec{Name: "y"})
	expect("snapshot", err)
	_, err = s.FromSnapshot(ctx, "x", volume.Spec{Name: "two"})
	expect("from snapshot", err)
	_, err = s.Restore(ctx, "one", "x")
	expect("restore", err)
	_, err = s.Import(ctx, volume.Spec{Name: "two"}, bytes.NewReader(bytes.Repeat([]byte("x"), 3*mib)), nil)
	expect("import", err)

	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 8*mib), 0o600); !errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("not full: %w", err)
	}
	before = free()
	_, err = s.Create(ctx, volume.Spec{Name: "two", Size: mib})
	expect("create", err)
	_, err = s.Resize(ctx, "one", 4*mib)
	expect("resize", err)
	_, _, err = s.Attach(ctx, "one", vm.NewID(), volume.Mode{})
	expect("attach", err)
	_, err = s.Update(ctx, "one", func(v *volume.Volume) { v.Name = "two" })
	expect("rename", err)
	if got, err := s.Get(ctx, "one"); err != nil || got.Size != 3*mib || len(got.Attachments) > 0 {
		problems = errors.Join(problems, fmt.Errorf("it is %+v, %w", got, err))
	}
	if info, err := os.Stat(filepath.Join(dir, "store", "volumes", string(v.ID), "data")); err != nil || info.Size() != 3*mib {
		problems = errors.Join(problems, fmt.Errorf("a failed resize left %d bytes, %w", info.Size(), err))
	}
	if err := os.Remove(filler); err != nil {
		return err
	}
	if _, err := s.Create(ctx, volume.Spec{Name: "two", Size: mib}); err != nil {
		problems = errors.Join(problems, err)
	}
	return errors.Join(problems, s.Delete(ctx, "one"), s.DeleteSnapshot(ctx, "x"), s.Delete(ctx, "two"), s.Close())
}
