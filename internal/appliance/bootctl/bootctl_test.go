package bootctl

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// installed is the block of a new installation, in which slot a runs.
func installed(t *testing.T, boot Boot) *Control {
	t.Helper()
	b, err := NewBlock("v1")
	if err != nil {
		t.Fatal(err)
	}
	return holding(t, b, boot)
}

func holding(t *testing.T, b []byte, boot Boot) *Control {
	t.Helper()
	path := filepath.Join(t.TempDir(), "grubenv")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return New(path, boot)
}

func read(t *testing.T, c *Control) State {
	t.Helper()
	s, err := c.Read()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

var (
	good  = Boot{Slot: A, Files: "v1"}
	trial = Boot{Slot: B, Trial: true, UID: "v2", Files: "v2"}
)

func TestSteps(t *testing.T) {
	type step func(*Control) error
	arm := func(slot Slot, tries int, uid string) step {
		return func(c *Control) error { return c.Arm(slot, tries, uid) }
	}
	vacate := func(slot Slot) step { return func(c *Control) error { return c.Vacate(slot) } }
	confirm, refuse, keep := (*Control).MarkGood, (*Control).MarkBad, (*Control).Keep
	as := func(boot Boot) step { return func(c *Control) error { c.boot = boot; return nil } }
	counted := func(c *Control) error { // what GRUB does
		_, s, _, err := c.load()
		s.Tries--
		b, _ := encode(s, nil)
		return errors.Join(err, os.WriteFile(c.path, b, 0o600))
	}
	both := Files{A: "v1", B: "v1"}
	for _, tt := range []struct {
		name  string
		steps []step
		want  State
		class errdefs.Class // of the last step; Internal: it succeeds
	}{
		{"a new installation", nil, State{Good: A, Files: both}, 0},
		{"an update is written", []step{vacate(B)}, State{Good: A, Files: Files{A: "v1"}}, 0},
		{"an update is armed", []step{vacate(B), arm(B, 2, "v2")}, State{Good: A, Try: B, Tries: 2, UID: "v2", Files: Files{"v1", "v2"}}, 0},
		{"a trial runs", []step{arm(B, 2, "v2"), counted, as(trial)}, State{Good: A, Try: B, Tries: 1, UID: "v2", Files: Files{"v1", "v2"}}, 0},
		{"it is confirmed", []step{arm(B, 2, "v2"), counted, as(trial), confirm}, State{Good: B, Files: Files{"v1", "v2"}}, 0},
		{"its last try is confirmed", []step{arm(B, 1, "v2"), counted, as(trial), confirm}, State{Good: B, Files: Files{"v1", "v2"}}, 0},
		{"confirmed twice", []step{arm(B, 2, "v2"), counted, as(trial), confirm, confirm}, State{Good: B, Files: Files{"v1", "v2"}}, errdefs.FailedPrecondition},
		{"it is rolled back", []step{arm(B, 2, "v2"), counted, as(trial), refuse}, State{Good: A, Try: B, UID: "v2", Files: Files{"v1", "v2"}}, 0},
		{"a restart during the trial costs no try", []step{arm(B, 2, "v2"), counted, as(trial), arm(B, 2, "v2")}, State{Good: A, Try: B, Tries: 2, UID: "v2", Files: Files{"v1", "v2"}}, 0},
		{"after a rollback there is a next update", []step{arm(B, 1, "v2"), counted, vacate(B), arm(B, 2, "v3")}, State{Good: A, Try: B, Tries: 2, UID: "v3", Files: Files{"v1", "v3"}}, 0},
		{"nothing to confirm", []step{confirm}, State{Good: A, Files: both}, errdefs.FailedPrecondition},
		{"nothing to roll back", []step{refuse}, State{Good: A, Files: both}, errdefs.FailedPrecondition},
		{"the old slot confirms nothing", []step{arm(B, 1, "v2"), counted, confirm}, State{Good: A, Try: B, UID: "v2", Files: Files{"v1", "v2"}}, errdefs.FailedPrecondition},
		{"the old slot is kept after a rollback: it is the good one", []step{arm(B, 1, "v2"), counted, keep}, State{Good: A, Try: B, UID: "v2", Files: Files{"v1", "v2"}}, errdefs.FailedPrecondition},
		{"the old slot was started instead of the good one, and is kept", []step{arm(B, 2, "v2"), counted, as(trial), confirm, as(good), keep}, State{Good: A, Files: Files{"v1", "v2"}}, 0},
		{"a slot on trial is not kept so", []step{arm(B, 2, "v2"), counted, as(trial), keep}, State{Good: A, Try: B, Tries: 1, UID: "v2", Files: Files{"v1", "v2"}}, errdefs.FailedPrecondition},
		{"another update's trial", []step{arm(B, 2, "v2"), as(Boot{Slot: B, Trial: true, UID: "v0"}), confirm}, State{Good: A, Try: B, Tries: 2, UID: "v2", Files: Files{"v1", "v2"}}, errdefs.FailedPrecondition},
		{"the good slot is not armed", []step{arm(A, 2, "v2")}, State{Good: A, Files: both}, errdefs.FailedPrecondition},
		{"the good slot is not vacated", []step{vacate(A)}, State{Good: A, Files: both}, errdefs.FailedPrecondition},
		{"a slot that runs is not vacated", []step{arm(B, 2, "v2"), counted, as(trial), vacate(B)}, State{Good: A, Try: B, Tries: 1, UID: "v2", Files: Files{"v1", "v2"}}, errdefs.FailedPrecondition},
		{"no second trial", []step{arm(B, 2, "v2"), arm(B, 2, "v3")}, State{Good: A, Try: B, Tries: 2, UID: "v2", Files: Files{"v1", "v2"}}, errdefs.FailedPrecondition},
		{"no slot", []step{arm(None, 2, "v2")}, State{Good: A, Files: both}, errdefs.InvalidArgument},
		{"no such slot", []step{vacate("c")}, State{Good: A, Files: both}, errdefs.InvalidArgument},
		{"no tries", []step{arm(B, 0, "v2")}, State{Good: A, Files: both}, errdefs.InvalidArgument},
		{"too many tries", []step{arm(B, 10, "v2")}, State{Good: A, Files: both}, errdefs.InvalidArgument},
		{"no id", []step{arm(B, 1, "")}, State{Good: A, Files: both}, errdefs.InvalidArgument},
		{"an id that is a line", []step{arm(B, 1, "v2\ngood=b")}, State{Good: A, Files: both}, errdefs.InvalidArgument},
		{"an id that is too long", []step{arm(B, 1, strings.Repeat("x", maxID+1))}, State{Good: A, Files: both}, errdefs.InvalidArgument},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := installed(t, good)
			for i, s := range tt.steps {
				err := s(c)
				if last := i == len(tt.steps)-1; last && tt.class != errdefs.Internal {
					if !errdefs.Is(err, tt.class) {
						t.Errorf("got %v, want a %s error", err, tt.class)
					}
				} else if err != nil {
					t.Fatal(err)
				}
			}
			if d := diff.Of(tt.want, read(t, c)); d != "" {
				t.Error(d)
			}
		})
	}
}

// A block that nobody can read is slot a, and nothing but Repair changes it.
func TestDamaged(t *testing.T) {
	whole, err := encode(State{Good: B, Files: Files{"v1", "v2"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	with := func(line string) []byte {
		b := bytes.Repeat([]byte("#"), Size)
		copy(b, header+line)
		return b
	}
	for name, b := range map[string][]byte{
		"empty": nil, "zeroed": make([]byte, Size), "short": whole[:sector], "long": append(bytes.Clone(whole), '#'),
		"a zeroed first sector": append(make([]byte, sector), whole[sector:]...), "a zeroed second sector": append(bytes.Clone(whole[:sector]), make([]byte, sector)...),
		"no slot": with("try=-\n"), "another slot": with("good=c\n"), "tries of no slot": with("good=a\ntries=1\n"), "the good one on trial": with("good=a\ntry=a\n"),
		"twice": with("good=a\ngood=b\n"), "no value": with("good=a\nx\n"), "no end": with("good=a\nx=" + strings.Repeat("y", Size-len(header)-9)), "an id that is none": with("good=a\nuid=a/b\n"),
		"two digits": with("good=a\ntry=b\ntries=10\n"),
	} {
		t.Run(name, func(t *testing.T) {
			c := holding(t, b, Boot{Slot: B, Files: "v2"})
			s, err := c.Read()
			if !errdefs.Is(err, errdefs.DataLoss) || s != (State{Good: A}) {
				t.Errorf("got %+v, %v", s, err)
			}
			for _, err := range []error{c.Vacate(A), c.Arm(A, 1, "v3"), c.MarkGood(), c.MarkBad(), c.Keep()} {
				if !errdefs.Is(err, errdefs.DataLoss) {
					t.Errorf("got %v, want a data loss error", err)
				}
			}
			if left, err := os.ReadFile(c.path); err != nil || !bytes.Equal(left, b) {
				t.Errorf("the block changed, %v", err)
			}
			if err := c.Repair(); err != nil {
				t.Fatal(err)
			}
			if d := diff.Of(State{Good: B, Files: Files{B: "v2"}}, read(t, c)); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestRepairIsForAGoodSlot(t *testing.T) {
	for name, boot := range map[string]Boot{"on trial": trial, "from no slot": {}, "without files": {Slot: A}} {
		if err := holding(t, make([]byte, Size), boot).Repair(); !errdefs.Is(err, errdefs.FailedPrecondition) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if err := installed(t, trial).Repair(); err != nil {
		t.Errorf("a whole block: %v", err)
	}
}

func TestMissing(t *testing.T) {
	c := New(filepath.Join(t.TempDir(), "grubenv"), good)
	if s, err := c.Read(); s != (State{Good: A}) || !errdefs.Is(err, errdefs.DataLoss) || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %+v, %v", s, err)
	}
}

// Every state fits into the first sector, and lines of others stay as they are.
func TestFirstSectorAlone(t *testing.T) {
	longest := strings.Repeat("x", maxID)
	b, err := encode(State{Good: A, Try: B, Tries: MaxTries, UID: longest, Files: Files{longest, longest}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if text := bytes.TrimRight(b, "#"); len(text) > sector {
		t.Errorf("a block has %d bytes", len(text))
	}
	others := []string{"saved_entry=x", `odd=a\` + "\n" + `b\\`}
	if b, err = encode(State{Good: A, Files: Files{A: "v1"}}, others); err != nil {
		t.Fatal(err)
	}
	c := holding(t, b, good)
	if err := c.Arm(B, 2, "v2"); err != nil {
		t.Fatal(err)
	}
	after, err := os.ReadFile(c.path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b[sector:], after[sector:]) {
		t.Error("the second sector changed")
	}
	if _, left, err := decode(after); err != nil || diff.Of(others, left) != "" {
		t.Errorf("%v, %s", err, diff.Of(others, left))
	}

	many := []string{"x=" + strings.Repeat("y", sector)}
	if b, err = encode(State{Good: A}, many); err != nil {
		t.Fatal(err)
	}
	if err := holding(t, b, good).Arm(B, 2, "v2"); !errdefs.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("a change of both sectors: got %v", err)
	}
}

// The tool of GRUB reads what we write, and we read what it writes.
func TestGRUBAgrees(t *testing.T) {
	tool := need.Tool(t, "grub-editenv")
	c := installed(t, good)
	if err := c.Arm(B, 2, "v2"); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), tool, c.path, "list").CombinedOutput()
	if d := diff.Of("good=a\ntry=b\ntries=2\nfiles_a=v1\nfiles_b=v2\nuid=v2\n", string(out)); err != nil || d != "" {
		t.Errorf("%v, %s", err, d)
	}
	if out, err := exec.CommandContext(t.Context(), tool, c.path, "set", "tries=1").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if d := diff.Of(State{Good: A, Try: B, Tries: 1, UID: "v2", Files: Files{"v1", "v2"}}, read(t, c)); d != "" {
		t.Error(d)
	}
	if out, err := exec.CommandContext(t.Context(), tool, c.path, "create").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := exec.CommandContext(t.Context(), tool, c.path, "set", "good=b", "try=a", "tries=3", "other=xy").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if d := diff.Of(State{Good: B, Try: A, Tries: 3}, read(t, c)); d != "" {
		t.Error(d)
	}
}

func TestParseBoot(t *testing.T) {
	for cmdline, want := range map[string]Boot{
		"": {},
		"root=PARTUUID=b1a570ff-02 capsule.slot=a capsule.files=v1 console=tty0": {Slot: A, Files: "v1"},
		"capsule.slot=b capsule.files=v2 capsule.trial=1 capsule.uid=v2\n":       trial,
		"capsule.slot=b capsule.uid=v2":                                          {Slot: B},
		"capsule.slot=c capsule.trial=1 capsule.uid=v2":                          {},
		"capsule.trial=1":                      {},
		"capsule.slot=a capsule.files=../../x": {Slot: A},
	} {
		if got := ParseBoot(cmdline); got != want {
			t.Errorf("%q: got %+v, want %+v", cmdline, got, want)
		}
	}
}

// Whatever the block holds, it is damaged, or a valid state that is written as it was read.
func FuzzDecode(f *testing.F) {
	for _, s := range []State{{Good: A}, {Good: A, Try: B, Tries: 2, UID: "v2", Files: Files{"v1", "v2"}}} {
		b, err := encode(s, []string{`x=a\` + "\n"})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add(make([]byte, Size))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < Size { // most mutations change the length
			b = append(bytes.Clone(b), bytes.Repeat([]byte("#"), Size-len(b))...)
		}
		s, foreign, err := decode(b)
		if err != nil {
			return
		}
		if s.Good != A && s.Good != B || s.Try == s.Good || s.Tries < 0 || s.Tries > MaxTries || !validID(s.UID) || !validID(s.Files.A) || !validID(s.Files.B) {
			t.Fatalf("an invalid state: %+v", s)
		}
		again, err := encode(s, foreign)
		if errdefs.Is(err, errdefs.ResourceExhausted) { // it had none of our lines, and no room for them
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if s2, foreign2, err := decode(again); err != nil || s2 != s || diff.Of(foreign, foreign2) != "" {
			t.Fatalf("read %+v %q, then %+v %q, %v", s, foreign, s2, foreign2, err)
		}
	})
}
