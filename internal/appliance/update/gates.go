package update

import (
	"context"
	"fmt"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Policy says who keeps a version that is on trial.
type Policy string

// The policies. The zero value is Manual.
const (
	Manual Policy = "manual" // an operator confirms it, whatever the gates say
	Auto   Policy = "auto"   // it is kept once all gates have held for Steady; an operator may confirm it before
	Both   Policy = "both"   // an operator confirms it, while all gates hold
)

const (
	// Steady is how long all gates must hold before a version keeps itself.
	Steady = 30 * time.Second
	// MinDeadline is the shortest deadline of a trial. Deadline is the longest.
	MinDeadline = time.Minute

	gateEvery   = 5 * time.Second
	gateTimeout = 10 * time.Second
	unchecked   = "nothing has been checked yet"
)

// Gate is something that must hold before a version on trial is kept.
type Gate struct {
	Name  string
	Check func(context.Context) error // the error says what does not hold
}

// Options are what an operator says with an update.
type Options struct {
	Policy         Policy
	Deadline       time.Duration // of the trial, from the start of the kernel; 0 is Deadline
	AllowDowngrade bool
}

// validate returns o with its defaults. Errors: InvalidArgument.
func (o Options) validate() (Options, error) {
	switch o.Policy {
	case "":
		o.Policy = Manual
	case Manual, Auto, Both:
	default:
		return o, errdefs.Invalidf("the policy %q is not %s, %s or %s", o.Policy, Manual, Auto, Both)
	}
	if o.Deadline == 0 {
		o.Deadline = Deadline
	}
	if o.Deadline < MinDeadline || o.Deadline > Deadline {
		return o, errdefs.Invalidf("the deadline %v is not between %v and %v", o.Deadline, MinDeadline, Deadline)
	}
	return o, nil
}

// Run sees a trial through: it checks the gates, keeps the version if its policy says so, and ends the trial at its deadline by a restart into the good slot. After a
// trial, it removes the copy of the state once all gates hold. It returns when nothing is left to do, or when ctx ends.
func (u *Updater) Run(ctx context.Context) {
	if u.Pending() {
		u.cfg.Log.Warn("this version is on trial; without a confirmation the machine goes back to the one before", "version", u.cfg.Version, "slot", u.cfg.Boot.Slot, "policy", u.policy(), "in", u.left().Round(time.Second))
	}
	held, since := false, time.Time{} // whether the gates held at the last look, and since when
	for u.Pending() || u.proving() {
		failing := u.check(ctx)
		if ctx.Err() != nil {
			return
		}
		u.found(failing)
		if failing == "" && !held {
			since = time.Now()
		}
		held = failing == ""
		switch {
		case !u.Pending():
			if held {
				u.proved(ctx)
			}
		case held && u.policy() == Auto && time.Since(since) >= Steady:
			if _, _, err := u.Confirm(ctx); err != nil {
				u.cfg.Log.Error("this version cannot be confirmed", "err", err)
			}
		case u.left() == 0:
			u.giveUp(failing)
			return
		}
		pause := time.NewTimer(u.untilNext())
		select {
		case <-ctx.Done():
			pause.Stop()
			return
		case <-pause.C:
		}
	}
}

// check returns the first gate that does not hold, and why; "": all hold.
func (u *Updater) check(ctx context.Context) string {
	for _, g := range u.cfg.Health.Gates {
		ctx, cancel := context.WithTimeout(ctx, gateTimeout)
		err := g.Check(ctx)
		cancel()
		if err != nil {
			return fmt.Sprintf("%s: %v", g.Name, err)
		}
	}
	u.mu.Lock()
	ran := u.record.Ran
	u.mu.Unlock()
	if missing := u.cfg.Health.Missing(ran); len(missing) > 0 {
		return "workloads: " + strings.Join(missing, ", ") + " ran before the update, and not yet again"
	}
	return ""
}

// found notes what check has found.
func (u *Updater) found(failing string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if failing == u.failing {
		return
	}
	u.failing = failing
	if !u.pending {
		return
	}
	u.cfg.Log.Info("the gates of the trial were checked", "failing", failing)
	u.note(func(s *start) { s.Failing = failing })
}

// giveUp ends the trial.
func (u *Updater) giveUp(failing string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.pending {
		return
	}
	u.cfg.Log.Error("nobody has confirmed this version in time; the machine goes back to the one before", "version", u.cfg.Version, "failing", failing)
	u.note(func(s *start) { s.Ended = fmt.Sprintf("nobody confirmed it in %v", u.deadline()) })
	if err := u.cfg.Control.MarkBad(); err != nil { // the boot loader counts the tries in any case
		u.cfg.Log.Error("the trial is not ended", "err", err)
	}
	if err := u.cfg.Restart(); err != nil {
		u.cfg.Log.Error("the machine does not restart", "err", err)
	}
}

// untilNext is how long the next look at the gates has time: not after the deadline.
func (u *Updater) untilNext() time.Duration {
	if left := u.left(); u.Pending() && left > 0 {
		return min(left, gateEvery)
	}
	return gateEvery
}

// deadline returns that of the trial. Preconditions: mu is held.
func (u *Updater) deadline() time.Duration {
	if d := u.record.Deadline; u.record.UID == u.cfg.Boot.UID && d >= MinDeadline && d <= Deadline {
		return d
	}
	return Deadline
}

func (u *Updater) left() time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	return max(u.deadline()-u.cfg.Age(), 0)
}

// policy returns that of the trial. If the journal does not know it, an operator has to look.
func (u *Updater) policy() Policy {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.policyOf()
}

func (u *Updater) policyOf() Policy {
	if o, err := (Options{Policy: u.record.Policy}).validate(); err == nil && u.record.UID == u.cfg.Boot.UID {
		return o.Policy
	}
	return Manual
}

// proving reports whether the copy of the state is still there, and this start may show that nobody needs it any more. The start on trial itself cannot: databases are upgraded at
// the one after it.
func (u *Updater) proving() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.record.Copied && u.record.Phase != staged && !u.cfg.Boot.Trial
}

// proved removes the copy.
func (u *Updater) proved(ctx context.Context) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if err := u.cfg.Copies.Remove(); err != nil {
		u.cfg.Log.Warn("the copy of the state before the update stays", "err", err)
	}
	u.record.Copied = false
	if err := u.store(ctx); err != nil {
		u.cfg.Log.Warn("the journal of updates is not written", "err", err)
	}
}
