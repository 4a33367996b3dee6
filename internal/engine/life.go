package engine

import (
	"context"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// life tracks the time between the start and the end of Run.
type life struct {
	recovered chan struct{}

	serving context.Context // ends when Run is told to end; operations are bound to it
	refuse  context.CancelFunc

	mu      sync.Mutex
	ctx     context.Context // for goroutines of Run: it outlives the operations, so that things end in order
	cancel  context.CancelFunc
	over    bool
	ops     sync.WaitGroup // operations in progress, in their callers' goroutines
	workers sync.WaitGroup
}

func newLife() *life {
	l := &life{recovered: make(chan struct{})}
	l.serving, l.refuse = context.WithCancel(context.Background()) // Run has its own context; callers may come before it
	return l
}

// start reports whether this is the first call.
func (l *life) start(ctx context.Context) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx != nil {
		return false
	}
	l.ctx, l.cancel = context.WithCancel(context.WithoutCancel(ctx))
	return true
}

// end refuses new operations, cancels those in progress and waits for them, then for the goroutines.
func (l *life) end() {
	l.mu.Lock()
	l.over = true
	l.mu.Unlock()
	l.refuse()
	l.ops.Wait()
	l.cancel()
	l.workers.Wait()
}

// spawn runs f as a goroutine of Run. Preconditions: called from an operation, from recovery or from another worker.
func (l *life) spawn(f func(ctx context.Context)) {
	l.workers.Go(func() { f(l.ctx) })
}

// ready waits until operations may proceed.
func (l *life) ready(ctx context.Context) error {
	if l.serving.Err() != nil {
		return stopping()
	}
	select {
	case <-l.recovered:
		return nil
	case <-l.serving.Done():
		return stopping()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// enter admits an operation that changes something. Its context ends with Run, and Run waits for leave.
func (l *life) enter(ctx context.Context) (_ context.Context, leave func(), err error) {
	if err := l.ready(ctx); err != nil {
		return nil, nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return nil, nil, stopping()
	}
	l.ops.Add(1)
	ctx, cancel := l.bound(ctx)
	return ctx, func() { cancel(); l.ops.Done() }, nil
}

// bound returns a context that ends with ctx or with Run. cancel must be called.
func (l *life) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(l.serving, cancel)
	return ctx, func() { stop(); cancel() }
}

// ended replaces err by its real reason when it comes from the end of Run and not from the caller.
func (l *life) ended(caller context.Context, err error) error {
	if err != nil && caller.Err() == nil && l.serving.Err() != nil && errdefs.Is(err, errdefs.Canceled) {
		return stopping()
	}
	return err
}

func stopping() error {
	return errdefs.Unavailablef("the engine is stopping; try again when it is back")
}
