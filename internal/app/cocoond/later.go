package cocoond

import (
	"context"
	"os"
	"sync"

	"cocoonstack.io/cocoon/internal/hypervisor/pager"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
)

// helper runs this program as one of the processes that its daemon starts, which outlive it; ok is false if the arguments are those of no such process.
func helper(args []string) (code int, ok bool) {
	switch {
	case pager.Is(args):
		return pager.Main(args, os.Stderr), true
	case chunked.IsLoad(args):
		return chunked.Load(context.Background(), os.Stdin), true
	}
	return 0, false
}

// nobody is the user of processes that talk to registries of snapshots; nil if this one is no root, which then is nobody itself.
func nobody() *proc.User {
	if os.Geteuid() != 0 {
		return nil
	}
	return &proc.User{UID: 65534, GID: 65534}
}

// later is the work that outlives the requests that asked for it. The zero value is ready.
type later struct {
	mu   sync.Mutex
	ctx  context.Context // nil: run has not begun
	wait []func(context.Context)
	work sync.WaitGroup
}

// spawn has f run until run ends. Preconditions: whoever spawns ends before run.
func (l *later) spawn(f func(ctx context.Context)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx == nil {
		l.wait = append(l.wait, f)
		return
	}
	l.work.Go(func() { f(l.ctx) })
}

// run runs what was spawned until ctx ends, and returns when all of it has ended.
func (l *later) run(ctx context.Context) error {
	l.mu.Lock()
	l.ctx = ctx
	for _, f := range l.wait {
		l.work.Go(func() { f(ctx) })
	}
	l.mu.Unlock()
	<-ctx.Done()
	l.work.Wait()
	return nil
}
