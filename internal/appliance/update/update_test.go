package update

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
	"cocoonstack.io/cocoon/internal/appliance/bundle"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal/journaltest"
)

func key(name string) ed25519.PrivateKey {
	seed := sha256.Sum256([]byte(name))
	return ed25519.NewKeyFromSeed(seed[:])
}

// shared is a variable of a test and of the updater that runs beside it.
type shared[T any] struct {
	mu sync.Mutex
	v  T
}

func (s *shared[T]) set(v T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.v = v
}

func (s *shared[T]) get() T {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.v
}

// box is a machine with two slots, which are files.
type box struct {
	t        *testing.T
	dir      string
	boot     bootctl.Boot
	version  string
	age      func() time.Duration
	restarts shared[int]
	boots    int
	failing  shared[string]   // what the gate says
	runs     shared[[]string] // workloads
	watchdog bool
	crash    string
	copies   *copies
	docs     *journaltest.Documents
	u        *Updater
}

const slotSize = 8 << 20

func newBox(t *testing.T) *box {
	b := &box{t: t, dir: t.TempDir(), boot: bootctl.Boot{Slot: bootctl.A, Files: "first"}, version: "v1", age: func() time.Duration { return 0 }, docs: journaltest.NewDocuments(), copies: &copies{}}
	block, err := bootctl.NewBlock("first")
	if err != nil {
		t.Fatal(err)
	}
	b.write("env", block)
	for _, name := range []string{"a", "b"} {
		b.write("slot_"+name, make([]byte, slotSize))
		b.write("boot/vmlinuz_"+name+"-first", []byte("old kernel"))
		b.write("boot/initramfs_"+name+"-first", []byte("old initramfs"))
	}
	b.start()
	return b
}

func (b *box) write(name string, data []byte) {
	b.t.Helper()
	path := filepath.Join(b.dir, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, data, 0o600)); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) read(name string) string {
	b.t.Helper()
	text, err := os.ReadFile(filepath.Join(b.dir, name))
	if err != nil {
		b.t.Fatal(err)
	}
	return string(text)
}

// start starts the daemon of the system that b.boot says.
func (b *box) start() {
	b.t.Helper()
	var err error
	b.u, err = Open(b.t.Context(), Config{
		Boot: b.boot, Control: bootctl.New(filepath.Join(b.dir, "env"), b.boot), Keys: []ed25519.PublicKey{key("ours").Public().(ed25519.PublicKey)},
		Version: b.version, Arch: "amd64", Slot: func(s bootctl.Slot) (string, error) { return filepath.Join(b.dir, "slot_"+string(s)), nil },
		BootDir: filepath.Join(b.dir, "boot"), Documents: b.docs, Restart: func() error { b.restarts.set(b.restarts.get() + 1); return nil },
		Age: func() time.Duration { return b.age() }, Log: slog.New(slog.DiscardHandler),
		Health: Health{
			Gates:   []Gate{{"uplink", func(context.Context) error { return b.gate() }}},
			Running: func() []string { return b.runs.get() },
			Missing: func(ran []string) []string {
				return slices.DeleteFunc(slices.Clone(ran), func(name string) bool { return slices.Contains(b.runs.get(), name) })
			},
		},
		Copies: b.copies,
		Evidence: Evidence{
			Dir: filepath.Join(b.dir, "update"), BootID: strconv.Itoa(b.boots), Said: func() string { return "log of start " + strconv.Itoa(b.boots) },
			Watchdog: func() bool { return b.watchdog }, Crash: func() string { return b.crash },
		},
	})
	if err != nil {
		b.t.Fatal(err)
	}
}

// clock lets the machine boot now.
func (b *box) clock() {
	began := time.Now()
	b.age = func() time.Duration { return time.Since(began) }
}

func (b *box) gate() error {
	if failing := b.failing.get(); failing != "" {
		return errors.New(failing)
	}
	return nil
}

// copies are those of the state.
type copies struct {
	err    error
	update shared[string] // whose copy there is
}

func (c *copies) Take(_ context.Context, update string) error {
	if c.err == nil {
		c.update.set(update)
	}
	return c.err
}

func (c *copies) Remove() error { c.update.set(""); return nil }

// loader counts a try down, and starts what the environment says.
func (b *box) loader() {
	b.t.Helper()
	c := bootctl.New(filepath.Join(b.dir, "env"), bootctl.Boot{})
	s, err := c.Read()
	if err != nil {
		b.t.Fatal(err)
	}
	b.boot = bootctl.Boot{Slot: s.Good, Files: s.Files.Of(s.Good)}
	if s.Open() {
		b.boot = bootctl.Boot{Slot: s.Try, Trial: true, UID: s.UID, Files: s.UID}
		if err := c.Arm(s.Try, s.Tries-1, s.UID); s.Tries > 1 && err != nil {
			b.t.Fatal(err)
		}
		if s.Tries == 1 {
			b.last()
		}
	}
	b.boots++
	b.version = map[bool]string{true: "v2", false: "v1"}[b.boot.Files != "first"]
	b.start()
}

// last takes the last try, as the loader does.
func (b *box) last() {
	text := b.read("env")
	now := strings.Replace(text, "tries=1", "tries=0", 1)
	if now == text {
		b.t.Fatalf("the environment has no last try: %q", text[:200])
	}
	b.write("env", []byte(now))
}

func packed(t *testing.T, version string, signer ed25519.PrivateKey) []byte {
	t.Helper()
	var out bytes.Buffer
	err := bundle.Write(&out, bundle.Manifest{Version: version, Architecture: "amd64"}, []bundle.Source{
		{Name: bundle.Version, Content: strings.NewReader(version + "\n")},
		{Name: bundle.Kernel, Content: strings.NewReader("kernel " + version)},
		{Name: bundle.Initramfs, Content: strings.NewReader("initramfs " + version)},
		{Name: bundle.Root, Content: strings.NewReader(strings.Repeat(version+" ", 1_500_000))},
	}, signer)
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func sumOf(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func (b *box) push(data []byte) error {
	_, _, err := b.u.Stage(b.t.Context(), bytes.NewReader(data), uint64(len(data)), sumOf(data), Options{})
	return err
}

func (b *box) is(active, pending bootctl.Slot, good string, rolledBack bool) {
	b.t.Helper()
	s := b.u.State()
	if s.Active != active || s.Pending != pending || s.Good != good || (s.Because != "") != rolledBack {
		b.t.Errorf("state %+v, want %q active, %q pending, %s good, rolled back %v", s, active, pending, good, rolledBack)
	}
}

// An update is tried and confirmed, and the next one goes to the slot that is free then.
func TestUpdate(t *testing.T) {
	b := newBox(t)
	b.is(bootctl.A, bootctl.None, "v1", false)
	if _, _, err := b.u.Confirm(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("confirm without an update: %v", err)
	}
	data := packed(t, "v2", key("ours"))
	slot, version, err := b.u.Stage(t.Context(), bytes.NewReader(append(bytes.Clone(data), "more"...)), uint64(len(data)), sumOf(data), Options{})
	if err != nil || slot != bootctl.B || version != "v2" {
		t.Fatalf("%q, %q, %v", slot, version, err)
	}
	b.is(bootctl.A, bootctl.B, "v1", false)
	if err := b.push(data); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a second update before the first has started: %v", err)
	}
	b.loader()
	b.is(bootctl.B, bootctl.B, "v1", false)
	if err := b.push(data); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("an update on trial: %v", err)
	}
	if slot, version, err := b.u.Confirm(t.Context()); err != nil || slot != bootctl.B || version != "v2" {
		t.Errorf("%q, %q, %v", slot, version, err)
	}
	b.start() // the daemon starts again, and the command line still says trial
	b.is(bootctl.B, bootctl.None, "v2", false)
	b.loader()
	b.is(bootctl.B, bootctl.None, "v2", false)
	if !strings.HasPrefix(b.read("slot_b"), "v2 v2 ") || b.read("boot/vmlinuz_b-"+b.boot.Files) != "kernel v2" || b.read("boot/vmlinuz_a-first") != "old kernel" {
		t.Error("the slots or their boot files are others")
	}
	if err := b.push(packed(t, "v3", key("ours"))); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(filepath.Join(b.dir, "boot/vmlinuz_a-first")); !os.IsNotExist(err) {
		t.Errorf("the boot files of the slot before are still there: %v", err)
	}
}

// The good slot does not start any more, so the loader has started the other one. The operator keeps that, and can push updates again.
func TestGoodSlotIsLost(t *testing.T) {
	b := newBox(t)
	if err := b.push(packed(t, "v2", key("ours"))); err != nil {
		t.Fatal(err)
	}
	b.loader()
	if _, _, err := b.u.Confirm(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.boot, b.version = bootctl.Boot{Slot: bootctl.A, Files: "first"}, "v1"
	b.start()
	if because := b.u.State().Because; !strings.Contains(because, "slot b is the good one") {
		t.Errorf("the machine says %q", because)
	}
	next := packed(t, "v3", key("ours"))
	if err := b.push(next); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "capsule update confirm") {
		t.Errorf("an update over the good slot: %v", err)
	}
	if slot, version, err := b.u.Confirm(t.Context()); err != nil || slot != bootctl.A || version != "v1" {
		t.Errorf("%q, %q, %v", slot, version, err)
	}
	b.is(bootctl.A, bootctl.None, "v1", false)
	if err := b.push(next); err != nil {
		t.Error(err)
	}
	b.loader()
	b.is(bootctl.B, bootctl.B, "v1", false)
}

// What nobody confirms is rolled back: by the loader, or by the deadline.
func TestRollback(t *testing.T) {
	b := newBox(t)
	if err := b.push(packed(t, "v2", key("ours"))); err != nil {
		t.Fatal(err)
	}
	b.loader()
	b.loader()
	b.is(bootctl.B, bootctl.B, "v1", false)
	b.loader() // no try is left
	b.is(bootctl.A, bootctl.None, "v1", true)
	synctest.Test(t, func(t *testing.T) {
		b.t = t
		if err := b.push(packed(t, "v2.1", key("ours"))); err != nil {
			t.Fatal(err)
		}
		b.loader()
		b.clock()
		b.u.Run(t.Context())
		if b.restarts.get() != 1 {
			t.Errorf("%d restarts at the deadline", b.restarts.get())
		}
		b.loader()
		b.is(bootctl.A, bootctl.None, "v1", true)
	})
}

// A wanted restart during a trial takes no try from it.
func TestRestartDuringATrial(t *testing.T) {
	b := newBox(t)
	if err := b.push(packed(t, "v2", key("ours"))); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		b.loader()
		b.is(bootctl.B, bootctl.B, "v1", false)
		if err := b.u.Reboot(); err != nil {
			t.Fatal(err)
		}
	}
}

// What is refused leaves the machine as it was: it starts the good slot.
func TestRefused(t *testing.T) {
	good := packed(t, "v2", key("ours"))
	flip := func(at int) []byte {
		b := bytes.Clone(good)
		b[at] ^= 1
		return b
	}
	big := func() []byte {
		var out bytes.Buffer
		err := bundle.Write(&out, bundle.Manifest{Version: "v2", Architecture: "amd64"}, []bundle.Source{
			{Name: bundle.Version, Content: strings.NewReader("v2\n")},
			{Name: bundle.Kernel, Content: strings.NewReader("k")},
			{Name: bundle.Initramfs, Content: strings.NewReader("i")},
			{Name: bundle.Root, Content: strings.NewReader(strings.Repeat("r", slotSize+1))},
		}, key("ours"))
		if err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
	untouched := map[string]bool{"of a stranger": true, "an older version": true, "too large": true, "no bundle": true, "manifest": true}
	for name, tc := range map[string]struct {
		data []byte
		sum  string
		size int
		want errdefs.Class
	}{
		"of a stranger":    {data: packed(t, "v2", key("theirs")), want: errdefs.FailedPrecondition},
		"an older version": {data: packed(t, "v0", key("ours")), want: errdefs.FailedPrecondition},
		"too large":        {data: big(), want: errdefs.FailedPrecondition},
		"no bundle":        {data: []byte(strings.Repeat("x", 4096)), want: errdefs.InvalidArgument},
		"manifest":         {data: flip(600), want: errdefs.FailedPrecondition},
		"a byte differs":   {data: flip(len(good) - 9000), want: errdefs.DataLoss},
		"cut off":          {data: good[:len(good)/2], size: len(good), want: errdefs.DataLoss},
		"another checksum": {data: good, sum: sumOf(nil), want: errdefs.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			if tc.sum == "" {
				tc.sum = sumOf(tc.data)
			}
			if tc.size == 0 {
				tc.size = len(tc.data)
			}
			before := b.read("slot_b")
			_, _, err := b.u.Stage(t.Context(), bytes.NewReader(tc.data), uint64(tc.size), tc.sum, Options{})
			if errdefs.ClassOf(err) != tc.want {
				t.Errorf("%v, want %v", err, tc.want)
			}
			if untouched[name] && b.read("slot_b") != before {
				t.Error("the slot has changed")
			}
			b.is(bootctl.A, bootctl.None, "v1", false)
			b.loader()
			b.is(bootctl.A, bootctl.None, "v1", false)
			if err := b.push(good); err != nil {
				t.Errorf("the next one: %v", err)
			}
		})
	}
}
