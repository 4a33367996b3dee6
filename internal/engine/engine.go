// Package engine owns the VMs of one machine: their life cycle, their records and the events about them.
//
// Operations on one VM run one after the other; different VMs run in parallel. The engine writes each operation to
// the journal before it begins and settles it afterwards. So the next Run finishes or undoes whatever kill -9
// interrupts. Guests do not notice a restart of the daemon. The engine knows no hypervisor, image format, network or
// API. They come as values of the contracts and are wired elsewhere.
package engine

import (
	"context"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Engine owns all VMs. Its methods are safe for concurrent use. Records that it returns belong to the caller.
//
// Operations wait until Run has recovered what an earlier process left (see Recovered). They return Unavailable once
// Run has been told to end.
type Engine struct {
	*node
	strays *strays
}

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
	return &Engine{node: n, strays: &strays{node: n}}, nil
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
