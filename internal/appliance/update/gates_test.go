package update

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
	"cocoonstack.io/cocoon/internal/appliance/bundle"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// trial pushes version v2 and starts it.
func (b *box) trial(o Options) {
	b.t.Helper()
	data := packed(b.t, "v2", key("ours"))
	if _, _, err := b.u.Stage(b.t.Context(), bytes.NewReader(data), uint64(len(data)), sumOf(data), o); err != nil {
		b.t.Fatal(err)
	}
	b.clock()
	b.loader()
}

// run lets the updater run for as long.
func (b *box) run(t *testing.T, d time.Duration) {
	t.Helper()
	end := make(chan struct{})
	go func() { b.u.Run(t.Context()); close(end) }()
	select {
	case <-end:
	case <-time.After(d):
	}
	synctest.Wait()
}

// By the policy auto a version keeps itself, once all gates have held for a while.
func TestAuto(t *testing.T) {
	b := newBox(t)
	synctest.Test(t, func(t *testing.T) {
		b.t = t
		b.runs.set([]string{"db", "web"})
		b.trial(Options{Policy: Auto})
		b.failing.set("no address")
		b.runs.set([]string{"db"})
		b.run(t, time.Minute)
		if s := b.u.State(); s.Policy != Auto || s.Failing != "uplink: no address" || s.Pending != bootctl.B {
			t.Errorf("%+v", s)
		}
		b.failing.set("")
		<-time.After(time.Minute)
		if s := b.u.State(); s.Failing != "workloads: web ran before the update, and not yet again" || s.Pending != bootctl.B {
			t.Errorf("%+v", s)
		}
		b.runs.set([]string{"web", "db"})
		<-time.After(Steady - time.Second)
		b.is(bootctl.B, bootctl.B, "v1", false)
		<-time.After(3 * gateEvery)
		b.is(bootctl.B, bootctl.None, "v2", false)
		if b.copies.update.get() == "" {
			t.Error("the copy of the state is gone before a start without a trial")
		}
		b.loader()
		b.failing.set("no address")
		b.run(t, time.Hour)
		if b.copies.update.get() == "" {
			t.Error("the copy of the state is gone before all gates held")
		}
		b.failing.set("")
		<-time.After(2 * gateEvery)
		if b.copies.update.get() != "" || b.restarts.get() != 0 {
			t.Errorf("the copy %q of the state is left, %d restarts", b.copies.update.get(), b.restarts.get())
		}
	})
}

// By the policy both, an operator is heard only while all gates hold. By the policy manual, always.
func TestOperatorPolicies(t *testing.T) {
	for policy, want := range map[Policy]errdefs.Class{Both: errdefs.FailedPrecondition, Manual: 0, "": 0} {
		b := newBox(t)
		synctest.Test(t, func(t *testing.T) {
			b.t = t
			b.trial(Options{Policy: policy})
			b.failing.set("no address")
			b.run(t, time.Minute)
			_, _, err := b.u.Confirm(t.Context())
			if want != 0 && errdefs.ClassOf(err) != want || want == 0 && err != nil {
				t.Errorf("%q: %v", policy, err)
			}
			if want == 0 {
				return
			}
			b.failing.set("")
			<-time.After(2 * time.Minute)
			b.is(bootctl.B, bootctl.B, "v1", false) // not by itself
			if _, _, err := b.u.Confirm(t.Context()); err != nil {
				t.Errorf("%q, and all gates hold: %v", policy, err)
			}
		})
	}
}

// After a trial, the good system says why the trial ended. It says so even if its state is older than the trial.
func TestReport(t *testing.T) {
	b := newBox(t)
	synctest.Test(t, func(t *testing.T) {
		b.t = t
		b.trial(Options{Policy: Auto, Deadline: 2 * time.Minute})
		b.failing.set("no address")
		b.u.Run(t.Context())
		if age := b.age(); b.restarts.get() != 1 || age < 2*time.Minute || age > 2*time.Minute+gateEvery {
			t.Errorf("%d restarts at %v", b.restarts.get(), age)
		}
	})
	b.t = t
	b.loader()
	s := b.u.State()
	if want := "version v2 ran, and nobody confirmed it in 2m0s; what did not hold: uplink: no address"; s.Because != want {
		t.Errorf("%q", s.Because)
	}
	if want := "log of start " + strconv.Itoa(b.boots-1); s.Log != want {
		t.Errorf("its log is %q, want %q", s.Log, want)
	}
}

// A version that never gets as far as its daemon cannot tell; the watchdog and the kernel can.
func TestReportOfTheDead(t *testing.T) {
	for name, tc := range map[string]struct {
		ran, watchdog bool
		crash, want   string
	}{
		"power cut": {want: "version v2 did not start: in 2 starts it did not get as far as its daemon"},
		"hang":      {watchdog: true, want: "version v2 did not start: in 2 starts it did not get as far as its daemon; it hung, and the watchdog restarted the machine"},
		"panic":     {crash: "Attempted to kill init!", want: "version v2 did not start: in 2 starts it did not get as far as its daemon; the kernel's last words: Attempted to kill init!"},
		"late hang": {ran: true, watchdog: true, want: "version v2 ran, and stopped before somebody confirmed it; it hung, and the watchdog restarted the machine"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			b.trial(Options{})
			if !tc.ran {
				if err := os.Remove(filepath.Join(b.dir, "update", reportFile)); err != nil {
					t.Fatal(err)
				}
			}
			b.last()
			b.watchdog, b.crash = tc.watchdog, tc.crash
			b.loader()
			if s := b.u.State(); s.Because != tc.want || (s.Log != "") != tc.ran {
				t.Errorf("%+v, want %q", s, tc.want)
			}
			b.loader()
			if got := b.u.State().Because; got != tc.want {
				t.Errorf("after another start: %q", got)
			}
		})
	}
}

// An update whose state cannot be copied is not tried.
func TestCopyFails(t *testing.T) {
	b := newBox(t)
	b.copies.err = errors.New("the disk is full")
	if err := b.push(packed(t, "v2", key("ours"))); err == nil {
		t.Error("it is staged")
	}
	b.is(bootctl.A, bootctl.None, "v1", false)
	b.loader()
	b.is(bootctl.A, bootctl.None, "v1", false)
}

// Boot files of an update that was interrupted go at the next start. Those that the boot environment names stay, and so does what is none.
func TestLeftovers(t *testing.T) {
	b := newBox(t)
	for _, name := range []string{"vmlinuz_b-half", "initramfs_a-half", "vmlinuz_c-x", "vmlinuz", "notes.txt"} {
		b.write("boot/"+name, []byte("x"))
	}
	b.start()
	all, err := os.ReadDir(filepath.Join(b.dir, "boot"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range all {
		names = append(names, f.Name())
	}
	if got, want := strings.Join(names, " "), "initramfs_a-first initramfs_b-first notes.txt vmlinuz vmlinuz_a-first vmlinuz_b-first vmlinuz_c-x"; got != want {
		t.Errorf("%q", got)
	}
}

// A boot environment that is damaged is repaired by the system that runs.
func TestEnvironmentIsRepaired(t *testing.T) {
	b := newBox(t)
	b.write("env", make([]byte, bootctl.Size))
	b.start()
	s, err := bootctl.New(filepath.Join(b.dir, "env"), bootctl.Boot{}).Read()
	if err != nil || s.Good != bootctl.A || s.Files.A != "first" {
		t.Errorf("%+v, %v", s, err)
	}
}

// Boot files that do not fit are refused before anything changes. Those of the same slot count as free.
func TestRoom(t *testing.T) {
	b := newBox(t)
	w := writer{cfg: b.u.cfg, slot: bootctl.B}
	m := bundle.Manifest{Version: "v2", Files: []bundle.File{{Name: bundle.Kernel, Size: 1 << 60}, {Name: bundle.Initramfs, Size: 1}}}
	if err := w.room(m); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("%v", err)
	}
	m.Files[0].Size = 1
	if err := w.room(m); err != nil {
		t.Error(err)
	}
}

func TestOptions(t *testing.T) {
	b := newBox(t)
	for _, o := range []Options{{Policy: "perhaps"}, {Deadline: time.Second}, {Deadline: time.Hour}} {
		if _, _, err := b.u.Stage(t.Context(), strings.NewReader(""), 0, "", o); !errdefs.IsInvalid(err) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	data := packed(t, "v0", key("ours"))
	if _, _, err := b.u.Stage(t.Context(), bytes.NewReader(data), uint64(len(data)), sumOf(data), Options{AllowDowngrade: true}); err != nil {
		t.Errorf("a downgrade that is allowed: %v", err)
	}
}
