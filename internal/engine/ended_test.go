package engine_test

import (
	"context"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestGuestLostInCalls: the process of a sandbox is killed while the guest is asked for something. Who ends or removes a container has what they
// want, and others are told why they do not.
func TestGuestLostInCalls(t *testing.T) {
	for _, c := range []struct {
		in    string
		call  func(ctx context.Context, r *rig) error
		fails bool
		has   int // containers of the sandbox after it
	}{
		{"agent.KillContainer", func(ctx context.Context, r *rig) error { return r.KillContainer(ctx, "web", "app", 0, 0) }, false, 2},
		{"agent.RemoveContainer", func(ctx context.Context, r *rig) error { return r.RemoveContainer(ctx, "web", "app") }, false, 1},
		{"driver.PlugDisk", func(ctx context.Context, r *rig) error {
			_, err := r.AddContainer(ctx, "web", manual("app"))
			return err
		}, true, 0},
		{"agent.ResizeContainers", func(ctx context.Context, r *rig) error {
			_, err := r.ResizeContainers(ctx, "web", map[string]vm.Resources{"app": {CPULimit: 100}})
			return err
		}, true, 2},
	} {
		t.Run(c.in, func(t *testing.T) {
			ctx, rec := t.Context(), vm.Record{}
			var armed atomic.Bool // for one call
			r := newRig(t, func(r *rig) {
				r.world.Fault = func(call string) error {
					if call != c.in || !armed.Swap(false) {
						return nil
					}
					r.world.Guest(rec.ID).End(hypervisor.Exit{Signal: 9, Code: -1})
					if c.in == "driver.PlugDisk" {
						return errdefs.NotFoundf("the VM has ended")
					}
					if err := r.KillContainer(ctx, "web", "other", 0, 0); err != nil { // an operation keeps the end off the record until it has ended
						t.Errorf("another container is ended meanwhile: %v", err)
					}
					return errdefs.Unavailablef("link lost")
				}
			})
			rec = r.must(r.Launch(ctx, sandbox()))
			r.await("web", "ready", ready)
			if c.in != "driver.PlugDisk" {
				for _, name := range []string{"app", "other"} {
					r.must(r.AddContainer(ctx, "web", manual(name)))
					r.must(r.StartContainer(ctx, "web", name))
				}
			}
			armed.Store(true)
			if err := c.call(ctx, r); c.fails {
				wantClass(t, "the call", err, errdefs.FailedPrecondition)
			} else if err != nil {
				t.Error(err)
			}
			if rec = r.await("web", "stopped", stopped); len(rec.Ephemeral) != c.has {
				t.Errorf("it has the containers %+v", rec.Ephemeral)
			}
		})
	}
}
