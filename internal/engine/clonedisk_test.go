package engine_test

import (
	"context"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestCloneOfDiskGuest: a guest that cannot be told its identity gets other NICs, but is not ready by that.
func TestCloneOfDiskGuest(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	r.must(r.Launch(ctx, cloud()))
	rec := r.await("web", "ready", ready)
	r.write(r.world.Guest(rec.ID), "one.")
	x := r.saved("gold")
	if len(x.Disks) != 1 {
		t.Errorf("the seed is in the snapshot: %+v", x.Disks)
	}
	r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a"}))
	c := r.await("a", "with interfaces of its own", vm.Record.Itself)
	limited, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := r.world.Guest(c.ID).Await(limited, func(s enginetest.Self) bool { return !s.Down }); err != nil {
		t.Fatal(err)
	}
	self := r.world.Guest(c.ID).Self()
	if c.AgentReady || c.Resume == nil || self.MAC != c.NICs[0].MAC || len(c.Disks) != 2 {
		t.Errorf("the clone is %+v, its record %+v", self, c)
	}
	seed, err := os.ReadFile(c.Disks[1].Path)
	if err != nil || string(seed) != "a "+c.NICs[0].IP {
		t.Errorf("its seed is %q, %v", seed, err)
	}
	r.restart()
	r.await("a", "running", func(v vm.Record) bool { return v.State == vm.StateRunning && v.Itself() })
	r.clearAll("gold")
}

// TestCloneOfDiskGuestIsTold: if its agent can do that, the guest is told its identity, with its new NICs. If its
// owner does not allow that, it is treated as a guest that cannot be told.
func TestCloneOfDiskGuestIsTold(t *testing.T) {
	for name, refuses := range map[string]bool{"told": false, "not allowed": true} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			var calls []string
			r := newRig(t, func(r *rig) {
				r.world.Told = true
				r.world.Fault = func(call string) error {
					mu.Lock()
					defer mu.Unlock()
					calls = append(calls, call)
					if refuses && call == "agent.Resumed" {
						return errdefs.Unsupportedf("switched off")
					}
					return nil
				}
			})
			ctx := t.Context()
			r.must(r.Launch(ctx, cloud()))
			r.await("web", "ready", ready)
			r.saved("gold")
			r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a"}))
			c := r.await("a", "with interfaces of its own", vm.Record.Itself)
			if !refuses {
				c = r.await("a", "ready", ready)
			}
			self := r.world.Guest(c.ID).Self()
			if c.AgentReady == refuses || refuses != (c.Resume != nil) || self.MAC != c.NICs[0].MAC || !refuses && (self.Down || self.Hostname != "a" || len(self.MachineID) != 32) {
				t.Errorf("the clone is %+v, its record %+v", self, c)
			}
			mu.Lock()
			swapped, resumed := slices.Index(calls, "driver.SwapNIC done"), slices.Index(calls, "agent.Resumed")
			mu.Unlock()
			if swapped < 0 || !refuses && resumed < swapped {
				t.Errorf("it was told in call %d and got its interface in %d", resumed, swapped)
			}
			r.clearAll("gold")
		})
	}
}

// Whether a clone is policed is up to who makes it, and not to the snapshot.
func TestCloneIsPolicedIfAsked(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	spec := cloud()
	spec.NICs = []vm.NICSpec{{Policed: true}}
	r.must(r.Launch(ctx, spec))
	r.await("web", "ready", ready)
	r.saved("gold")
	for name, policed := range map[string]bool{"a": true, "b": false} {
		c := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: name, Policed: policed}))
		if len(c.Spec.NICs) != 1 || c.Spec.NICs[0].Policed != policed {
			t.Errorf("%s: %+v", name, c.Spec.NICs)
		}
	}
}
