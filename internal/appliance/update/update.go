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
	"errors"
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
	// Deadline is how long after its boot a version on trial may wait at most until it is confirmed.
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
	Log     string       `json:"log,omitempty"`          // the end of its log, as far as it is known

	Policy   Policy        `json:"policy,omitempty"`
	Deadline time.Duration `json:"deadline,omitempty"` // of its trial, in nanoseconds
	Ran      []string      `json:"ran,omitempty"`      // workloads that ran before it
	Copied   bool          `json:"copied,omitempty"`   // there is a copy of the state as it was before it
}

// Copies keeps the state as it was before an update.
type Copies interface {
	Take(ctx context.Context, update string) error
	Remove() error
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

	Health   Health
	Copies   Copies
	Evidence Evidence
}

// Health says what a version on trial has to achieve.
type Health struct {
	Gates   []Gate
	Running func() []string             // the workloads that run, and are ready if they say when they are
	Missing func(ran []string) []string // those of ran that shall run, and are not among them
}

// Evidence says what becomes of a version on trial.
type Evidence struct {
	Dir      string        // for what a version on trial writes about itself
	BootID   string        // of this boot
	Said     func() string // the last lines of the logs of this boot
	Watchdog func() bool   // reports whether a watchdog has ended the boot before this one
	Crash    func() string // what the kernel said when it ended a boot; "": nothing
}

// Updater updates the system. Safe for concurrent use.
type Updater struct {
	cfg Config

	mu      sync.Mutex // one update, confirmation or restart at a time
	record  record
	pending bool   // this system is on trial
	failing string // the gate that does not hold
}

// Open reads what became of the last update.
func Open(ctx context.Context, cfg Config) (*Updater, error) {
	u := &Updater{cfg: cfg, pending: onTrial(cfg), failing: unchecked}
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
	if u.pending {
		u.note(func(*start) {})
	}
	u.tidy()
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

// tidy removes what interrupted updates have left on the boot partition, and repairs a damaged boot environment.
func (u *Updater) tidy() {
	if u.cfg.Boot.Trial {
		return
	}
	if err := u.cfg.Control.Repair(); err != nil {
		u.cfg.Log.Error("the boot environment is damaged", "err", err)
		return
	}
	s, err := u.cfg.Control.Read()
	if err != nil {
		u.cfg.Log.Error("the boot environment is damaged", "err", err)
		return
	}
	if err := removeLeftovers(u.cfg.BootDir, s.Files); err != nil {
		u.cfg.Log.Warn("files that nothing starts are left on the boot partition", "err", err)
	}
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
		u.record.Phase = rolledBack
		u.record.Because, u.record.Log = u.explain()
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
	Log     string        // the last lines of its log, if it was rolled back and got as far as its daemon
	Policy  Policy        // of the trial of this system; "": it is not on trial
	Failing string        // what keeps this system from being kept by itself; "": nothing, or it is not on trial
}

// State returns what operators learn of updates.
func (u *Updater) State() State {
	u.mu.Lock()
	defer u.mu.Unlock()
	s := State{Active: u.cfg.Boot.Slot, Good: u.record.Good}
	if u.record.Phase == rolledBack {
		s.Because, s.Log = u.record.Because, u.record.Log
	}
	if u.pending {
		s.Pending, s.Left = u.cfg.Boot.Slot, max(u.deadline()-u.cfg.Age(), 0)
		s.Policy, s.Failing = u.policyOf(), u.failing
	} else if now, err := u.cfg.Control.Read(); err == nil {
		if now.Open() {
			s.Pending = now.Try
		}
		if now.Good != u.cfg.Boot.Slot {
			s.Because, s.Log = fmt.Sprintf("slot %s is the good one, and did not start, or somebody chose slot %s at the console", now.Good, u.cfg.Boot.Slot), ""
		}
	}
	return s
}

// Stage verifies a bundle and writes it to the other slot, and has the boot loader try it. sum is the SHA-256 of the size bytes of r, in
// hexadecimal digits. The machine has to restart then.
// Errors: InvalidArgument, FailedPrecondition (signature, version, size, a trial that is open), DataLoss (what arrived, or what the disk
// kept, differs), ResourceExhausted. After an error the machine starts as before.
func (u *Updater) Stage(ctx context.Context, r io.Reader, size uint64, sum string, o Options) (bootctl.Slot, string, error) {
	o, err := o.validate()
	if err != nil {
		return "", "", err
	}
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
		return "", "", errdefs.Preconditionf("the machine runs slot %s, and slot %s is the good one; reboot it, or keep slot %[1]s: capsulectl capsule update confirm", u.cfg.Boot.Slot, s.Good)
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
	if err := m.Check(bundle.System{Version: u.cfg.Version, Architecture: u.cfg.Arch, SlotSize: w.size, AllowDowngrade: o.AllowDowngrade}); err != nil {
		return "", "", err
	}
	if err := w.room(m); err != nil {
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
	before := u.record
	u.record = record{
		Slot: target, Version: m.Version, UID: m.ID(), Phase: staged, Good: u.record.Good,
		Policy: o.Policy, Deadline: o.Deadline, Ran: u.cfg.Health.Running(), Copied: true,
	}
	if err := u.commit(ctx); err != nil {
		u.record = before
		return "", "", errors.Join(err, u.store(context.WithoutCancel(ctx)))
	}
	u.cfg.Log.Info("an update is staged", "version", m.Version, "slot", target)
	return target, m.Version, nil
}

// commit notes the update, copies the state with that note, and arms the trial. A system that goes back to the copy still knows of the update.
func (u *Updater) commit(ctx context.Context) error {
	if err := u.store(ctx); err != nil {
		return err
	}
	if err := u.cfg.Copies.Take(ctx, u.record.UID); err != nil {
		return err
	}
	return u.cfg.Control.Arm(u.record.Slot, Tries, u.record.UID)
}

// Confirm ends the trial of this system: it is the good one now. So is one that the loader has started instead of the good one. Errors: FailedPrecondition if this system is
// the good one, or if its policy is Both and a gate does not hold.
func (u *Updater) Confirm(ctx context.Context) (bootctl.Slot, string, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	mark := u.cfg.Control.MarkGood
	if !u.pending {
		if s, err := u.cfg.Control.Read(); err != nil || s.Good == u.cfg.Boot.Slot {
			return "", "", errdefs.Preconditionf("nothing is to be confirmed: version %s is not on trial", u.cfg.Version)
		}
		mark = u.cfg.Control.Keep
	}
	if u.pending && u.policyOf() == Both && u.failing != "" {
		return "", "", errdefs.Preconditionf("version %s is not kept while this does not hold: %s", u.cfg.Version, u.failing)
	}
	if err := mark(); err != nil {
		return "", "", err
	}
	u.pending = false
	u.record = record{Slot: u.cfg.Boot.Slot, Version: u.cfg.Version, UID: u.cfg.Boot.Files, Phase: confirmed, Good: u.cfg.Version, Copied: u.record.Copied}
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
