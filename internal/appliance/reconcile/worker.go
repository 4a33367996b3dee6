package reconcile

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// worker looks after one workload.
type worker struct {
	r     *Reconciler
	name  string
	log   *slog.Logger
	woken chan struct{}

	mu     sync.Mutex
	cancel context.CancelFunc // of the preparation or start in progress; nil: none

	health *health     // of the running instance; nil: it has no probes, or does not run
	failed string      // the last error that was reported
	timer  *time.Timer // of the next start; nil: none was set
}

// poke makes the worker look.
func (w *worker) poke() {
	select {
	case w.woken <- struct{}{}:
	default:
	}
}

// interrupt makes the worker look at once, because the workload shall be something else. A start in progress is given up.
func (w *worker) interrupt() {
	w.mu.Lock()
	if w.cancel != nil {
		w.cancel()
	}
	w.mu.Unlock()
	w.poke()
}

func (w *worker) run(ctx context.Context) {
	defer w.probe(workload.Row{}, nil, nil)
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.woken:
		}
		for ctx.Err() == nil {
			more, err := w.turn(ctx)
			if err != nil && ctx.Err() == nil {
				w.trouble(ctx, err)
			}
			if err != nil || !more {
				break
			}
		}
		if w.r.done(w) {
			return
		}
	}
}

// trouble reports an error, once until the workload has started.
func (w *worker) trouble(ctx context.Context, err error) {
	if text := err.Error(); text != w.failed {
		w.failed = text
		w.log.Warn("the workload is not as it shall be; this is tried again", "err", err)
		w.record(ctx, "Failed", text)
	}
}

// record stores an event. History that cannot be stored is no reason to stop.
func (w *worker) record(ctx context.Context, reason, message string) {
	if err := w.r.cfg.Desired.Record(ctx, w.name, reason, message); err != nil {
		w.log.Warn("an event is not stored", "reason", reason, "err", err)
	}
}

// turn looks at the workload, and does one thing. more says that there may be more to do.
func (w *worker) turn(ctx context.Context) (more bool, err error) {
	row, err := w.r.cfg.Desired.Get(w.name)
	if errdefs.IsNotFound(err) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	d, err := w.r.Driver(row.Workload)
	if err != nil {
		return false, err
	}
	s, err := w.look(ctx, row, d)
	if err != nil {
		return false, err
	}
	switch decide(row, s) {
	case start:
		return true, w.start(ctx, row, d)
	case stop:
		return true, w.stop(ctx, row, s, d)
	case settle:
		return true, w.settle(ctx, s)
	case remove:
		return true, d.Remove(ctx, *s.instance)
	case forget:
		if err := d.Forget(ctx, w.name); err != nil {
			return false, err
		}
		w.record(ctx, "Deleted", "it is gone")
		return false, w.r.cfg.Desired.Forget(ctx, w.name)
	case rest:
		w.schedule(row, s.now)
	}
	_, err = w.r.cfg.Desired.Change(ctx, w.name, func(r *workload.Row) error {
		if r.Workload.GetGeneration() == row.Workload.GetGeneration() { // otherwise the worker is woken again
			status(r, s)
		}
		return nil
	})
	return false, err
}

// schedule makes the worker look when the workload may be started.
func (w *worker) schedule(row workload.Row, now time.Time) {
	if w.timer != nil {
		w.timer.Stop()
	}
	if early(row, now) {
		w.timer = time.AfterFunc(row.Next.Sub(now), w.poke)
	}
}

// look returns what is known of the workload now.
func (w *worker) look(ctx context.Context, row workload.Row, d Driver) (seen, error) {
	s := seen{boot: w.r.cfg.Boot, now: w.r.cfg.Now()}
	i, err := w.instance(ctx, row, d)
	if err != nil {
		return s, err
	}
	s.instance = i
	w.probe(row, i, d)
	if w.health != nil {
		s.ready, s.unwell = w.health.verdict()
	} else {
		s.ready = true
	}
	if i == nil {
		s.waits = w.r.waitsFor(row.Workload)
	}
	return s, nil
}

// instance returns the instance of the workload, of this kind or, after the kind was changed, of another one; nil: none.
func (w *worker) instance(ctx context.Context, row workload.Row, d Driver) (*Instance, error) {
	i, err := d.Get(ctx, w.name)
	switch {
	case err == nil:
		return &i, nil
	case !errdefs.IsNotFound(err):
		return nil, err
	}
	for kind, other := range w.r.cfg.Drivers {
		if kind == row.Workload.GetKind() {
			continue
		}
		switch i, err := other.Get(ctx, w.name); {
		case err == nil: // its kind has changed
			w.log.Info("the workload is of another kind now", "instance", i.ID)
			if err := other.Stop(ctx, i, workload.Grace(row.Workload)); err != nil {
				return nil, err
			}
			return nil, other.Remove(ctx, i)
		case !errdefs.IsNotFound(err) && !errdefs.IsUnavailable(err):
			return nil, err
		}
	}
	return nil, nil
}

// start prepares and starts the workload. If that fails, it waits before it tries again.
func (w *worker) start(caller context.Context, row workload.Row, d Driver) error {
	ctx, cancel := context.WithCancel(caller)
	defer cancel()
	w.mu.Lock()
	w.cancel = cancel
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		w.cancel = nil
		w.mu.Unlock()
	}()
	// What was changed before interrupt could cancel is seen here.
	if now, err := w.r.cfg.Desired.Get(w.name); err != nil || now.Workload.GetGeneration() != row.Workload.GetGeneration() {
		return err
	}
	err := w.launch(ctx, row, d)
	switch {
	case err == nil:
		w.failed = ""
		w.record(caller, "Started", "it has started")
		return nil
	case caller.Err() != nil:
		return err
	case ctx.Err() != nil: // it shall be something else
		w.log.Info("a start is given up, because the workload shall be something else", "err", err)
		return nil
	}
	_, changeErr := w.r.cfg.Desired.Change(caller, w.name, func(r *workload.Row) error {
		if r.Workload.GetGeneration() != row.Workload.GetGeneration() {
			return nil
		}
		backOff(r, w.r.cfg.Now())
		st := r.Status()
		st.ObservedGeneration, st.Ready = r.Workload.GetGeneration(), false
		st.Phase, st.Reason, st.Message = capsulev1.WorkloadPhase_WORKLOAD_PHASE_FAILED, "StartFailed", err.Error()
		return nil
	})
	w.trouble(caller, fmt.Errorf("start: %w", err))
	return changeErr
}

func (w *worker) launch(ctx context.Context, row workload.Row, d Driver) error {
	select {
	case w.r.starts <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-w.r.starts }()
	if err := w.progress(ctx, row, "Pulling", "its image is made ready"); err != nil {
		return err
	}
	if err := d.Prepare(ctx, row.Workload); err != nil {
		return err
	}
	if err := w.progress(ctx, row, "Starting", ""); err != nil {
		return err
	}
	_, err := d.Start(ctx, row.Workload, row.Hash())
	return err
}

// progress stores what is being done for a start.
func (w *worker) progress(ctx context.Context, row workload.Row, reason, message string) error {
	_, err := w.r.cfg.Desired.Change(ctx, w.name, func(r *workload.Row) error {
		if r.Workload.GetGeneration() != row.Workload.GetGeneration() {
			return context.Canceled // it shall be something else
		}
		st := r.Status()
		st.ObservedGeneration, st.Ready, st.Address = r.Workload.GetGeneration(), false, ""
		st.Phase, st.Reason, st.Message = capsulev1.WorkloadPhase_WORKLOAD_PHASE_PENDING, reason, message
		if reason == "Starting" {
			r.Boot, r.Started = w.r.cfg.Boot, w.r.cfg.Now()
		}
		return nil
	})
	return err
}

// stop ends the instance. Why it is replaced is stored first, because it decides what follows.
func (w *worker) stop(ctx context.Context, row workload.Row, s seen, d Driver) error {
	if s.unwell != "" && row.Runs() && row.Unwell != s.instance.ID {
		w.record(ctx, "Unhealthy", s.unwell)
		_, err := w.r.cfg.Desired.Change(ctx, w.name, func(r *workload.Row) error {
			r.Unwell, r.Why = s.instance.ID, s.unwell
			return nil
		})
		if err != nil {
			return err
		}
	}
	if err := d.Stop(ctx, *s.instance, workload.Grace(row.Workload)); err != nil {
		return fmt.Errorf("stop: %w", err)
	}
	return nil
}

// settle stores how the instance has ended, before the instance is removed.
func (w *worker) settle(ctx context.Context, s seen) error {
	var reason, message string
	_, err := w.r.cfg.Desired.Change(ctx, w.name, func(r *workload.Row) error {
		reason, message = ended(r, s)
		return nil
	})
	if err == nil {
		w.log.Info("the workload has ended", "reason", reason, "instance", s.instance.ID)
		w.record(ctx, reason, message)
	}
	return err
}
