package nodeapi

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/stats"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/vm"
)

// answerTime is how long after a removal its event waits at most for the caller. A caller that is stopped or does not end must
// not keep the later events from other programs.
const answerTime = 5 * time.Second

// removals knows whose removal of a VM has not been answered yet. The DELETED event of such a VM waits for the answer:
// a program that has a VM removed and also watches would otherwise take the removal for a loss.
//
// Each stream holds this event and the later ones back. So no event is lost or out of order, and a watcher whose stream breaks
// meanwhile resumes before the event.
//
// A call is answered when its reply has been passed to the connection. If it came from a process that ends after it
// (nodewire.SendThenExit), it is answered when the kernel has closed the connection of that process. Nothing here knows
// when the parent of that process has noticed its end.
type removals struct {
	mu      sync.Mutex
	pending map[vm.ID]map[*removal]bool
}

// removal is a call that removes a VM.
type removal struct {
	answered <-chan struct{} // closed when the call is answered
	over     chan struct{}   // closed when no event waits any more
}

// begin notes that the caller in ctx removes the VM. It comes before the removal itself, and end after it.
func (r *removals) begin(ctx context.Context, id vm.ID) (end func(error)) {
	x := &removal{over: make(chan struct{})}
	var key any = callKey{}
	if nodewire.TakeThenExit(ctx) {
		key = connKey{}
	}
	if done, ok := ctx.Value(key).(chan struct{}); ok {
		x.answered = done
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pending == nil {
		r.pending = map[vm.ID]map[*removal]bool{}
	}
	if r.pending[id] == nil {
		r.pending[id] = map[*removal]bool{}
	}
	r.pending[id][x] = true
	return func(err error) {
		if err != nil { // there is no event
			r.forget(id, x)
			return
		}
		time.AfterFunc(answerTime, func() { r.forget(id, x) })
	}
}

func (r *removals) forget(id vm.ID, x *removal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pending[id], x)
	if len(r.pending[id]) == 0 {
		delete(r.pending, id)
	}
	close(x.over)
}

// wait returns when every removal of the VM is answered, or ctx ends.
func (r *removals) wait(ctx context.Context, id vm.ID) {
	r.mu.Lock()
	all := slices.Collect(maps.Keys(r.pending[id]))
	r.mu.Unlock()
	for _, x := range all {
		select {
		case <-x.answered:
		case <-x.over:
		case <-ctx.Done():
			return
		}
	}
}

type (
	connKey struct{} // chan struct{}, closed at the end of the connection
	callKey struct{} // chan struct{}, closed at the end of the call
)

// endings is the stats.Handler that tells calls of Remove their own end and that of their connection.
type endings struct{}

// TagConn implements stats.Handler.
func (endings) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context {
	return context.WithValue(ctx, connKey{}, make(chan struct{}))
}

// HandleConn implements stats.Handler. A connection has one ConnEnd.
func (endings) HandleConn(ctx context.Context, s stats.ConnStats) {
	if done, ok := ctx.Value(connKey{}).(chan struct{}); ok && isA[*stats.ConnEnd](s) {
		close(done)
	}
}

// TagRPC implements stats.Handler.
func (endings) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	if info.FullMethodName != nodev1.VMs_Remove_FullMethodName {
		return ctx
	}
	return context.WithValue(ctx, callKey{}, make(chan struct{}))
}

// HandleRPC implements stats.Handler. A call has one End, after its reply has been passed to the connection.
func (endings) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if done, ok := ctx.Value(callKey{}).(chan struct{}); ok && isA[*stats.End](s) {
		close(done)
	}
}

func isA[T any](v any) bool {
	_, ok := v.(T)
	return ok
}
