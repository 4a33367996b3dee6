//go:build vm

package qemu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestSaveFails makes a save fail in several ways; each time the guest keeps counting and nothing is left.
func TestSaveFails(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	small := t.TempDir()
	if err := unix.Mount("cocoon-test", small, "tmpfs", 0, "size=8m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(small, unix.MNT_DETACH) })
	dir := secretDir(t)
	top := blankDisk(t, dir)
	p := a.plan(t)
	p.Disks = []vm.Disk{top}
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	say(t, i, "count")
	snapshotter, _ := hypervisor.As[hypervisor.Snapshotter](i)
	cancelled, cancel := context.WithCancel(t.Context())
	tests := []struct {
		name  string
		ctx   context.Context
		spoil func(*hypervisor.SavePlan)
		ok    func(error) bool
	}{
		{
			"no room", t.Context(), func(s *hypervisor.SavePlan) { s.Memory = filepath.Join(small, "memory") },
			func(err error) bool { return errdefs.Is(err, errdefs.ResourceExhausted) },
		},
		{
			"no room for one that is held", t.Context(), func(s *hypervisor.SavePlan) { s.Memory, s.Hold = filepath.Join(small, "memory"), true },
			func(err error) bool { return errdefs.Is(err, errdefs.ResourceExhausted) },
		},
		{
			"no folder", t.Context(), func(s *hypervisor.SavePlan) { s.State = "/nonexistent/state" },
			func(err error) bool { return errors.Is(err, os.ErrNotExist) },
		},
		{"no files", t.Context(), func(s *hypervisor.SavePlan) { s.State = "" }, errdefs.IsInvalid},
		{"overlay is none", t.Context(), func(s *hypervisor.SavePlan) {
			bad := overlayOn(t, top, dir, "bad.qcow2")
			if err := os.WriteFile(bad.Path, bytes.Repeat([]byte("bad "), 1000), 0o600); err != nil {
				t.Fatal(err)
			}
			s.Overlays = []hypervisor.DiskOverlay{{Serial: "cow", Disk: bad}}
		}, func(err error) bool { return err != nil }},
		{"cancelled", cancelled, func(s *hypervisor.SavePlan) {
			s.Hold, s.Taken = true, func() {}
			cancel()
		}, func(err error) bool { return errors.Is(err, context.Canceled) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := saved(t)
			tt.spoil(&s)
			if _, err := snapshotter.Save(tt.ctx, s); !tt.ok(err) {
				t.Errorf("Save: %v", err)
			}
			for _, f := range []string{s.Memory, s.State} {
				if f != "" && exists(f) {
					t.Errorf("%s is left", f)
				}
			}
			before := len(counts(t, consoleOf(t, i)))
			await(t, "the guest counts on", func() bool { return len(counts(t, consoleOf(t, i))) > before+5 })
		})
	}
	doSave(t, i, saved(t))
	consecutive(t, counts(t, consoleOf(t, i)))
}

// TestGoOnFails launches from incomplete state; each time the error is data loss and nothing is left.
func TestGoOnFails(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	s := saved(t)
	doSave(t, i, s)
	tests := []struct {
		name  string
		spoil func(*hypervisor.Plan, hypervisor.SavePlan)
		class errdefs.Class
	}{
		{"state cut", func(_ *hypervisor.Plan, s hypervisor.SavePlan) { halve(t, s.State) }, errdefs.DataLoss},
		{"state empty", func(_ *hypervisor.Plan, s hypervisor.SavePlan) { truncate(t, s.State, 0) }, errdefs.DataLoss},
		{"memory cut", func(_ *hypervisor.Plan, s hypervisor.SavePlan) { halve(t, s.Memory) }, errdefs.DataLoss},
		{"other memory", func(p *hypervisor.Plan, _ hypervisor.SavePlan) { p.Memory = 256 << 20 }, errdefs.DataLoss},
		{"no memory", func(p *hypervisor.Plan, _ hypervisor.SavePlan) { p.Incoming.Memory = "/nonexistent" }, errdefs.FailedPrecondition},
		{"nothing", func(p *hypervisor.Plan, _ hypervisor.SavePlan) { p.Incoming.Memory = "" }, errdefs.InvalidArgument},
		{"more devices", func(p *hypervisor.Plan, _ hypervisor.SavePlan) { p.CPUs = 2 }, errdefs.DataLoss},
	}
	for _, tt := range tests {
		for _, alone := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s alone=%v", tt.name, alone), func(t *testing.T) {
				copied := saved(t)
				run(t, "cp", "--sparse=always", s.State, copied.State)
				run(t, "cp", "--sparse=always", s.Memory, copied.Memory)
				q := from(t, p, copied)
				q.Incoming.Alone = alone
				tt.spoil(&q, copied)
				if j, err := d.Launch(t.Context(), q); !errdefs.Is(err, tt.class) {
					t.Errorf("Launch: %v, %v; want %v", j, err, tt.class)
				} else {
					t.Log(err)
				}
				if left := left(t, q); len(left) > 0 {
					t.Errorf("left: %v", left)
				}
			})
		}
	}
}

func halve(t testing.TB, path string) {
	t.Helper()
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	truncate(t, path, st.Size()/2)
}

func truncate(t testing.TB, path string, size int64) {
	t.Helper()
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
}

// TestKilledWhileSaving kills QEMU during a save.
func TestKilledWhileSaving(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	s := saved(t)
	s.Hold = true
	var killer sync.WaitGroup
	killer.Go(func() {
		await(t, "the save has begun", func() bool {
			st, err := os.Stat(s.Memory)
			return err == nil && st.Sys().(*syscall.Stat_t).Blocks > 0
		})
		if err := unix.Kill(i.PID(), unix.SIGKILL); err != nil {
			t.Error(err)
		}
	})
	snapshotter, _ := hypervisor.As[hypervisor.Snapshotter](i)
	if _, err := snapshotter.Save(t.Context(), s); err == nil {
		t.Error("the save of a killed guest is none")
	} else {
		t.Log(err)
	}
	killer.Wait()
	if _, err := i.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if exists(s.Memory) || exists(s.State) {
		t.Error("files are left")
	}
	if left := left(t, p); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestDaemonKilledWhileSaving kills the saving process at many moments. The next process finds the guest running or resumes it,
// and no number is lost.
func TestDaemonKilledWhileSaving(t *testing.T) {
	if handle := os.Getenv("QEMU_TEST_SAVE"); handle != "" {
		i, err := testDriver(t).Adopt(t.Context(), hypervisor.Handle(handle))
		if err != nil {
			t.Fatal(err)
		}
		var o []hypervisor.DiskOverlay
		if err := json.Unmarshal([]byte(os.Getenv("QEMU_TEST_OVERLAYS")), &o); err != nil {
			t.Fatal(err)
		}
		s := saved(t)
		s.Overlays = o
		if _, err := i.(*instance).connected(t.Context()); err != nil {
			t.Fatal(err)
		}
		fmt.Println("SAVING")
		doSave(t, i, s)
		fmt.Println("SAVED")
		_, _ = io.Copy(io.Discard, os.Stdin) // until killed
		runtime.Goexit()
	}
	a, d, dir := needGuest(t), testDriver(t), secretDir(t)
	top := blankDisk(t, dir)
	p := a.plan(t)
	p.Disks = []vm.Disk{top}
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	say(t, i, "both")
	logged(t, i, "COUNT 10\r\n")
	for delay := time.Duration(0); delay < 240*time.Millisecond; delay += 16 * time.Millisecond {
		top = overlayOn(t, top, dir, fmt.Sprintf("over%d.qcow2", delay)) // whether the save gets that far or not
		spec, err := json.Marshal([]hypervisor.DiskOverlay{{Serial: "cow", Disk: top}})
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestDaemonKilledWhileSaving$")
		cmd.Env = append(os.Environ(), "TMPDIR="+dir, "QEMU_TEST_SAVE="+string(i.Handle()), "QEMU_TEST_OVERLAYS="+string(spec))
		if err := i.Close(); err != nil {
			t.Fatal(err)
		}
		killWhen(t, cmd, "SAVING", delay)
		again, err := d.Adopt(t.Context(), i.Handle())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = again.Close() })
		i = again
		pauser, _ := hypervisor.As[hypervisor.Pauser](i)
		if err := pauser.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		before := len(counts(t, consoleOf(t, i)))
		await(t, "the guest counts on", func() bool { return len(counts(t, consoleOf(t, i))) > before+2 })
	}
	consecutive(t, counts(t, consoleOf(t, i)))
	doSave(t, i, saved(t))
}

// killWhen starts cmd and kills it some time after it has printed word.
func killWhen(t testing.TB, cmd *exec.Cmd, word string, after time.Duration) {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for sc := bufio.NewScanner(out); sc.Scan() && sc.Text() != word; {
	}
	<-time.After(after)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = in.Close()
	_ = cmd.Wait()
}
