package pid1

import (
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"
)

// dog counts how often it is fed.
type dog struct{ fed int }

func (d *dog) feed() error { d.fed++; return nil }

type rig struct {
	keeper
	dog             dog
	alive           life
	kills, restarts int
	isTrial         bool
}

func newRig() *rig {
	r := &rig{}
	r.keeper = keeper{
		life: &r.alive, dogs: &r.dog, trial: func() bool { return r.isTrial }, kill: func() { r.kills++ }, restart: func() { r.restarts++ },
		log: slog.New(slog.DiscardHandler),
	}
	return r
}

// pass lets time pass, in which the keeper looks as often as it does.
func (r *rig) pass(d time.Duration, beats bool) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		if beats {
			r.alive.tell()
		}
		r.look()
		<-time.After(feedEvery)
	}
}

// A daemon that hangs on trial starves the watchdog. One that was killed and is started again does not.
func TestHangOnTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.isTrial = true
		r.alive.begin(prepareLimit)
		r.pass(10*time.Minute, false)
		for range 20 { // the daemon starts, lives and is killed
			r.alive.begin(firstBeat)
			r.pass(2*time.Minute, true)
		}
		r.alive.begin(firstBeat)
		r.pass(2*time.Minute, true)
		fed := r.dog.fed
		r.pass(silence-feedEvery, false)
		if r.dog.fed == fed || r.kills != 0 || r.restarts != 0 {
			t.Errorf("fed %d times, killed %d, restarted %d while it lived", r.dog.fed-fed, r.kills, r.restarts)
		}
		fed = r.dog.fed
		r.pass(watchdogTimeout+2*feedEvery, false)
		if n := r.dog.fed - fed; n > 1 || r.kills != 0 || r.restarts != 1 {
			t.Errorf("fed %d times, killed %d, restarted %d after it hung", n, r.kills, r.restarts)
		}
	})
}

// A daemon that never says a word on trial is one that hangs, too.
func TestSilentOnTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.isTrial = true
		r.alive.begin(firstBeat)
		r.pass(firstBeat, false)
		fed := r.dog.fed
		r.pass(time.Hour, false)
		if n := r.dog.fed - fed; n != 0 || r.restarts != 1 {
			t.Errorf("fed %d times, restarted %d", n, r.restarts)
		}
	})
}

// Outside of a trial a daemon that hangs is killed, and the machine goes on.
func TestHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig()
		r.alive.begin(firstBeat)
		r.pass(time.Minute, true)
		fed := r.dog.fed
		r.pass(silence+feedEvery, false)
		if r.kills != 1 || r.restarts != 0 || r.dog.fed-fed < int(silence/feedEvery) {
			t.Errorf("killed %d, restarted %d, fed %d", r.kills, r.restarts, r.dog.fed-fed)
		}
		r.pass(firstBeat-2*feedEvery, false)
		if r.kills != 1 {
			t.Errorf("killed %d times before the next one could answer", r.kills)
		}
	})
}

// The daemon's messages are systemd's.
func TestMessages(t *testing.T) {
	path := filepath.Join(t.TempDir(), "alive")
	var l life
	failed := make(chan error, 1)
	go func() { failed <- l.listen(path) }()
	var c net.Conn
	for c == nil {
		var err error
		if c, err = net.Dial("unixgram", path); err != nil { //nolint:noctx // local
			select {
			case err := <-failed:
				t.Fatal(err)
			default:
			}
		}
	}
	defer c.Close()
	for _, message := range []string{"READY=1", "STATUS=x\nWATCHDOG=1\n"} {
		if _, err := c.Write([]byte(message)); err != nil {
			t.Fatal(err)
		}
	}
	for !l.alive() {
		select {
		case err := <-failed:
			t.Fatal(err)
		default:
		}
	}
}

func TestResetByWatchdog(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name, "bootstatus"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("watchdog0", "0\n")
	write("watchdog1", "junk")
	if resetByWatchdog(dir) {
		t.Error("no watchdog has reset it")
	}
	write("watchdog1", "32\n")
	if !resetByWatchdog(dir) {
		t.Error("a watchdog has reset it")
	}
}

// Each device is opened once, fed, and disarmed by the letter that the kernel wants.
func TestWatchdogs(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "watchdog0")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var w watchdogs
	for range 2 {
		if n, err := w.find(filepath.Join(dir, "watchdog[0-9]*")); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	for range 2 {
		if err := w.feed(); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.disarm(); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "\x00\x00V" || w.count() != 0 {
		t.Errorf("%q, %v", text, err)
	}
}

// The line of a panic is found in any of the records, and nothing else.
func TestLastWords(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("console-ramoops-0", "Kernel panic - not syncing: of others\n")
	write("dmesg-efi-1", "<4>[    1.0] nothing\n")
	if got := lastWords(dir); got != "" {
		t.Errorf("%q", got)
	}
	write("dmesg-efi-2", "Panic#1 Part1\n<0>[    2.1] Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000100\n<4>[    2.2] CPU: 0\n")
	if got, want := lastWords(dir), "Attempted to kill init! exitcode=0x00000100"; got != want {
		t.Errorf("%q", got)
	}
}
