// Package update brings another version of Cocoon OS into the slot that is not in use, lets the boot loader try it, and confirms it.
//
// What is committed is in the boot environment alone (package bootctl). The document of this package is only a journal: it says what was
// staged and what became of it, and is never believed against the environment. No byte is written before the signature of the bundle has
// been verified, and the slot in use, with its boot files, is never touched.
package update

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
	"cocoonstack.io/cocoon/internal/appliance/bundle"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
)

const (
	// Tries is how often the boot loader tries a version that nobody has confirmed.
	Tries = 2
	// Deadline is how long after its boot a version on trial may wait until it is confirmed.
	Deadline = 10 * time.Minute
)

// the only document of its table
const current = "current"

// record is the journal of updates.
type record struct {
	Slot    bootctl.Slot `json:"slot,omitempty"`    // of the last update
	Version string       `json:"version,omitempty"` // of the last update
	UID     string       `json:"uid,omitempty"`     // of its trial
	Phase   phase        `json:"phase,omitempty"`
	Good    string       `json:"last_version,omitempty"` // the version that was confirmed last
	Because string       `json:"because,omitempty"`      // why the last update was rolled back
}

type phase string

const (
	staged     phase = "staged" // written, and perhaps not armed
	confirmed  phase = "confirmed"
	rolledBack phase = "rolled back"
)

// Config configures an Updater.
type Config struct {
	Boot    bootctl.Boot     // how this system was started
	Control *bootctl.Control // of its boot loader
	Keys    []ed25519.PublicKey
	Version string // that runs
	Arch    string // as Go calls it

	Slot    func(bootctl.Slot) (device string, err error)
	BootDir string // where the boot partition is mounted

	Documents journal.Documents
	Restart   func() error         // has the machine boot again soon
	Age       func() time.Duration // since the machine has booted; it does not depend on the clock
	Log       *slog.Logger
}

// Updater updates the system. Safe for concurrent use.
type Updater struct {
	cfg Config

	mu      sync.Mutex // one update, confirmation or restart at a time
	record  record
	pending bool // this system is on trial
}

// Open reads what became of the last update.
func Open(ctx context.Context, cfg Config) (*Updater, error) {
	u := &Updater{cfg: cfg, pending: onTrial(cfg)}
	data, err := cfg.Documents.Get(ctx, journal.OSState, current)
	switch {
	case errdefs.IsNotFound(err):
		u.record.Good = cfg.Version
	case err != nil:
		return nil, err
	default:
		if err := json.Unmarshal(data, &u.record); err != nil {
			cfg.Log.Warn("the journal of updates is damaged, and begins anew", "err", err)
			u.record = record{}
		}
	}
	return u, u.settle(ctx)
}

// onTrial reports whether this system is on trial. The command line says so until the next start, also after the trial has ended.
func onTrial(cfg Config) bool {
	s, err := cfg.Control.Read()
	if err != nil {
		return cfg.Boot.Trial // who cannot read the environment cannot have confirmed it
	}
	return cfg.Boot.Trial && s.Good != cfg.Boot.Slot && s.Try == cfg.Boot.Slot && s.UID == cfg.Boot.UID
}

// settle brings the journal in line with the boot environment.
func (u *Updater) settle(ctx context.Context) error {
	if u.pending || u.record.Phase != staged {
		return nil
	}
	s, err := u.cfg.Control.Read()
	switch {
	case err != nil:
		u.cfg.Log.Error("the boot environment is damaged", "err", err)
		return nil
	case s.Good == u.record.Slot && s.Files.Of(s.Good) == u.record.UID:
		u.record.Phase, u.record.Good = confirmed, u.record.Version
	case s.Open():
		return nil // it starts next
	case s.UID == u.record.UID:
		u.record.Phase, u.record.Because = rolledBack, fmt.Sprintf("version %s did not start %d times, or nobody confirmed it", u.record.Version, Tries)
	default:
		u.record.Phase, u.record.Because = rolledBack, "it was not armed: the machine stopped while it was written"
	}
	if u.record.Phase == rolledBack {
		u.cfg.Log.Warn("the last update was rolled back", "version", u.record.Version, "slot", u.record.Slot, "because", u.record.Because)
	}
	return u.store(ctx)
}

func (u *Updater) store(ctx context.Context) error {
	data, err := json.Marshal(u.record)
	if err != nil {
		return err
	}
	return u.cfg.Documents.Write(ctx, journal.Change{Table: journal.OSState, Name: current, Data: data})
}

// Run ends a trial that nobody confirms, by a restart into the good slot. It returns when ctx ends.
func (u *Updater) Run(ctx context.Context) {
	if !u.Pending() {
		return
	}
	u.cfg.Log.Warn("this version is on trial; confirm it, or the machine goes back to the one before", "version", u.cfg.Version, "slot", u.cfg.Boot.Slot, "in", (Deadline - u.cfg.Age()).Round(time.Second))
	t := time.NewTimer(Deadline - u.cfg.Age())
	defer t.Stop()
	select {
	case <-ctx.Done():
		return
	case <-t.C:
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.pending {
		return
	}
	u.cfg.Log.Error("nobody has confirmed this version in time; the machine goes back to the one before", "version", u.cfg.Version)
	if err := u.cfg.Control.MarkBad(); err != nil { // the boot loader counts the tries in any case
		u.cfg.Log.Error("the trial is not ended", "err", err)
	}
	if err := u.cfg.Restart(); err != nil {
		u.cfg.Log.Error("the machine does not restart", "err", err)
	}
}

// Pending reports whether this system is on trial.
func (u *Updater) Pending() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.pending
}

// State is what operators learn of updates.
type State struct {
	Active  bootctl.Slot
	Pending bootctl.Slot  // of an update that is not confirmed; None without one
	Left    time.Duration // until it is rolled back; 0 before it has started
	Good    string        // the version that was confirmed last
	Because string        // why the last update was rolled back; "": it was not
}

// State returns what operators learn of updates.
func (u *Updater) State() State {
	u.mu.Lock()
	defer u.mu.Unlock()
	s := State{Active: u.cfg.Boot.Slot, Good: u.record.Good}
	if u.record.Phase == rolledBack {
		s.Because = u.record.Because
	}
	if u.pending {
		s.Pending, s.Left = u.cfg.Boot.Slot, max(Deadline-u.cfg.Age(), 0)
	} else if now, err := u.cfg.Control.Read(); err == nil && now.Open() {
		s.Pending = now.Try
	}
	return s
}

// Stage verifies a bundle and writes it to the other slot, and has the boot loader try it. sum is the SHA-256 of the size bytes of r, in
// hexadecimal digits. The machine has to restart then.
// Errors: InvalidArgument, FailedPrecondition (signature, version, size, a trial that is open), DataLoss (what arrived, or what the disk
// kept, differs), ResourceExhausted. After an error the machine starts as before.
func (u *Updater) Stage(ctx context.Context, r io.Reader, size uint64, sum string) (bootctl.Slot, string, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	target := u.cfg.Boot.Slot.Other()
	switch s, err := u.cfg.Control.Read(); {
	case err != nil:
		return "", "", err
	case u.pending:
		return "", "", errdefs.Preconditionf("version %s is on trial; confirm it first: capsulectl capsule update confirm", u.cfg.Version)
	case s.Open():
		return "", "", errdefs.Preconditionf("an update waits for its first start; reboot the machine first: capsulectl capsule reboot")
	case s.Good != u.cfg.Boot.Slot:
		return "", "", errdefs.Preconditionf("the machine runs slot %s, and slot %s is the good one; reboot it first", u.cfg.Boot.Slot, s.Good)
	}
	in := newCounted(r, size)
	b, err := bundle.Open(in, u.cfg.Keys)
	if err != nil {
		return "", "", err
	}
	m := b.Manifest()
	w := writer{cfg: u.cfg, slot: target, id: m.ID()}
	if err := w.open(); err != nil {
		return "", "", err
	}
	defer w.close()
	if err := m.Check(bundle.System{Version: u.cfg.Version, Architecture: u.cfg.Arch, SlotSize: w.size}); err != nil {
		return "", "", err
	}
	if err := u.cfg.Control.Vacate(target); err != nil {
		return "", "", err
	}
	if err := w.write(ctx, b); err != nil {
		return "", "", fmt.Errorf("write version %s to slot %s: %w", m.Version, target, err)
	}
	if err := in.verify(sum); err != nil {
		return "", "", err
	}
	good := u.record.Good
	u.record = record{Slot: target, Version: m.Version, UID: m.ID(), Phase: staged, Good: good}
	if err := u.store(ctx); err != nil {
		return "", "", err
	}
	if err := u.cfg.Control.Arm(target, Tries, m.ID()); err != nil {
		return "", "", err
	}
	u.cfg.Log.Info("an update is staged", "version", m.Version, "slot", target)
	return target, m.Version, nil
}

// Confirm ends the trial of this system: it is the good one now. Errors: FailedPrecondition if it is not on trial.
func (u *Updater) Confirm(ctx context.Context) (bootctl.Slot, string, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.pending {
		return "", "", errdefs.Preconditionf("nothing is to be confirmed: version %s is not on trial", u.cfg.Version)
	}
	if err := u.cfg.Control.MarkGood(); err != nil {
		return "", "", err
	}
	u.pending = false
	u.record = record{Slot: u.cfg.Boot.Slot, Version: u.cfg.Version, UID: u.cfg.Boot.UID, Phase: confirmed, Good: u.cfg.Version}
	if err := u.store(ctx); err != nil { // the environment says what counts
		u.cfg.Log.Warn("the confirmation is not in the journal of updates", "err", err)
	}
	u.cfg.Log.Info("this version is confirmed", "version", u.cfg.Version, "slot", u.cfg.Boot.Slot)
	return u.cfg.Boot.Slot, u.cfg.Version, nil
}

// Reboot has the machine restart. A wanted restart takes no try from a trial.
func (u *Updater) Reboot() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.pending {
		if err := u.cfg.Control.Arm(u.cfg.Boot.Slot, Tries, u.cfg.Boot.UID); err != nil {
			u.cfg.Log.Warn("this restart takes a try from the trial", "err", err)
		}
	}
	return u.cfg.Restart()
}
