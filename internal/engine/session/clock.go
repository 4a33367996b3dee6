package session

import (
	"context"
	"fmt"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/engine/process"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	clockSlack = time.Second     // error at which a guest's clock is set; also the longest answer that says what the time is
	clockRest  = 4               // readings without error after which a clock counts as right
	clockWild  = 2               // readings in a row with an error of clockSlack each after which it counts as wrong
	clockSet   = 5 * time.Second // time limit for setting it

	clockOften = 3                      // times within clockWhile that a clock had to be set although it was never far off; then it counts as wrong
	clockWhile = 10 * time.Minute       // see clockOften
	clockDigit = 100 * time.Millisecond // of times in messages
	clockDrift = 20 * time.Millisecond  // error of a reading that counts as one; less may be due to the answer's way
)

// reading is what a guest answered about its uptime.
type reading struct {
	up              time.Duration // of the guest: grows while it is not paused
	asked, answered time.Time     // on the host
}

// at is when the guest read its uptime, with an error of half of the time that the answer took.
func (r reading) at() time.Time { return r.asked.Add(r.answered.Sub(r.asked) / 2) }

// clock compares the speed of a guest's clock with the host's. It does not compare the time itself: the guest's root may have
// set the clock on purpose.
type clock struct {
	wall   bool // readings are of the time, not of the uptime, so whoever sets the clock changes them
	last   *reading
	off    time.Duration // by which the guest's clock is ahead since it was last set, or since the first reading
	uneven bool          // not every reading since then moved it in the direction of off: its guest may have been paused
	wild   int           // readings in a row that were far off
	right  int           // readings in a row that were not
	sets   []time.Time   // when it was set, within clockWhile, although it was never far off
}

// observe returns by how much the guest's clock went ahead since the last reading. usable is false for the first reading and for
// answers that took too long.
func (c *clock) observe(r reading) (gained time.Duration, usable bool) {
	if r.answered.Sub(r.asked) > clockSlack {
		return 0, false
	}
	last := c.last
	c.last = &r
	if last == nil {
		return 0, false
	}
	gained = (r.up - last.up) - r.at().Sub(last.at())
	c.off += gained
	if gained.Abs() < clockDrift || gained > 0 != (c.off > 0) {
		c.uneven = true
	}
	c.sets = slices.DeleteFunc(c.sets, func(at time.Time) bool { return r.at().Sub(at) > clockWhile })
	if gained.Abs() > clockSlack {
		c.wild, c.right = c.wild+1, 0
		if c.wall && c.wild < clockWild {
			c.off -= gained
		}
	} else {
		c.wild, c.right = 0, c.right+1
	}
	return gained, true
}

// corrected takes note that the clock was set at a time, or that its agent cannot set it.
func (c *clock) corrected(at time.Time) {
	if c.wild == 0 && !c.uneven {
		c.sets = append(c.sets, at)
	}
	c.off, c.uneven = 0, false
}

// wrong reports whether the clock is to be recorded as wrong, steady whether it is not any more.
func (c *clock) wrong() bool  { return c.wild >= clockWild || len(c.sets) >= clockOften }
func (c *clock) steady() bool { return c.right >= clockRest && len(c.sets) < clockOften }

// followClock keeps the clock of a guest with an agent of its image. Such an agent tells the time and not the uptime, which may
// need a command in the guest. One jump is left alone: somebody in the guest has set the clock.
func (l *Link) followClock(ctx context.Context, agent guest.Agent) {
	reader, ok := agent.(guest.ClockReader)
	if !ok {
		return
	}
	c := clock{wall: true}
	for {
		process.Pause(l.cfg.Silence/misses, ctx.Done(), agent.Done())
		began := time.Now()
		limited, cancel := context.WithTimeout(ctx, l.cfg.Silence/misses)
		now, err := reader.ReadClock(limited)
		cancel()
		switch {
		case ctx.Err() != nil, errdefs.IsUnavailable(err), errdefs.Is(err, errdefs.Unsupported):
			return
		case err == nil:
			l.keepTime(ctx, agent, &c, reading{up: time.Duration(now.UnixNano()), asked: began, answered: time.Now()})
		}
	}
}

// keepTime sets the guest's clock when it is wrong, and records a clock that does not stay right. A guest that does not tell its
// uptime is left alone.
func (l *Link) keepTime(ctx context.Context, agent guest.Agent, c *clock, r reading) {
	if r.up == 0 {
		return
	}
	before := c.last
	gained, usable := c.observe(r)
	if !usable {
		return
	}
	if c.off.Abs() > clockSlack {
		l.setClock(ctx, agent, c)
	}
	switch known := l.vm.Record().Reason; {
	case c.wrong() && known == "":
		l.cfg.Log.Warn("clock of guest is wrong", "vm", l.proc.ID, "gained", gained, "dur", r.at().Sub(before.at()))
		l.noteClock(ctx, "", vm.ReasonClockWrong, fmt.Sprintf("the guest's clock moved %s while %s passed; Cocoon sets it again and again; restart the VM, and its kernel measures its speed anew",
			(r.up-before.up).Round(clockDigit), r.at().Sub(before.at()).Round(clockDigit)))
	case c.steady() && known == vm.ReasonClockWrong:
		l.cfg.Log.Info("clock of guest is right again", "vm", l.proc.ID)
		l.noteClock(ctx, vm.ReasonClockWrong, "", "")
	}
}

// setClock gives the guest the host's time. Older agents cannot do that.
func (l *Link) setClock(ctx context.Context, agent guest.Agent, c *clock) {
	setter, ok := agent.(guest.ClockSetter)
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, clockSet)
	defer cancel()
	switch err := setter.SetClock(ctx, time.Now()); {
	case err == nil:
		l.cfg.Log.Debug("clock of guest set", "vm", l.proc.ID, "off", c.off)
		c.corrected(time.Now())
		if c.wall {
			c.last = nil // the next reading would be a jump
		}
	case errdefs.Is(err, errdefs.Unsupported):
		c.corrected(time.Now())
	default:
		l.cfg.Log.Debug("clock of guest not set, trying again", "vm", l.proc.ID, "err", err)
	}
}

// SetClock gives a guest that was paused the host's time, unless its agent does not answer or cannot do that.
func (l *Link) SetClock(ctx context.Context) {
	if !l.HasAgent() {
		return
	}
	agent, err := l.Ready(ctx, clockSet)
	setter, ok := agent.(guest.ClockSetter)
	if err != nil || !ok {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, clockSet)
	defer cancel()
	if err := setter.SetClock(ctx, time.Now()); err != nil {
		l.cfg.Log.Debug("clock of guest not set", "vm", l.proc.ID, "err", err)
	}
}

// noteClock changes the reason of the running VM from was.
func (l *Link) noteClock(ctx context.Context, was, reason, message string) {
	_, err := l.vm.Update(ctx, func(r *vm.Record) {
		if r.State == vm.StateRunning && r.Reason == was {
			r.Reason, r.Message = reason, message
		}
	})
	if err != nil { // the next reading tries again
		l.cfg.Log.Debug("clock of guest not recorded", "vm", l.proc.ID, "reason", reason, "err", err)
	}
}
