package cocoond

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// counted is a network that counts its calls. Its Run fails when the network is torn down meanwhile, as with a real
// one.
type counted struct {
	network.Network
	setups, teardowns, running atomic.Int32
	fail                       error
}

func (c *counted) Setup(context.Context) error    { c.setups.Add(1); return c.fail }
func (c *counted) Teardown(context.Context) error { c.teardowns.Add(1); return nil }
func (c *counted) Attach(context.Context, vm.ID, string, int, vm.NICSpec) (vm.NIC, error) {
	return vm.NIC{Tap: "t"}, nil
}

func (c *counted) Run(ctx context.Context) error {
	c.running.Add(1)
	defer c.running.Add(-1)
	<-ctx.Done()
	return errors.New("the bridge is gone")
}

func TestNetworkComesBackAfterAReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &counted{}
		k := keep(c)
		ctx, cancel := context.WithCancel(t.Context())
		if err := k.Setup(ctx); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- k.Run(ctx) }()
		synctest.Wait()
		if c.running.Load() != 1 {
			t.Fatal("it is not served")
		}
		if err := k.Teardown(ctx); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if c.running.Load() != 0 {
			t.Fatal("it is served although it is down")
		}
		for range 2 {
			if nic, err := k.Attach(ctx, "id", "web", 0, vm.NICSpec{}); err != nil || nic.Tap != "t" {
				t.Fatal(nic, err)
			}
		}
		synctest.Wait()
		if c.running.Load() != 1 || c.setups.Load() != 2 || c.teardowns.Load() != 1 {
			t.Errorf("running %d, set up %d times, torn down %d times", c.running.Load(), c.setups.Load(), c.teardowns.Load())
		}
		cancel()
		if err := <-done; err == nil {
			t.Error("a failure of the network itself was swallowed")
		}
		c.fail = errors.New("no root")
		_ = k.Teardown(t.Context())
		if _, err := k.Attach(t.Context(), "id", "web", 0, vm.NICSpec{}); !errors.Is(err, c.fail) {
			t.Errorf("attach to what cannot come up: %v", err)
		}
	})
}
