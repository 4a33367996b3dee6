// Package bootctl keeps which of the two system slots of an appliance starts, in the environment block of its boot loader.
//
// The block is the only truth. GRUB reads it at each start, and counts a trial down before it starts the kernel, so a kernel that
// panics or hangs ends on the slot that was good. The package changes one sector in place, durably; it neither writes slots nor
// mounts the boot partition.
package bootctl

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Slot is one of the two places of a system; the zero value is none.
type Slot string

// The slots.
const (
	None Slot = ""
	A    Slot = "a"
	B    Slot = "b"
)

// Other returns the other slot, None for None.
func (s Slot) Other() Slot {
	switch s {
	case A:
		return B
	case B:
		return A
	case None:
	}
	return None
}

// Files are the ids in the names of the boot files of each slot: slot b starts vmlinuz_b-ID with initramfs_b-ID. A slot without an id
// holds nothing that starts.
type Files struct{ A, B string }

// Of returns the id of slot s.
func (f Files) Of(s Slot) string {
	switch s {
	case A:
		return f.A
	case B:
		return f.B
	case None:
	}
	return ""
}

func (f *Files) set(s Slot, id string) {
	switch s {
	case A:
		f.A = id
	case B:
		f.B = id
	case None:
	}
}

// State is what the boot loader knows. The zero value is no valid state: Good is always a slot.
type State struct {
	Good  Slot   // starts unless a trial is open
	Try   Slot   // the slot of the last trial, None after Vacate and MarkGood
	Tries int    // starts that the trial has left; the loader counts down before it starts the kernel
	UID   string // the update of the trial
	Files Files
}

// Open reports whether the next start is a trial.
func (s State) Open() bool { return s.Try != None && s.Tries > 0 }

// MaxTries is the largest number of starts of a trial. It is one digit, so that counting never moves a byte.
const MaxTries = 9

// Control reads and changes the environment block at one path, for the system that Boot describes. Its methods may be called concurrently.
type Control struct {
	path string
	boot Boot

	mu sync.Mutex
}

// New returns the control of the block in the file path, for a system that was started as boot says. It touches nothing.
func New(path string, boot Boot) *Control { return &Control{path: path, boot: boot} }

// Read returns the state. A block that is missing, damaged or zeroed is what the loader makes of it, slot a without a trial, and a DataLoss
// error that says so.
func (c *Control) Read() (State, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, s, _, err := c.load()
	return s, err
}

// Vacate says that slot holds nothing that starts, and that no trial is open: the first step of an update, before a byte of the slot is
// written. It refuses the good slot and the one that runs.
func (c *Control) Vacate(slot Slot) error {
	return c.change("vacate slot "+string(slot), func(s *State) error {
		if err := c.spare(*s, slot); err != nil {
			return err
		}
		if s.Try == c.boot.Slot && s.Try != None {
			return errdefs.Preconditionf("slot %s runs on trial; confirm or roll back first", s.Try)
		}
		s.Try, s.Tries, s.UID = None, 0, ""
		s.Files.set(slot, "")
		return nil
	})
}

// Arm makes the next tries starts those of slot, whose boot files are named with uid: the only step of an update that commits. Once
// it returns nil, the trial survives a power cut. Called again for the same update, as before a wanted restart during a trial, it only sets tries.
// Preconditions: the slot and its boot files are durable and verified.
func (c *Control) Arm(slot Slot, tries int, uid string) error {
	return c.change(fmt.Sprintf("arm slot %s for update %s", slot, uid), func(s *State) error {
		switch {
		case tries < 1 || tries > MaxTries:
			return errdefs.Invalidf("%d tries are not 1 to %d", tries, MaxTries)
		case uid == "" || !validID(uid):
			return errdefs.Invalidf("the id %q is not 1 to %d small letters, digits, dots, hyphens and underscores", uid, maxID)
		case s.Try == slot && s.UID == uid && slot != s.Good && slot != None:
			s.Tries = tries
			return nil
		case s.Open():
			return errdefs.Preconditionf("update %s is on trial in slot %s; wait until it is confirmed or rolled back", s.UID, s.Try)
		}
		if err := c.spare(*s, slot); err != nil {
			return err
		}
		s.Try, s.Tries, s.UID = slot, tries, uid
		s.Files.set(slot, uid)
		return nil
	})
}

// MarkGood ends the trial of the slot that runs: from now on it is the good one. Without a trial of it, it is a FailedPrecondition error.
func (c *Control) MarkGood() error {
	return c.change("confirm the update", func(s *State) error {
		if err := c.onTrial(*s); err != nil {
			return err
		}
		s.Good, s.Try, s.Tries, s.UID = s.Try, None, 0, ""
		return nil
	})
}

// MarkBad takes all tries that are left from the trial, so that the next start is the good slot's. Try and UID remain, and tell that system
// what was rolled back. Without a trial, it is a FailedPrecondition error.
func (c *Control) MarkBad() error {
	return c.change("roll the update back", func(s *State) error {
		if s.Try == None {
			return errdefs.Preconditionf("no update is on trial")
		}
		s.Tries = 0
		return nil
	})
}

// Keep makes the slot that runs the good one, after the loader has started it instead of the good one: that one does not start any more, or somebody chose this
// one at the console. In the good slot and on trial, it is a FailedPrecondition error.
func (c *Control) Keep() error {
	return c.change("keep the slot that runs", func(s *State) error {
		if c.boot.Slot == None || c.boot.Trial || c.boot.Files == "" || c.boot.Slot == s.Good {
			return errdefs.Preconditionf("slot %s is the good one, and no other one was started in its place", s.Good)
		}
		s.Good, s.Try, s.Tries, s.UID = c.boot.Slot, None, 0, ""
		s.Files.set(s.Good, c.boot.Files)
		return nil
	})
}

// Repair replaces a damaged block: the slot that runs is good, and the other one holds nothing that starts. It does nothing to a block that
// can be read. On a system that was started on trial, or in no slot, it is a FailedPrecondition error.
func (c *Control) Repair() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	old, _, _, err := c.load()
	switch {
	case err == nil || !errdefs.Is(err, errdefs.DataLoss):
		return err
	case c.boot.Slot == None || c.boot.Trial || c.boot.Files == "":
		return errdefs.Preconditionf("the boot environment %s cannot be repaired from here: this system did not start in a good slot", c.path)
	}
	s := State{Good: c.boot.Slot}
	s.Files.set(s.Good, c.boot.Files)
	return c.store(old, s, nil)
}

// spare refuses a slot that must stay as it is.
func (c *Control) spare(s State, slot Slot) error {
	switch {
	case slot != A && slot != B:
		return errdefs.Invalidf("%q is no slot", string(slot))
	case slot == s.Good:
		return errdefs.Preconditionf("slot %s is the good one", slot)
	case slot == c.boot.Slot:
		return errdefs.Preconditionf("slot %s runs", slot)
	}
	return nil
}

// onTrial refuses unless the slot that runs is on trial, by the update that the block names.
func (c *Control) onTrial(s State) error {
	switch {
	case s.Try == None:
		return errdefs.Preconditionf("no update is on trial")
	case s.Try != c.boot.Slot:
		return errdefs.Preconditionf("update %s in slot %s did not start: slot %s runs", s.UID, s.Try, c.boot.Slot)
	case s.UID != c.boot.UID:
		return errdefs.Preconditionf("this system started on trial of update %q, and the boot environment has update %q", c.boot.UID, s.UID)
	}
	return nil
}

// change applies f to the state and makes the result durable.
func (c *Control) change(what string, f func(*State) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	old, s, foreign, err := c.load()
	if err == nil {
		err = f(&s)
	}
	if err == nil {
		err = c.store(old, s, foreign)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// load returns the bytes of the block, its state and the lines of it that are not ours.
func (c *Control) load() ([]byte, State, []string, error) {
	f, err := os.Open(c.path)
	if err != nil {
		return nil, State{Good: A}, nil, errdefs.DataLossf("read the boot environment: %w; slot a is taken for good", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, Size+1))
	if err != nil {
		return nil, State{Good: A}, nil, errdefs.DataLossf("read the boot environment: %w; slot a is taken for good", err)
	}
	s, foreign, err := decode(b)
	if err != nil {
		return b, State{Good: A}, nil, errdefs.DataLossf("the boot environment %s is damaged: %w; slot a is taken for good, Repair writes it anew", c.path, err)
	}
	return b, s, foreign, nil
}

// store makes s durable. It writes the first sector alone, in place, and only if it changes: a power cut leaves the old one or the new one. A block of the
// wrong size has no good bytes to lose, so all of it is written.
func (c *Control) store(old []byte, s State, foreign []string) (err error) {
	b, err := encode(s, foreign)
	if err != nil {
		return err
	}
	whole := len(old) != Size
	if !whole && string(old[sector:]) != string(b[sector:]) {
		if len(foreign) != 0 {
			return errdefs.Preconditionf("the boot environment %s has too many variables of others; remove them with grub-editenv", c.path)
		}
		whole = true
	}
	f, err := os.OpenFile(c.path, os.O_RDWR|os.O_SYNC, 0)
	if err != nil {
		return fmt.Errorf("write the boot environment: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if whole { // the padding first: the sector with the state makes the block valid
		if err := f.Truncate(Size); err != nil {
			return fmt.Errorf("write the boot environment: %w", err)
		}
		if _, err := f.WriteAt(b[sector:], sector); err != nil {
			return fmt.Errorf("write the boot environment: %w", err)
		}
	}
	if whole || string(old[:sector]) != string(b[:sector]) {
		if _, err := f.WriteAt(b[:sector], 0); err != nil {
			return fmt.Errorf("write the boot environment: %w", err)
		}
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("write the boot environment: %w", err)
	}
	return nil
}
