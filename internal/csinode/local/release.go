package local

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
)

const releasesAtOnce = 8

// Release makes the drivers unpublish and unstage all volumes, as far as they can, and keeps the records: the holders must publish their
// volumes again, as after a boot of the machine. It waits a moment for drivers that are not registered, for which Run must be running.
// It calls before for each volume first, up to eight times at once; an error keeps that volume published. Release can be repeated after
// any error.
//
// Errors: those of before and Unpublish, joined; DataLoss for each damaged record.
func (n *Node) Release(ctx context.Context, before func(csinode.Published) error) error {
	n.mu.Lock()
	var all []record
	var bad []error
	for _, e := range n.entries {
		switch {
		case e.bad != nil:
			bad = append(bad, e.bad)
		case !e.rec.Released:
			all = append(all, e.rec)
		}
	}
	n.mu.Unlock()
	slices.SortFunc(all, func(a, b record) int { return a.Key.Compare(b.Key) })
	n.awaitDrivers(ctx, all)

	errs := make([]error, len(all))
	slots := make(chan struct{}, releasesAtOnce)
	var wg sync.WaitGroup
	for i, r := range all {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if err := n.release(ctx, r.Key, before); err != nil {
				errs[i] = fmt.Errorf("release %s, mounted at %s: %w", r.Key, n.target(r.Key), err)
			}
		})
	}
	wg.Wait()
	return errors.Join(append(errs, bad...)...)
}

// awaitDrivers waits until the drivers of all are registered, or until the limit for that.
func (n *Node) awaitDrivers(ctx context.Context, all []record) {
	ctx, cancel := context.WithTimeout(ctx, n.limits.register)
	defer cancel()
	for {
		changed := n.Changed()
		if !slices.ContainsFunc(all, func(r record) bool { _, err := n.registry.driver(r.Driver); return err != nil }) {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

func (n *Node) release(ctx context.Context, k csinode.Key, before func(csinode.Published) error) error {
	e, unlock, err := n.hold(ctx, k)
	if errors.Is(err, errNone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	if err := before(n.published(e.rec)); err != nil {
		return err
	}
	if err := n.withdraw(ctx, e); err != nil {
		if errdefs.Is(err, errdefs.DeadlineExceeded) {
			err = fmt.Errorf("%w; look at the log of CSI driver %s", err, e.rec.Driver)
		}
		return err
	}
	e.rec.Boot, e.rec.Staged, e.rec.Released = "", false, true
	n.step("released")
	if err := n.save(e.rec); err != nil {
		return err
	}
	n.step("release ends")
	n.log.Info("CSI volume released", "driver", e.rec.Driver, "volume", k.String())
	return nil
}
