package fake

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/networktest"
	"cocoonstack.io/cocoon/internal/vm"
)

func fresh(t testing.TB, cfg Config) *Network {
	t.Helper()
	n, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestContract(t *testing.T) {
	networktest.Run(t, func(t testing.TB, _, subnet string) network.Network { return fresh(t, Config{Subnet: subnet}) })
}

func TestFault(t *testing.T) {
	boom := errdefs.Unavailablef("boom")
	var op string
	n := fresh(t, Config{Fault: func(o string) error {
		if o == op {
			return boom
		}
		return nil
	}})
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	op = "attach"
	if _, err := n.Attach(t.Context(), "a", "a", 0, vm.NICSpec{}); !errors.Is(err, boom) {
		t.Errorf("got %v", err)
	}
	if len(n.Taps()) != 0 || len(n.Leases()) != 0 {
		t.Error("a failed attach left something")
	}
}

func TestLatency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := fresh(t, Config{Latency: time.Second})
		if err := n.Setup(t.Context()); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if _, err := n.Attach(t.Context(), "a", "a", 0, vm.NICSpec{}); err != nil || time.Since(start) != time.Second {
			t.Errorf("attach took %s (%v)", time.Since(start), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, err := n.Attach(ctx, "b", "b", 0, vm.NICSpec{}); !errdefs.Is(err, errdefs.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
}

func BenchmarkAttachDetachRelease(b *testing.B) {
	n := fresh(b, Config{})
	if err := n.Setup(b.Context()); err != nil {
		b.Fatal(err)
	}
	i := 0
	for b.Loop() {
		id := vm.ID(fmt.Sprint(i))
		nic, err := n.Attach(b.Context(), id, string(id), 0, vm.NICSpec{})
		if err != nil {
			b.Fatal(err)
		}
		if err := errors.Join(n.Detach(b.Context(), nic), n.Release(b.Context(), nic)); err != nil {
			b.Fatal(err)
		}
		i++
	}
}
