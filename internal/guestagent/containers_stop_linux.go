package guestagent

import (
	"context"
	"slices"
	"time"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file stops containers: a single one, the sidecars when they are not needed any more, or all.

const (
	sidecarGrace = 30 * time.Second // total time for the sidecars to end, after the apps have ended on their own
	sidecarLeast = 2 * time.Second  // minimum time after the apps were stopped, even if these used up the grace
)

// KillContainer implements guestv1.GuestServer.
func (s *Server) KillContainer(ctx context.Context, r *guestv1.KillContainerRequest) (*guestv1.KillContainerReply, error) {
	if r.GetGraceMs() < 0 || r.GetRun() < 0 {
		return nil, errdefs.Invalidf("a grace period of %d ms, or run %d, is negative", r.GetGraceMs(), r.GetRun())
	}
	grace := time.Duration(r.GetGraceMs()) * time.Millisecond
	return &guestv1.KillContainerReply{}, s.containers().kill(ctx, r.GetName(), int(r.GetRun()), grace)
}

// ReleaseContainer implements guestv1.GuestServer.
func (s *Server) ReleaseContainer(_ context.Context, r *guestv1.ReleaseContainerRequest) (*guestv1.ReleaseContainerReply, error) {
	return &guestv1.ReleaseContainerReply{}, s.containers().release(r.GetName())
}

// kill ends a run of the container called name, the current one when run is 0, and waits until it has ended. If ctx
// ends first, the kill continues. A run that has already ended is no error.
func (p *containers) kill(ctx context.Context, name string, run int, grace time.Duration) error {
	c, err := p.find(name)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.withdraw(c)
	m := c.main
	if m == nil || run != 0 && run != c.status.Run() {
		p.mu.Unlock()
		return nil
	}
	first := c.killed != m
	c.killed = m
	p.mu.Unlock()
	if first && grace > 0 {
		m.askToEnd()
	}
	killLater(m.child, grace)
	for {
		p.mu.Lock()
		over, changed := c.main != m, p.changed
		p.mu.Unlock()
		if over {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// withdraw makes sure that nobody can start c any more, if it waits for that. One that is held can then be killed. Preconditions: mu is held.
func (p *containers) withdraw(c *container) {
	switch {
	case c.held != nil:
		p.unhold(c)
	case c.status.State == vm.ContainerCreated:
		p.endUnstarted(c)
	}
}

// endUnstarted ends a container that nobody has started. Preconditions: mu is held.
func (p *containers) endUnstarted(c *container) {
	c.status = vm.ContainerStatus{State: vm.ContainerTerminated, Reason: vm.ContainerError, Exit: &vm.ContainerExit{
		Code: vm.LostExitCode, Reason: vm.ContainerError, Message: "it was ended before it was started", FinishedAt: time.Now(),
	}}
	c.log.close()
	close(c.quit)
	close(c.over)
	p.wake()
}

func killLater(c *child, grace time.Duration) {
	t := time.AfterFunc(grace, func() { c.signal(killSignal) })
	go func() { // ends with the process, which is killed at the latest then
		<-c.done
		t.Stop()
	}()
}

// endSidecars stops the sidecars one after the other, the last one first: each may need those before it.
func (p *containers) endSidecars() {
	began := time.Now()
	for _, c := range slices.Backward(p.all) {
		if c.kind == vm.ContainerSidecar {
			p.end(c, began)
		}
	}
}

// end stops a sidecar and waits until its process has ended. since is the time when the apps ended.
func (p *containers) end(c *container, since time.Time) {
	p.mu.Lock()
	close(c.quit)
	m := c.main
	p.mu.Unlock()
	if m == nil {
		return
	}
	m.askToEnd()
	for stop := p.stop; ; stop = nil { // a stop of all leaves less time
		t := time.NewTimer(time.Until(p.limit(since)))
		select {
		case <-m.child.done:
		case <-t.C:
			m.child.signal(killSignal)
			<-m.child.done
		case <-stop:
			t.Stop()
			continue
		}
		t.Stop()
		return
	}
}

// limit is the deadline for the sidecars to end. since is the time when the apps ended.
func (p *containers) limit(since time.Time) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.deadline.IsZero() {
		return since.Add(sidecarGrace)
	}
	if least := since.Add(sidecarLeast); p.deadline.Before(least) {
		return least
	}
	return p.deadline
}

// shutdown asks all containers to end, the sidecars after the others, and kills what is left after grace.
func (p *containers) shutdown(ctx context.Context, grace time.Duration) {
	p.stopping.Do(func() {
		p.mu.Lock()
		p.deadline = time.Now().Add(grace)
		p.mu.Unlock()
		close(p.stop)
	})
	for _, m := range p.living() {
		m.askToEnd()
		killLater(m.child, grace)
	}
	t := time.NewTimer(grace + sidecarLeast + ackPatience)
	defer t.Stop()
	select {
	case <-p.done: // run stops the sidecars
	case <-t.C:
	case <-ctx.Done():
	}
}

// living are the main processes of all containers except the sidecars.
func (p *containers) living() (out []*mainProcess) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.every() {
		if c.main != nil && c.kind != vm.ContainerSidecar {
			out = append(out, c.main)
		}
	}
	return out
}
