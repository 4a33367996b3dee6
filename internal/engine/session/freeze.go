package session

import (
	"context"
	"sync/atomic"
	"time"

	"cocoonstack.io/cocoon/internal/engine/process"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// thawLimit is how long a guest may take to thaw, thawPause the time until it is tried again.
const (
	thawLimit = 30 * time.Second
	thawPause = time.Second
)

// freeze is what is known of frozen file systems of a guest.
type freeze struct {
	turn  Turn         // held while they are frozen or thawed, and while a snapshot has them frozen for itself
	users atomic.Int32 // who has them frozen; 0: whatever is frozen was left by an earlier process
	held  *hold        // under turn; nil: nobody has asked for it
}

// hold is a freeze that somebody asked for.
type hold struct {
	until atomic.Int64  // Unix nanoseconds, after which the guest is thawed
	moved chan struct{} // one token when until has changed
	over  chan struct{} // closed when it is thawed
}

// Freeze freezes the guest's file systems until Thaw, and at most for a time. spawn runs who thaws them then.
func (l *Link) Freeze(ctx context.Context, agent guest.Freezer, most time.Duration, spawn func(func(context.Context))) error {
	leave, err := l.freeze.turn.Take(ctx)
	if err != nil {
		return err
	}
	defer leave()
	until := time.Now().Add(most).UnixNano()
	if h := l.freeze.held; h != nil {
		h.until.Store(until)
		select {
		case h.moved <- struct{}{}:
		default:
		}
		return nil
	}
	l.freeze.users.Add(1)
	if _, err := agent.Freeze(ctx); err != nil {
		l.freeze.users.Add(-1)
		return err
	}
	h := &hold{moved: make(chan struct{}, 1), over: make(chan struct{})}
	h.until.Store(until)
	l.freeze.held = h
	l.noteFrozen(ctx, true)
	spawn(func(ctx context.Context) { l.expire(ctx, h) })
	return nil
}

// expire thaws the guest when the time of a freeze is over, and tries until it succeeds or the guest ends.
func (l *Link) expire(ctx context.Context, h *hold) {
	for {
		timer := time.NewTimer(time.Until(time.Unix(0, h.until.Load())))
		select {
		case <-timer.C:
		case <-h.moved:
			timer.Stop()
			continue
		case <-h.over:
			timer.Stop()
			return
		case <-l.proc.Ended():
			timer.Stop()
			return
		case <-ctx.Done(): // the next engine thaws it
			timer.Stop()
			return
		}
		limited, cancel := context.WithTimeout(ctx, thawLimit)
		_, err := l.Thaw(limited)
		cancel()
		if err == nil {
			l.cfg.Log.Warn("file systems of guest thawed, because nobody did in time", "vm", l.proc.ID)
			return
		}
		l.cfg.Log.Warn("file systems of guest not thawed, trying again", "vm", l.proc.ID, "err", err)
		process.Pause(thawPause, ctx.Done(), l.proc.Ended())
	}
}

// Thaw ends a freeze. It reports whether the file systems were frozen until now. Without a freeze it does nothing.
func (l *Link) Thaw(ctx context.Context) (held bool, err error) {
	leave, err := l.freeze.turn.Take(ctx)
	if err != nil {
		return false, err
	}
	defer leave()
	h := l.freeze.held
	if h == nil {
		return false, nil
	}
	agent, err := l.Ready(ctx, thawLimit)
	if err != nil {
		return false, err
	}
	freezer, ok := agent.(guest.Freezer)
	if !ok {
		return false, errdefs.Unsupportedf("its guest's agent cannot thaw file systems")
	}
	n, err := freezer.Thaw(ctx)
	if err != nil {
		return false, err
	}
	l.freeze.held = nil
	close(h.over)
	l.freeze.users.Add(-1)
	l.noteFrozen(ctx, false)
	return n > 0, nil // a guest that somebody has thawed, or that has started again, has none
}

// noteFrozen records whether somebody has the guest's file systems frozen. A freeze does not fail for it, and a client that is gone after a thaw does
// not leave the record as it was.
func (l *Link) noteFrozen(ctx context.Context, frozen bool) {
	ctx = context.WithoutCancel(ctx)
	if l.vm.Record().Frozen == frozen {
		return
	}
	if _, err := l.vm.Update(ctx, func(r *vm.Record) { r.Frozen = frozen && r.State == vm.StateRunning }); err != nil {
		l.cfg.Log.Warn("freeze or thaw not recorded", "vm", l.proc.ID, "err", err)
	}
}

// Still lets the caller freeze the guest's file systems and thaw them until it calls done. frozen reports that somebody has them frozen already,
// so they stay so.
func (l *Link) Still(ctx context.Context) (done func(), frozen bool, err error) {
	leave, err := l.freeze.turn.Take(ctx)
	if err != nil {
		return nil, false, err
	}
	if l.freeze.held != nil {
		leave()
		return func() {}, true, nil
	}
	l.freeze.users.Add(1)
	return func() {
		l.freeze.users.Add(-1)
		leave()
	}, false, nil
}

// thawLeft thaws file systems that an earlier process, which was killed, left frozen: such an agent does not thaw them by itself.
func (l *Link) thawLeft(ctx context.Context, agent guest.Agent) {
	reporter, ok := agent.(guest.FreezeReporter)
	if !ok || l.freeze.users.Load() > 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, thawLimit)
	defer cancel()
	frozen, err := reporter.Frozen(ctx)
	if err == nil && !frozen {
		l.noteFrozen(ctx, false)
	}
	if err != nil || !frozen {
		return // also an agent whose operator allows none of it
	}
	if _, err = reporter.Thaw(ctx); err == nil {
		l.noteFrozen(ctx, false)
	}
	l.cfg.Log.Warn("file systems of guest thawed that an earlier process left frozen", "vm", l.proc.ID, "err", err)
}
