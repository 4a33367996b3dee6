// Package networktest is the test suite that every implementation of network.Network must pass.
//
// It tests what the contract promises and not how it is implemented; packets are tested by the implementations themselves.
package networktest

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// New returns a network that is not set up, on subnet, with its files below dir. A second call with the same dir returns the
// network as a restarted daemon has it. Networks of different dirs must not affect each other, because the tests run in
// parallel. The suite tears the network down.
type New func(t testing.TB, dir, subnet string) network.Network

// Trait is a permitted difference between implementations.
type Trait int

// ForeignAddresses says that a system outside the network decides about addresses: a name has no address of its own, and a
// released interface may get another address.
const ForeignAddresses Trait = iota + 1

type suite struct {
	fresh   New
	foreign bool
}

// Run runs the suite.
func Run(t *testing.T, fresh New, traits ...Trait) {
	s := suite{fresh, slices.Contains(traits, ForeignAddresses)}
	for name, test := range map[string]func(*testing.T, suite){
		"NotSetUp":     notSetUp,
		"Attach":       attach,
		"NameDecides":  nameDecides,
		"Detach":       detach,
		"Release":      release,
		"ExplicitMAC":  explicitMAC,
		"Exhausted":    exhausted,
		"Sweep":        sweep,
		"Strays":       strays,
		"Remember":     remember,
		"Restart":      restart,
		"Teardown":     teardown,
		"Cancelled":    cancelled,
		"Concurrently": concurrently,
		"Run":          run,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, s)
		})
	}
}

const subnet = "10.123.0.0/24"

// setUp returns a network that is set up, and tears it down with the test.
func setUp(t *testing.T, fresh New, dir, subnet string) network.Network {
	t.Helper()
	n := fresh(t, dir, subnet)
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Teardown(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return n
}

func mustAttach(t *testing.T, n network.Network, id vm.ID, name string, index int) vm.NIC {
	t.Helper()
	nic, err := n.Attach(t.Context(), id, name, index, vm.NICSpec{})
	if err != nil {
		t.Fatal(err)
	}
	return nic
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// sameAnew is same for an attachment that was released in between.
func (s suite) sameAnew(a, b vm.NIC) bool {
	if s.foreign {
		b.MAC, b.IP = a.MAC, a.IP
	}
	return same(a, b)
}

// same compares what must not change between two answers.
func same(a, b vm.NIC) bool {
	return a.Tap == b.Tap && a.MAC == b.MAC && a.IP == b.IP && a.Prefix == b.Prefix && a.Gateway == b.Gateway && a.NetNS == b.NetNS
}

func notSetUp(t *testing.T, s suite) {
	n := s.fresh(t, t.TempDir(), subnet)
	if _, err := n.Attach(t.Context(), vm.NewID(), "early", 0, vm.NICSpec{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("attach: %v", err)
	}
	if err := n.Run(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("run: %v", err)
	}
	if err := n.Teardown(t.Context()); err != nil {
		t.Errorf("teardown of nothing: %v", err)
	}
}

func attach(t *testing.T, s suite) {
	n := setUp(t, s.fresh, t.TempDir(), subnet)
	must(t, n.Setup(t.Context()))
	id := vm.NewID()
	nic := mustAttach(t, n, id, "web", 0)
	check(t, n, nic)
	if again := mustAttach(t, n, id, "web", 0); !same(again, nic) {
		t.Errorf("attached again: %+v, before %+v", again, nic)
	}
	must(t, n.Setup(t.Context()))
	if again := mustAttach(t, n, id, "web", 0); !same(again, nic) {
		t.Errorf("attached after a second setup: %+v, before %+v", again, nic)
	}
	second := mustAttach(t, n, id, "web", 1)
	check(t, n, second)
	if second.Tap == nic.Tap || second.MAC == nic.MAC || second.IP == nic.IP {
		t.Errorf("two interfaces share: %+v, %+v", nic, second)
	}
}

// check verifies what every NIC must have.
func check(t *testing.T, n network.Network, nic vm.NIC) {
	t.Helper()
	prefix := netip.MustParsePrefix(subnet)
	ip, err := netip.ParseAddr(nic.IP)
	if err != nil || !prefix.Contains(ip) || nic.IP == nic.Gateway || ip == prefix.Addr() || nic.IP == "10.123.0.255" {
		t.Errorf("address %q (gateway %s)", nic.IP, nic.Gateway)
	}
	mac, err := net.ParseMAC(nic.MAC)
	if err != nil || len(mac) != 6 || mac[0]&3 != 2 || mac.String() != nic.MAC {
		t.Errorf("MAC %q is not a locally administered unicast one in lower case", nic.MAC)
	}
	if nic.Network != n.Name() || nic.Tap == "" || len(nic.Tap) > 15 || nic.Prefix != 24 {
		t.Errorf("NIC %+v", nic)
	}
}

func nameDecides(t *testing.T, s suite) {
	n := setUp(t, s.fresh, t.TempDir(), subnet)
	a := mustAttach(t, n, vm.NewID(), "a", 0)
	must(t, n.Detach(t.Context(), a))
	must(t, n.Release(t.Context(), a))
	b := mustAttach(t, n, vm.NewID(), "b", 0)
	again := mustAttach(t, n, vm.NewID(), "a", 0)
	if !s.foreign && (again.MAC != a.MAC || again.IP != a.IP) {
		t.Errorf("a new VM of the old name got %s %s, before %s %s", again.MAC, again.IP, a.MAC, a.IP)
	}
	if again.Tap == a.Tap {
		t.Error("two VMs had one tap name")
	}
	if b.MAC == a.MAC || b.IP == a.IP {
		t.Error("two names have one address")
	}
	// The first VM's NIC is out of date: operations on it must not affect the VM that inherited its lease.
	must(t, n.Detach(t.Context(), a))
	must(t, n.Release(t.Context(), a))
	if third := mustAttach(t, n, vm.NewID(), "c", 0); third.IP == again.IP {
		t.Error("a late release gave away an address in use")
	}
}

func detach(t *testing.T, s suite) {
	n := setUp(t, s.fresh, t.TempDir(), "10.123.0.0/29")
	id := vm.NewID()
	nic := mustAttach(t, n, id, "web", 0)
	must(t, n.Detach(t.Context(), nic))
	must(t, n.Detach(t.Context(), nic))
	for i := range 4 {
		if other := mustAttach(t, n, vm.NewID(), fmt.Sprint("other", i), 0); other.IP == nic.IP {
			t.Error("a reserved address was given away")
		}
	}
	if again := mustAttach(t, n, id, "web", 0); !same(again, nic) {
		t.Errorf("after detach: %+v, before %+v", again, nic)
	}
}

func release(t *testing.T, s suite) {
	n := setUp(t, s.fresh, t.TempDir(), "10.123.0.0/30")
	nic := mustAttach(t, n, vm.NewID(), "one", 0)
	must(t, n.Detach(t.Context(), nic))
	must(t, n.Release(t.Context(), nic))
	must(t, n.Release(t.Context(), nic))
	if other := mustAttach(t, n, vm.NewID(), "two", 0); other.IP != nic.IP {
		t.Errorf("the only address was %s, now %s", nic.IP, other.IP)
	}
}

func explicitMAC(t *testing.T, s suite) {
	n := setUp(t, s.fresh, t.TempDir(), subnet)
	const mac = "02:11:22:33:44:55"
	id := vm.NewID()
	nic, err := n.Attach(t.Context(), id, "a", 0, vm.NICSpec{MAC: "02:11:22:33:44:55"})
	must(t, err)
	if nic.MAC != mac {
		t.Errorf("MAC %s", nic.MAC)
	}
	if _, err := n.Attach(t.Context(), vm.NewID(), "b", 0, vm.NICSpec{MAC: mac}); !errdefs.IsAlreadyExists(err) {
		t.Errorf("the same MAC again: %v", err)
	}
	if again, err := n.Attach(t.Context(), id, "a", 0, vm.NICSpec{MAC: mac}); err != nil || !same(again, nic) {
		t.Errorf("attached again: %+v, %v", again, err)
	}
	if _, err := n.Attach(t.Context(), vm.NewID(), "c", 0, vm.NICSpec{MAC: "noise"}); !errdefs.IsInvalid(err) {
		t.Errorf("noise: %v", err)
	}
}

func exhausted(t *testing.T, s suite) {
	n := setUp(t, s.fresh, t.TempDir(), "10.123.0.0/29")
	var nics []vm.NIC
	for i := range 5 {
		nics = append(nics, mustAttach(t, n, vm.NewID(), fmt.Sprint("vm", i), 0))
	}
	id := vm.NewID()
	if _, err := n.Attach(t.Context(), id, "late", 0, vm.NICSpec{}); err == nil || !s.foreign && !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Fatalf("sixth of five: %v", err)
	}
	removed, _, err := n.Sweep(t.Context(), taps(nics), everybody)
	if err != nil || len(removed) != 0 {
		t.Errorf("the refused VM left taps %v (%v)", removed, err)
	}
	must(t, n.Detach(t.Context(), nics[2]))
	must(t, n.Release(t.Context(), nics[2]))
	if nic := mustAttach(t, n, id, "late", 0); nic.IP != nics[2].IP {
		t.Errorf("got %s, free was %s", nic.IP, nics[2].IP)
	}
}

func taps(nics []vm.NIC) []string {
	var out []string
	for _, nic := range nics {
		out = append(out, nic.Tap)
	}
	slices.Sort(out)
	return out
}

func sweep(t *testing.T, s suite) {
	n := setUp(t, s.fresh, t.TempDir(), subnet)
	ids := []vm.ID{vm.NewID(), vm.NewID(), vm.NewID()}
	var nics []vm.NIC
	for i, id := range ids {
		nics = append(nics, mustAttach(t, n, id, fmt.Sprint("vm", i), 0))
	}
	removed, strays, err := n.Sweep(t.Context(), []string{nics[1].Tap, "somebody-else"}, everybody)
	must(t, err)
	if want := taps([]vm.NIC{nics[0], nics[2]}); !slices.Equal(removed, want) || len(strays) > 0 {
		t.Errorf("removed %v, want %v; strays %v", removed, want, strays)
	}
	if removed, _, err = n.Sweep(t.Context(), []string{nics[1].Tap}, everybody); err != nil || len(removed) != 0 {
		t.Errorf("a second sweep removed %v (%v)", removed, err)
	}
	if again := mustAttach(t, n, ids[0], "vm0", 0); !s.sameAnew(again, nics[0]) {
		t.Errorf("a vanished tap came back as %+v, before %+v", again, nics[0])
	}
}

// everybody is for sweeps in which all VMs are known.
func everybody(vm.ID) bool { return true }

// strays has an unknown VM: its tap and address stay, while those of a known VM are removed.
func strays(t *testing.T, s suite) {
	n := setUp(t, s.fresh, t.TempDir(), subnet)
	unknown, known := vm.NewID(), vm.NewID()
	nic, other := mustAttach(t, n, unknown, "lost", 0), mustAttach(t, n, known, "web", 0)
	for range 2 {
		removed, strays, err := n.Sweep(t.Context(), nil, func(id vm.ID) bool { return id == known })
		must(t, err)
		if slices.Contains(removed, nic.Tap) || len(strays) != 1 || strays[0].ID != unknown {
			t.Fatalf("removed %v, strays %+v; the tap of the unknown VM is %s", removed, strays, nic.Tap)
		}
		if got := strays[0].NIC; got.Tap != nic.Tap || got.MAC != nic.MAC || got.IP != nic.IP || got.Network != nic.Network {
			t.Errorf("the stray has %+v, want %+v", got, nic)
		}
	}
	if again := mustAttach(t, n, unknown, "lost", 0); !same(again, nic) {
		t.Errorf("it is attached to %+v, before %+v", again, nic)
	}
	must(t, n.Detach(t.Context(), nic))
	must(t, n.Release(t.Context(), nic))
	must(t, n.Detach(t.Context(), other))
	must(t, n.Release(t.Context(), other))
}

// remember has VMs whose addresses the network has lost: no other VM gets them.
func remember(t *testing.T, s suite) {
	if s.foreign {
		t.Skip("somebody else decides about addresses")
	}
	lost := setUp(t, s.fresh, t.TempDir(), "10.123.0.0/29")
	ids := []vm.ID{vm.NewID(), vm.NewID()}
	var held []network.Held
	for i, id := range ids {
		nic := mustAttach(t, lost, id, fmt.Sprint("asleep", i), 0)
		held = append(held, network.Held{ID: id, Name: fmt.Sprint("asleep", i), NIC: nic})
	}
	must(t, lost.Teardown(t.Context()))
	n := setUp(t, s.fresh, t.TempDir(), "10.123.0.0/29")
	other := held[0]
	other.ID, other.NIC.Network = vm.NewID(), "another"
	for range 2 {
		must(t, n.Remember(t.Context(), append(held, other)))
	}
	for i := range 3 { // as many as are left
		nic := mustAttach(t, n, vm.NewID(), fmt.Sprint("new", i), 0)
		for _, h := range held {
			if nic.IP == h.NIC.IP || nic.MAC == h.NIC.MAC {
				t.Errorf("%s of %s was given away", nic.IP, h.Name)
			}
		}
	}
	for _, h := range held {
		if nic := mustAttach(t, n, h.ID, h.Name, 0); nic.IP != h.NIC.IP || nic.MAC != h.NIC.MAC {
			t.Errorf("%s has %s, before %s", h.Name, nic.IP, h.NIC.IP)
		}
	}
}

func restart(t *testing.T, s suite) {
	dir := t.TempDir()
	first := setUp(t, s.fresh, dir, subnet)
	id := vm.NewID()
	nic := mustAttach(t, first, id, "web", 0)
	second := setUp(t, s.fresh, dir, subnet) // the first ended without a shutdown
	if again := mustAttach(t, second, id, "web", 0); !same(again, nic) {
		t.Errorf("after a restart: %+v, before %+v", again, nic)
	}
	must(t, second.Detach(t.Context(), nic))
	must(t, second.Release(t.Context(), nic))
}

func teardown(t *testing.T, s suite) {
	dir := t.TempDir()
	n := setUp(t, s.fresh, dir, subnet)
	id := vm.NewID()
	nic := mustAttach(t, n, id, "web", 0)
	must(t, n.Teardown(t.Context()))
	must(t, n.Teardown(t.Context()))
	if _, err := n.Attach(t.Context(), id, "web", 0, vm.NICSpec{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("attach to what is gone: %v", err)
	}
	must(t, n.Setup(t.Context()))
	removed, _, err := n.Sweep(t.Context(), nil, everybody)
	if err != nil || len(removed) != 0 {
		t.Errorf("teardown left taps %v (%v)", removed, err)
	}
	if again := mustAttach(t, n, id, "web", 0); !s.sameAnew(again, nic) {
		t.Errorf("leases did not stay: %+v, before %+v", again, nic)
	}
	must(t, n.Teardown(t.Context()))
	must(t, n.Detach(t.Context(), nic)) // a VM can be removed even if its network is gone
	must(t, n.Release(t.Context(), nic))
}

func cancelled(t *testing.T, s suite) {
	n := setUp(t, s.fresh, t.TempDir(), subnet)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := n.Attach(ctx, vm.NewID(), "late", 0, vm.NICSpec{}); !errdefs.Is(err, errdefs.Canceled) {
		t.Errorf("attach: %v", err)
	}
	if removed, _, err := n.Sweep(t.Context(), nil, everybody); err != nil || len(removed) != 0 {
		t.Errorf("it left taps %v (%v)", removed, err)
	}
}

func concurrently(t *testing.T, s suite) {
	n := setUp(t, s.fresh, t.TempDir(), subnet)
	const vms = 16
	var (
		wg  sync.WaitGroup
		mu  sync.Mutex
		ips = map[string]bool{}
	)
	for i := range vms {
		wg.Go(func() {
			id, name := vm.NewID(), fmt.Sprint("vm", i)
			nic, err := n.Attach(t.Context(), id, name, 0, vm.NICSpec{})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			ips[nic.IP] = true
			mu.Unlock()
			again, err := n.Attach(t.Context(), id, name, 0, vm.NICSpec{})
			if err != nil || !same(again, nic) {
				t.Errorf("attached again: %+v (%v), before %+v", again, err, nic)
			}
		})
	}
	wg.Wait()
	if len(ips) != vms {
		t.Errorf("%d VMs have %d addresses", vms, len(ips))
	}
	removed, _, err := n.Sweep(t.Context(), nil, everybody)
	if err != nil || len(removed) != vms {
		t.Errorf("%d taps were there (%v)", len(removed), err)
	}
}

func run(t *testing.T, s suite) {
	n := setUp(t, s.fresh, t.TempDir(), subnet)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	nic := mustAttach(t, n, vm.NewID(), "web", 0)
	cancel()
	select {
	case err := <-ended:
		must(t, err)
	case <-time.After(10 * time.Second):
		t.Fatal("run did not return when its context ended")
	}
	must(t, n.Detach(t.Context(), nic)) // the rest works without Setup
	must(t, n.Release(t.Context(), nic))
}
