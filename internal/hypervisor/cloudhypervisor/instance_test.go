package cloudhypervisor

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
)

// TestBootUnheard: a guest that was launched paused, and has booted by a request whose answer was lost, runs after the next one, and has no kernel to start again with.
func TestBootUnheard(t *testing.T) {
	for what, after := range map[string]string{"running": stateRunning, "paused meanwhile": "Paused"} {
		f := newFakeProgram(t)
		f.vm.State = stateCreated
		f.linkKernel()
		i := f.instance()
		lost := ""
		f.set(func() {
			f.fault = func(method string) string {
				switch {
				case method == "vm.boot":
					lost = "HTTP/1.1 500 \r\nContent-Length: 2\r\n\r\n[]"
					return "-"
				case lost != "":
					return lost
				}
				return ""
			}
		})
		if err := i.Resume(t.Context()); err == nil {
			t.Errorf("%s: nobody says that it has booted", what)
		}
		f.set(func() { f.fault, f.vm.State = nil, after })
		if err := i.Resume(t.Context()); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if s, err := i.State(t.Context()); err != nil || s != hypervisor.Running || !i.beginning.Begun() {
			t.Errorf("%s: it is %s, %v", what, s, err)
		}
		if f.kernelLinked() {
			t.Errorf("%s: the kernel is there", what)
		}
	}
}

// TestRecall: a daemon that starts removes the kernel of a guest that has begun. An earlier daemon was killed before it did so.
func TestRecall(t *testing.T) {
	f := newFakeProgram(t)
	i := f.instance()
	f.linkKernel()
	i.recall()
	if !f.kernelLinked() {
		t.Error("before the guest begins its kernel is gone")
	}
	f.happens("vm", "booting", "")
	i.recall()
	if f.kernelLinked() {
		t.Error("the kernel is there")
	}
}

// TestEndlessEvents: a program that its guest has taken over makes its event log 8 TiB long. cocoond reads the end of the log only, and the last events count.
func TestEndlessEvents(t *testing.T) {
	f := newFakeProgram(t)
	i := f.instance()
	f.linkKernel()
	if err := i.h.Record(reasonNone); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(f.events.Name(), 1<<43); err != nil {
		t.Fatal(err)
	}
	if reason, err := i.h.lastReason(); err != nil || reason != "" {
		t.Errorf("nothing says how the guest ended: %q, %v", reason, err)
	}
	f.happens("vm", "booted", "")
	f.happens("vm", "rebooting", "")
	if reason, err := i.h.lastReason(); err != nil || reason != jail.ReasonReset {
		t.Errorf("the guest has reset itself: %q, %v", reason, err)
	}
	i.recall()
	if f.kernelLinked() {
		t.Error("the guest has begun, and its kernel is there")
	}
}

// linkKernel does what the launch does.
func (f *fakeProgram) linkKernel() {
	f.t.Helper()
	private, err := f.proc.Folder(rootPrivate)
	if err != nil {
		f.t.Fatal(err)
	}
	defer private.Close()
	if err := unix.Symlinkat(rootKernel, int(private.Fd()), kernelLink); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fakeProgram) kernelLinked() bool {
	f.t.Helper()
	private, err := f.proc.Folder(rootPrivate)
	if err != nil {
		f.t.Fatal(err)
	}
	defer private.Close()
	var st unix.Stat_t
	err = unix.Fstatat(int(private.Fd()), kernelLink, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		f.t.Fatal(err)
	}
	return err == nil
}

// TestSilent: a call to a program that does not answer fails after a time limit.
func TestSilent(t *testing.T) {
	f := newFakeProgram(t)
	i := f.instance()
	i.d.cfg.AnswerTime = 20 * time.Millisecond
	f.mu.Lock() // so it does not answer
	defer f.mu.Unlock()
	if _, err := i.State(t.Context()); !errdefs.IsUnavailable(err) {
		t.Errorf("state: %v", err)
	}
}

// TestShutdownBeforeItBoots: a button that is pressed before the guest has begun is pressed then.
func TestShutdownBeforeItBoots(t *testing.T) {
	f := newFakeProgram(t)
	f.vm.State = stateCreated
	f.linkKernel()
	i := f.instance()
	if err := i.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	f.asked()
	if err := i.Resume(t.Context()); err != nil {
		t.Error(err)
	}
	f.asked("vm.boot ", "vm.power-button ")
}

// TestHungAtBoot: a program that does not answer while it boots its guest keeps nobody for ever, neither who launches the VM nor who lets a paused one begin.
func TestHungAtBoot(t *testing.T) {
	f := newFakeProgram(t)
	f.vm.State = stateCreated
	i := f.instance()
	i.d.cfg.LaunchTime, i.d.cfg.AnswerTime = 50*time.Millisecond, 50*time.Millisecond
	f.mu.Lock() // so it does not answer
	defer f.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := i.Resume(ctx); !errdefs.IsUnavailable(err) {
		t.Errorf("a paused one begins: %v", err)
	}
	l := &launch{d: i.d}
	l.Plan.ID, l.Plan.Dir, l.Proc, l.Title = testID, f.dir, f.proc, "Cloud Hypervisor"
	if err := l.boot(ctx); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "50ms") {
		t.Errorf("a launch: %v", err)
	}
}

// TestHungSave: a program that does not answer while it saves its guest keeps nobody for ever, and has more time for more memory.
func TestHungSave(t *testing.T) {
	f := newFakeProgram(t)
	i := f.instance()
	i.d.cfg.LaunchTime, i.h.Memory = 50*time.Millisecond, 4<<20
	f.mu.Lock() // so it does not answer
	defer f.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s := &save{i: i}
	if err := s.write(ctx); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "within 50ms") {
		t.Errorf("a save: %v", err)
	}
	i.h.Memory = 8 << 20
	if err := s.write(ctx); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "within 1.05s") {
		t.Errorf("of a larger guest: %v", err)
	}
}
