// Package reconcile makes the workloads of an appliance run as they shall.
//
// Each workload has a worker, which looks at it, decides by a pure function what is to be done, does it, and looks again. A change of what
// it shall be wakes the worker, as does a change of its container or VM; a look every two seconds finds what nobody told. Recovery after
// a crash is such a look. The package knows containers and VMs by their Driver only.
package reconcile

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/desired"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/probing"
)

// Tick is how often each workload is looked at, even if nothing wakes its worker.
const Tick = 2 * time.Second

// maxStarts is the number of workloads that are started at the same time. More would only wait for the same CPUs and disks.
const maxStarts = 4

// Config configures a Reconciler.
type Config struct {
	Desired *desired.Store
	Drivers map[capsulev1.WorkloadKind]Driver
	Boot    string // id of this boot of the machine
	Now     func() time.Time
	Log     *slog.Logger
}

// Reconciler runs the workloads.
type Reconciler struct {
	cfg    Config
	probes *probing.Scheduler
	starts chan struct{} // has room for those that start

	mu      sync.Mutex
	workers map[string]*worker
	ctx     context.Context //nolint:containedctx // of Run: workers begin when workloads do
	group   sync.WaitGroup
	strays  map[string]bool // instances of unknown workloads that were reported
}

// New returns a Reconciler.
func New(cfg Config) *Reconciler {
	return &Reconciler{cfg: cfg, probes: probing.NewScheduler(), starts: make(chan struct{}, maxStarts), workers: map[string]*worker{}, strays: map[string]bool{}}
}

// Run runs the workloads until ctx ends. They go on then, and the next Run finds them.
func (r *Reconciler) Run(ctx context.Context) error {
	defer r.group.Wait()
	r.mu.Lock()
	r.ctx = ctx
	r.mu.Unlock()
	r.cfg.Desired.Follow(r.changed)
	for _, row := range r.cfg.Desired.List() {
		r.wake(row.Name())
	}
	r.group.Go(func() { _ = r.probes.Run(ctx) })
	for kind, d := range r.cfg.Drivers {
		r.group.Go(func() { r.watch(ctx, kind, d) })
	}
	tick := time.NewTicker(Tick)
	defer tick.Stop()
	for {
		r.reportStrays(ctx)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			for _, row := range r.cfg.Desired.List() {
				r.wake(row.Name())
			}
		}
	}
}

// Suspend stops the instances of all workloads, because the machine ends: each has its grace period, but limit at most. They start again
// when the machine is back, unless they never do so. Preconditions: Run has returned.
func (r *Reconciler) Suspend(ctx context.Context, limit time.Duration) {
	var all sync.WaitGroup
	for _, row := range r.cfg.Desired.List() {
		all.Go(func() {
			if err := r.suspend(ctx, row, limit); err != nil {
				r.cfg.Log.Warn("a workload is not stopped before the machine ends", "workload", row.Name(), "err", err)
			}
		})
	}
	all.Wait()
}

func (r *Reconciler) suspend(ctx context.Context, row workload.Row, limit time.Duration) error {
	d, err := r.Driver(row.Workload)
	if err != nil {
		return err
	}
	i, err := d.Get(ctx, row.Name())
	switch {
	case errdefs.IsNotFound(err):
		return nil
	case err != nil:
		return err
	case i.State == Ended:
		return nil
	}
	_, err = r.cfg.Desired.Change(ctx, row.Name(), func(row *workload.Row) error { // first: how it ends must not decide what follows
		row.Paused = i.ID
		return nil
	})
	if err != nil {
		return err
	}
	return d.Stop(ctx, i, min(workload.Grace(row.Workload), limit))
}

// watch follows the instances of one kind.
func (r *Reconciler) watch(ctx context.Context, kind capsulev1.WorkloadKind, d Driver) {
	for ctx.Err() == nil {
		if err := d.Watch(ctx, r.wake); err != nil && ctx.Err() == nil {
			r.cfg.Log.Warn("the watch of instances ended; it begins again", "kind", kind, "err", err)
		}
		pause(ctx, Tick)
	}
}

// changed is called when a workload shall be something else.
func (r *Reconciler) changed(name string) { r.worker(name).interrupt() }

// wake makes the worker of a workload look at it. Nothing happens if there is no such workload.
func (r *Reconciler) wake(name string) {
	if _, err := r.cfg.Desired.Get(name); err == nil {
		r.worker(name).poke()
	}
}

// worker returns the worker of a workload, which begins if there is none.
func (r *Reconciler) worker(name string) *worker {
	r.mu.Lock()
	defer r.mu.Unlock()
	w, ok := r.workers[name]
	if !ok {
		w = &worker{r: r, name: name, log: r.cfg.Log.With("workload", name), woken: make(chan struct{}, 1)}
		r.workers[name] = w
		if r.ctx != nil && r.ctx.Err() == nil {
			r.group.Go(func() { w.run(r.ctx) })
		}
		w.poke()
	}
	return w
}

// done ends the worker of a workload that is forgotten. Another one begins if the workload was applied again meanwhile.
func (r *Reconciler) done(w *worker) bool {
	if _, err := r.cfg.Desired.Get(w.name); !errdefs.IsNotFound(err) {
		return false
	}
	r.mu.Lock() // never while Desired is asked: it calls changed with a lock of its own
	delete(r.workers, w.name)
	r.mu.Unlock()
	r.wake(w.name)
	return true
}

// reportStrays reports instances of workloads that nobody knows, once each. They are left alone: a record may have been lost.
func (r *Reconciler) reportStrays(ctx context.Context) {
	for _, d := range r.cfg.Drivers {
		all, err := d.List(ctx)
		if err != nil {
			continue // the workers say so
		}
		for _, i := range all {
			if _, err := r.cfg.Desired.Get(i.Name); errdefs.IsNotFound(err) && !r.strays[i.ID] {
				r.strays[i.ID] = true
				r.cfg.Log.Warn("an instance belongs to no known workload, and is left alone; apply a workload of this name to take its place", "workload", i.Name, "instance", i.ID)
			}
		}
	}
}

// waitsFor returns a workload for which w waits; "": none.
func (r *Reconciler) waitsFor(w *capsulev1.Workload) string {
	for _, name := range w.GetDependsOn() {
		row, err := r.cfg.Desired.Get(name)
		completed := err == nil && row.Done != "" && row.Done == row.Hash() && row.Status().ExitCode != nil && row.Status().GetExitCode() == 0
		if err != nil || !row.Status().GetReady() && !completed {
			return name
		}
	}
	return ""
}

// Driver returns the driver of w.
// Errors: Unsupported if this machine runs no such workloads.
func (r *Reconciler) Driver(w *capsulev1.Workload) (Driver, error) {
	if d, ok := r.cfg.Drivers[w.GetKind()]; ok {
		return d, nil
	}
	return nil, errdefs.Unsupportedf("this machine runs no workloads of kind %s", kindName(w.GetKind()))
}

func kindName(k capsulev1.WorkloadKind) string {
	switch k {
	case capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER:
		return "Container"
	case capsulev1.WorkloadKind_WORKLOAD_KIND_MICRO_VM:
		return "MicroVM"
	case capsulev1.WorkloadKind_WORKLOAD_KIND_UNSPECIFIED:
	}
	return fmt.Sprint(int32(k))
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
