package podprovider

import (
	"context"
	"sync"
)

// Run adopts what an earlier process left, calls ready, and then follows the Runtime's events until ctx ends. It returns
// after all goroutines of the provider have ended. Its end does not affect any VM.
func (p *Provider) Run(ctx context.Context, ready func()) error {
	var all sync.WaitGroup
	p.background = func(f func(context.Context)) context.CancelFunc {
		ctx, cancel := context.WithCancel(ctx)
		all.Go(func() {
			defer cancel()
			f(ctx)
		})
		return cancel
	}
	p.objects.Start(p.background)
	p.index.open(func(s, prior *podState) { p.background(newWorker(p.common, s, prior).run) })
	defer func() {
		p.index.close()
		all.Wait()
	}()
	p.background(func(ctx context.Context) { _ = p.probes.Run(ctx) }) // ends with ctx, like everything here
	revision, err := p.adopt(ctx)
	if err != nil {
		return err // only if ctx has ended
	}
	ready()
	p.follow(ctx, revision)
	return ctx.Err()
}
