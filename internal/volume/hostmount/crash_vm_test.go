//go:build vm

package hostmount_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume/hostmount"
)

// A copy of the mount in the namespace of another process keeps the disk in use, unless it follows this one.
func TestNamespaces(t *testing.T) {
	r, d := newRig(t), disk(t, 64*mib)
	unshare := need.Tool(t, "unshare")
	other := func(propagation string) (end func()) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), unshare, "--mount", "--propagation", propagation, "sh", "-c", "echo ready; read _")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		if !bufio.NewScanner(out).Scan() {
			t.Fatal("the process did not start")
		}
		return func() {
			in.Close()
			_ = cmd.Wait()
		}
	}
	r.mount(d, "a", hostmount.Options{})
	follows := other("slave")
	r.unmount("a")
	if got := loopsOf(t, d.Path); len(got) > 0 {
		t.Errorf("loop devices %v are left", got)
	}
	follows()

	r.mount(d, "a", hostmount.Options{})
	keeps := other("private")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Unmount(ctx, r.at("a")); err == nil {
		t.Error("a cancelled Unmount succeeds")
	}
	if err := r.Unmount(t.Context(), r.at("a")); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "container") {
		t.Errorf("unmounted while another namespace has it: %v", err)
	}
	r.refused(d, "a", hostmount.Options{}, errdefs.Unavailable, "namespace")
	r.refused(d, "b", hostmount.Options{}, errdefs.FailedPrecondition, "already")
	keeps()
	r.unmount("a")
	if got := loopsOf(t, d.Path); len(got) > 0 {
		t.Errorf("loop devices %v are left", got)
	}

	r.mount(d, "a", hostmount.Options{})
	f, err := os.Create(r.at("a/open"))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Unmount(t.Context(), r.at("a")); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("unmounted while a file is open: %v", err)
	}
	f.Close()
}

const victim = "COCOON_TEST_MOUNT_VICTIM"

// A daemon is killed at any moment, again and again: what it had written is there, and its loop devices are not.
func TestKilled(t *testing.T) {
	if args := os.Getenv(victim); args != "" {
		mountsForEver(t, args)
		return
	}
	r, d := newRig(t), disk(t, 64*mib)
	last := ""
	for round := range 16 {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilled$")
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %d", victim, r.dir, d.Path, round))
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for range round%5 + 1 { // the kill comes in what follows
			if !lines.Scan() {
				t.Fatal("it ended")
			}
			if text, ok := strings.CutPrefix(lines.Text(), "written "); ok {
				last = text
			}
		}
		_ = cmd.Process.Kill()
		for lines.Scan() { // what it had said before
			if text, ok := strings.CutPrefix(lines.Text(), "written "); ok {
				last = text
			}
		}
		_ = cmd.Wait()
		if all, err := r.List(r.dir); err != nil || len(all) > 1 || len(all) == 1 && !held(t, d) {
			t.Errorf("round %d: %+v, %v, and hypervisors see a free disk", round, all, err)
		}
		r.mount(d, "a", hostmount.Options{})
		if last != "" {
			r.reads("a", last)
		}
		if got := loopsOf(t, d.Path); len(got) != 1 {
			t.Fatalf("round %d: loop devices %v", round, got)
		}
		if round%2 == 0 {
			r.unmount("a")
			clean(t, d)
		}
	}
}

// held reports whether hypervisors see that something writes to a disk.
func held(t *testing.T, d vm.Disk) bool {
	t.Helper()
	f, err := os.Open(d.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l := unix.Flock_t{Type: unix.F_WRLCK, Start: 101, Len: 1}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &l); err != nil {
		t.Fatal(err)
	}
	return l.Type != unix.F_UNLCK
}

// mountsForEver mounts, writes and unmounts, and says so.
func mountsForEver(t *testing.T, args string) {
	var dir, path string
	var round int
	if _, err := fmt.Sscan(args, &dir, &path, &round); err != nil {
		t.Fatal(err)
	}
	m, err := hostmount.New(hostmount.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(dir, "a")
	for i := 0; ; i++ {
		fmt.Println("mounts")
		if _, err := m.Mount(t.Context(), vm.Disk{Path: path, Format: vm.DiskRaw}, at, hostmount.Options{}); err != nil {
			t.Fatal(err)
		}
		text := fmt.Sprintf("%d-%d", round, i)
		name := filepath.Join(at, "file.new")
		f, err := os.Create(name)
		if err == nil {
			_, err = f.WriteString(text)
		}
		if err == nil {
			err = f.Sync()
		}
		if err == nil {
			err = f.Close()
		}
		if err == nil {
			err = os.Rename(name, filepath.Join(at, "file"))
		}
		if err != nil {
			t.Fatal(err)
		}
		unix.Sync()
		fmt.Println("written", text)
		if err := m.Unmount(t.Context(), at); err != nil {
			t.Fatal(err)
		}
	}
}
