package engine

import (
	"context"
	"path/filepath"
	"sync/atomic"
	"time"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// consolePath is the path of the console log in a runtime folder unless the driver says otherwise.
func consolePath(dir string) string { return filepath.Join(dir, "console.log") }

// run is one process of a VM, from its launch or adoption to its end.
type run struct {
	id      vm.ID
	inst    hypervisor.Instance
	link    *link // to the guest's agent; nil if it has none
	console string
	asked   atomic.Bool // the engine wants it to end
	still   atomic.Bool // its guest is paused because the engine saves it

	ended chan struct{}   // closed when the process has ended
	exit  hypervisor.Exit // valid once ended is closed
}

// over reports whether the process has ended.
func (r *run) over() bool {
	select {
	case <-r.ended:
		return true
	default:
		return false
	}
}

// attend watches a running process from now on. Preconditions: the VM is held.
func (e *Engine) attend(m *machine, inst hypervisor.Instance) {
	r := &run{id: m.id, inst: inst, ended: make(chan struct{}), console: consolePath(e.runDir(m.id))}
	if c, ok := hypervisor.As[hypervisor.ConsoleOpener](inst); ok {
		r.console = c.ConsoleLog()
	}
	kind := m.record().ImageType
	if d, ok := hypervisor.As[hypervisor.GuestDialer](inst); ok && e.agents[kind] != nil {
		r.link = newLink(d.DialGuest, kind)
		e.life.spawn(func(ctx context.Context) { e.converse(ctx, m, r) })
	}
	m.run.Store(r)
	if w, ok := hypervisor.As[hypervisor.DiskWatcher](inst); ok {
		e.life.spawn(func(ctx context.Context) { e.watchDisks(ctx, m, r, w) })
	}
	e.life.spawn(func(ctx context.Context) { e.await(ctx, m, r) })
	if foreign(m.record()) && kind != vm.ImageOCI {
		e.life.spawn(func(ctx context.Context) { e.swapNICs(ctx, m, r) })
	}
}

// await waits for the end of the process and records it, unless an operation does.
func (e *Engine) await(ctx context.Context, m *machine, r *run) {
	exit, err := r.inst.Wait(ctx)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		e.log.Error("end of vm not understood", "vm", m.id, "err", err)
		exit = hypervisor.Exit{Code: -1}
	}
	r.exit = exit
	close(r.ended)
	release, err := e.queue.acquire(ctx, m.id)
	if err != nil {
		return
	}
	defer release()
	if m.run.Load() != r {
		return
	}
	e.reclaim(ctx, m, r)
	at := now()
	rec, err := e.commit(ctx, m, e.journal.Update, func(rec *vm.Record) { stopped(rec, ending{exit: exit}, at) })
	if err != nil {
		e.log.Error("end of vm not recorded", "vm", m.id, "err", err)
		return
	}
	e.log.Info("vm ended", "vm", m.id, "reason", rec.Reason)
}

// reclaim releases what an ended process used, except what its next start uses again. r may be nil. What fails here
// is swept by the next recovery at the latest.
func (e *Engine) reclaim(ctx context.Context, m *machine, r *run) {
	if r != nil {
		r.link.drain(e.cfg.DrainTimeout)
		if err := kill(ctx, r); err != nil { // it has ended: this removes its sockets and cgroup
			m.remains.Store(true)
			e.log.Warn("remains of vm not removed", "vm", m.id, "err", err)
		}
		if err := r.inst.Close(); err != nil {
			e.log.Warn("vm not let go cleanly", "vm", m.id, "err", err)
		}
		m.run.Store(nil)
	}
	m.finishLogs()
	if err := e.detach(context.WithoutCancel(ctx), m.record().NICs, false); err != nil {
		e.log.Warn("interfaces of vm not removed", "vm", m.id, "err", err)
	}
}

// pause waits for d, or less when one of the channels closes.
func pause(d time.Duration, a, b <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-a:
	case <-b:
	}
}
