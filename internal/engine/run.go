package engine

import (
	"context"
	"fmt"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/engine/pool"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// New checks its arguments and returns an engine that does nothing until Run.
func New(cfg Config, deps Deps) (*Engine, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	switch {
	case deps.Journal == nil, deps.Images == nil:
		return nil, errdefs.Invalidf("engine: a journal and an image store are needed")
	case deps.Drivers[cfg.DefaultDriver] == nil:
		return nil, errdefs.Invalidf("engine: the default driver %q is not among the drivers", cfg.DefaultDriver)
	case cfg.PoolSize < 0 || cfg.PoolSize > 0 && cfg.PoolMemory <= 0:
		return nil, errdefs.Invalidf("engine: invalid pool of %d clones in %d bytes of memory; both must be positive", cfg.PoolSize, cfg.PoolMemory)
	}
	n := newNode(cfg, deps)
	if cfg.DefaultNetwork != "" && n.nics.Get(cfg.DefaultNetwork) == nil {
		return nil, errdefs.Invalidf("engine: the default network %q is not among the networks", cfg.DefaultNetwork)
	}
	n.pool = pool.New(pool.Config{Size: cfg.PoolSize, Memory: cfg.PoolMemory, Pause: cfg.PoolPause, Log: n.log}, poolMaker{n})
	return &Engine{node: n, containerVerbs: containerVerbs{n}, volumeVerbs: volumeVerbs{n}, sizeVerbs: sizeVerbs{n}, nicVerbs: nicVerbs{n}, strays: &strays{node: n, byID: map[vm.ID][]vm.NIC{}}}, nil
}

// Run recovers what an earlier process left, then watches the running VMs until ctx ends. It then returns nil when
// all its goroutines have ended; the VMs keep running. It may be called once.
func (e *Engine) Run(ctx context.Context) error {
	if !e.life.start(context.WithoutCancel(ctx)) {
		return errdefs.Preconditionf("engine: Run was called before")
	}
	err := e.recover(ctx)
	if err == nil {
		close(e.life.recovered)
		<-ctx.Done()
	}
	e.life.end()
	e.pool.Empty(ctx, "")
	e.letGo()
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("recover: %w", err)
	}
	return nil
}

// Recovered is closed when Run has finished recovery and operations may proceed.
func (e *Engine) Recovered() <-chan struct{} { return e.life.recovered }

// letGo closes the handles of running VMs without ending the VMs. Preconditions: no goroutine watches them any more.
func (e *Engine) letGo() {
	for _, m := range e.vms.all() {
		r := m.run.Load()
		if r == nil {
			continue
		}
		m.logs.Finish()
		if err := r.Inst.Close(); err != nil {
			e.log.Warn("handle of vm not closed", "vm", m.id, "err", err)
		}
	}
}

// recoverWidth is how many VMs are recovered at a time.
const recoverWidth = 16

// recover makes the host match the journal: it finishes or undoes interrupted operations, adopts running processes,
// removes what certainly belongs to no VM, and keeps aside what is merely unknown.
func (e *Engine) recover(ctx context.Context) error {
	began := time.Now()
	if err := e.dirs.parents(); err != nil {
		return err
	}
	records, unsettled, err := e.journal.Load(ctx)
	if err != nil {
		return err
	}
	intents := map[vm.ID]*journal.Intent{}
	for i := range unsettled {
		intents[unsettled[i].ID] = &unsettled[i]
	}
	e.nics.remember(ctx, records)
	slots := make(chan struct{}, recoverWidth)
	var wg sync.WaitGroup
	for _, r := range records {
		if r, err = e.own(ctx, r); err != nil {
			return err
		}
		m := e.newMachine(r)
		m.remains.Store(true) // not known, so assume it
		e.vms.add(m)
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			release, err := e.vms.queue.Lock(ctx, m.id)
			if err == nil { // otherwise Run ends
				m.recover(ctx, intents[m.id], release)
			}
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	e.unplugDown(ctx, func(id vm.ID) bool { return intents[id] != nil }) // a VM with an intent may be starting again right now
	e.strays.sweep(ctx)
	e.sweepKept(ctx)
	e.log.Info("recovered", "count", len(records), "unfinished", len(unsettled), "dur", time.Since(began))
	return ctx.Err()
}
