package session

import (
	"context"
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	clockSlack = time.Second     // error at which a guest's clock is set; also the longest answer that says what the time is
	clockRest  = 4               // readings without error after which a clock counts as right
	clockWild  = 2               // readings in a row with an error of clockSlack each after which it counts as wrong
	clockSet   = 5 * time.Second // time limit for setting it
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
	last  *reading
	off   time.Duration // by which the guest's clock is ahead since it was last set, or since the first reading
	wild  int           // readings in a row that were far off
	right int           // readings in a row that were not
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
	if gained.Abs() > clockSlack {
		c.wild, c.right = c.wild+1, 0
	} else {
		c.wild, c.right = 0, c.right+1
	}
	return gained, true
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
	case c.wild >= clockWild && known == "":
		l.cfg.Log.Warn("clock of guest is wrong", "vm", l.proc.ID, "gained", gained, "dur", r.at().Sub(before.at()))
		l.noteClock(ctx, "", vm.ReasonClockWrong, fmt.Sprintf("the guest's clock moved %s while %s passed; Cocoon sets it again and again; restart the VM, and its kernel measures its speed anew",
			(r.up-before.up).Round(time.Second), r.at().Sub(before.at()).Round(time.Second)))
	case c.right >= clockRest && known == vm.ReasonClockWrong:
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
		c.off = 0
	case !errdefs.Is(err, errdefs.Unsupported):
		l.cfg.Log.Debug("clock of guest not set, trying again", "vm", l.proc.ID, "err", err)
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
