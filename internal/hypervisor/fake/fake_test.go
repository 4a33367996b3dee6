package fake

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/hypervisortest"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func echo(context.Context, hypervisor.Plan) (net.Conn, error) {
	ours, theirs := net.Pipe()
	go func() {
		_, _ = io.Copy(theirs, theirs)
		_ = theirs.Close()
	}()
	return ours, nil
}

func plan(t testing.TB) hypervisor.Plan {
	return hypervisor.Plan{ID: vm.NewID(), Name: "test", CPUs: 1, Memory: 128 << 20, Agent: "cocoon.agent", Dir: t.TempDir()}
}

func host(t testing.TB, dir string) *Host {
	h, err := NewHost(dir)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// fixture uses one fake host in memory or, with a folder, a new host that reads the folder for every new driver.
func fixture(t *testing.T, dir string) hypervisortest.Fixture {
	hosts := []*Host{host(t, dir)}
	end := func(id vm.ID, how End) {
		for _, h := range hosts {
			_ = h.End(id, how)
		}
	}
	id := func(t *testing.T, i hypervisor.Instance) vm.ID {
		h, err := decodeHandle(i.Handle())
		if err != nil {
			t.Fatal(err)
		}
		return h.ID
	}
	return hypervisortest.Fixture{
		New: func(t *testing.T) hypervisor.Driver {
			if dir != "" {
				hosts = append(hosts, host(t, dir))
			}
			return New(Config{Guest: echo, Behave: func(hypervisor.Plan) Behaviour { return Behaviour{Launch: 5 * time.Millisecond} }}, hosts[len(hosts)-1])
		},
		Plan: func(t *testing.T) hypervisor.Plan {
			p := plan(t)
			p.Boot.Kernel = "/kernel"
			return p
		},
		Firmware: func(t *testing.T) hypervisor.Plan { return plan(t) },
		Broken: func(t *testing.T) hypervisor.Plan {
			p := plan(t)
			p.Dir += "/missing"
			return p
		},
		NICs: func(_ *testing.T, n int) (nics []vm.NIC) {
			for i := range n {
				nics = append(nics, vm.NIC{MAC: fmt.Sprintf("02:00:00:00:00:%02x", i)})
			}
			return nics
		},
		Connected: func(t *testing.T, i hypervisor.Instance, macs ...string) {
			var have []string
			for _, n := range hosts[len(hosts)-1].NICs(id(t, i)) {
				have = append(have, n.MAC)
			}
			if slices.Sort(have); !slices.Equal(have, slices.Sorted(slices.Values(macs))) {
				t.Fatalf("the guest has the interfaces %v, want %v", have, macs)
			}
		},
		Carriers: func(t *testing.T, i hypervisor.Instance, nics ...vm.NIC) {
			var want []bool
			for _, n := range nics {
				want = append(want, n.LinkDown)
			}
			if _, have := hosts[len(hosts)-1].Memory(id(t, i)); !slices.Equal(have, want) {
				t.Fatalf("links are down: %v, want %v", have, want)
			}
		},
		Booted:   func(*testing.T, hypervisor.Instance) {},
		PowerOff: func(t *testing.T, i hypervisor.Instance) { end(id(t, i), PowerOff) },
		Reset:    func(t *testing.T, i hypervisor.Instance) { end(id(t, i), Reset) },
		Crash: func(t *testing.T, pid int) {
			for _, h := range hosts {
				for id, p := range h.Running() {
					if p == pid {
						end(id, Crash)
					}
				}
			}
		},
		Left: func(t *testing.T, p hypervisor.Plan) []string {
			now := hosts[len(hosts)-1]
			if dir != "" {
				now = host(t, dir)
			}
			if _, ok := now.Running()[p.ID]; ok {
				return []string{"fake process"}
			}
			return nil
		},
		Limit: 5 * time.Second,
	}
}

func TestContractInMemory(t *testing.T) {
	hypervisortest.Run(t, func(t *testing.T) hypervisortest.Fixture { return fixture(t, "") })
}

func TestContractOnDisk(t *testing.T) {
	hypervisortest.Run(t, func(t *testing.T) hypervisortest.Fixture { return fixture(t, t.TempDir()) })
}

func TestBehaviour(t *testing.T) {
	tests := []struct {
		name  string
		b     Behaviour
		ask   bool
		after time.Duration
		want  hypervisor.Exit
	}{
		{"powers off", Behaviour{RunFor: time.Hour}, false, time.Hour, hypervisor.Exit{GuestShutdown: true}},
		{"panics", Behaviour{RunFor: time.Hour, End: Reset}, false, time.Hour, hypervisor.Exit{GuestReset: true}},
		{"crashes", Behaviour{RunFor: time.Hour, End: Crash}, false, time.Hour, hypervisor.Exit{Code: -1, Signal: 11}},
		{"shuts down slowly", Behaviour{Shutdown: time.Minute}, true, time.Minute, hypervisor.Exit{GuestShutdown: true}},
		{"ends before it is down", Behaviour{Shutdown: 2 * time.Hour, RunFor: time.Hour, End: Crash}, true, time.Hour, hypervisor.Exit{Code: -1, Signal: 11}},
		{"is deaf", Behaviour{IgnoreShutdown: true, RunFor: time.Hour}, true, time.Hour, hypervisor.Exit{GuestShutdown: true}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := plan(t)
			synctest.Test(t, func(t *testing.T) {
				d := New(Config{Behave: func(hypervisor.Plan) Behaviour { return tt.b }}, host(t, ""))
				start := time.Now()
				i, err := d.Launch(t.Context(), p)
				if err != nil {
					t.Fatal(err)
				}
				if tt.ask {
					if err := i.Shutdown(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				if got, err := i.Wait(t.Context()); err != nil || got != tt.want || time.Since(start) != tt.after {
					t.Errorf("Wait: %v after %v, want it after %v; %s", err, time.Since(start), tt.after, diff.Of(tt.want, got))
				}
			})
		})
	}
}

func TestTimeGoesOnWhileAway(t *testing.T) {
	dir, p := t.TempDir(), plan(t)
	synctest.Test(t, func(t *testing.T) {
		d := New(Config{Behave: func(hypervisor.Plan) Behaviour { return Behaviour{RunFor: time.Hour} }}, host(t, dir))
		i, err := d.Launch(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(50 * time.Minute)
		a, err := New(Config{}, host(t, dir)).Adopt(t.Context(), i.Handle())
		if err != nil {
			t.Fatal(err)
		}
		before := time.Now()
		if e, err := a.Wait(t.Context()); err != nil || !e.GuestShutdown || time.Since(before) != 10*time.Minute {
			t.Errorf("Wait = %+v, %v after %v", e, err, time.Since(before))
		}
	})
}

func TestFaults(t *testing.T) {
	boom := errdefs.Unavailablef("boom")
	var failing Op
	h := host(t, "")
	d := New(Config{Guest: echo, Fault: func(op Op, _ vm.ID) error {
		if op == failing {
			return boom
		}
		return nil
	}}, h)
	p := plan(t)
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	calls := map[Op]func() error{
		OpProbe:    func() error { _, err := d.Probe(t.Context()); return err },
		OpLaunch:   func() error { _, err := d.Launch(t.Context(), plan(t)); return err },
		OpLaunched: func() error { _, err := d.Launch(t.Context(), plan(t)); return err },
		OpAdopt:    func() error { _, err := d.Adopt(t.Context(), i.Handle()); return err },
		OpReap:     func() error { return d.Reap(t.Context(), p.ID, p.Dir) },
		OpState:    func() error { _, err := i.State(t.Context()); return err },
		OpShutdown: func() error { return i.Shutdown(t.Context()) },
		OpKill:     func() error { return i.Kill(t.Context()) },
		OpDial:     func() error { _, err := i.(*Instance).DialGuest(t.Context()); return err },
	}
	for op, call := range calls {
		failing = op
		if err := call(); !errors.Is(err, boom) {
			t.Errorf("%s: %v, want boom", op, err)
		}
		if n := len(h.Running()); n != 1 {
			t.Errorf("after a failed %s %d VMs run, want 1", op, n)
		}
	}
}

// TestTenThousand checks the promise of the fake: no goroutine for a VM that only runs.
func TestTenThousand(t *testing.T) {
	h := host(t, "")
	d := New(Config{}, h)
	dir := t.TempDir()
	before := runtime.NumGoroutine()
	instances := make([]hypervisor.Instance, 10000)
	for n := range instances {
		i, err := d.Launch(t.Context(), hypervisor.Plan{ID: vm.NewID(), Name: "x", CPUs: 1, Memory: 1 << 30, Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		instances[n] = i
	}
	if n := runtime.NumGoroutine() - before; n > 10 {
		t.Errorf("%d goroutines for %d VMs", n, len(instances))
	}
	for _, i := range instances {
		if err := i.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(h.vms); n != 0 {
		t.Errorf("%d records are left", n)
	}
}

func BenchmarkLaunchKill(b *testing.B) {
	d := New(Config{}, host(b, ""))
	dir := b.TempDir()
	for b.Loop() {
		i, err := d.Launch(b.Context(), hypervisor.Plan{ID: vm.NewID(), Name: "x", CPUs: 1, Memory: 1 << 30, Dir: dir})
		if err != nil {
			b.Fatal(err)
		}
		if err := i.Kill(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

func TestGoesOnFromSavedState(t *testing.T) {
	h := host(t, t.TempDir())
	d := New(Config{}, h)
	p := plan(t)
	p.NICs = []vm.NIC{{MAC: "02:00:00:00:00:01"}}
	dir := t.TempDir()
	disk := func(name string) vm.Disk {
		path := dir + "/" + name
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		return vm.Disk{Path: path, Serial: "cow"}
	}
	p.Disks = []vm.Disk{disk("old")}
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Remember(p.ID, "seven"); err != nil {
		t.Fatal(err)
	}
	taken := 0
	plan := hypervisor.SavePlan{
		State: dir + "/vmstate", Memory: dir + "/memory", Hold: true, Taken: func() { taken++ },
		Overlays: []hypervisor.DiskOverlay{{Serial: "cow", Disk: disk("new")}},
	}
	saved, err := i.(hypervisor.Snapshotter).Save(t.Context(), plan)
	if err != nil || taken != 1 || saved.Machine.Driver != Name || saved.Method != "stopped" {
		t.Fatalf("saved %+v, %v, taken %d times", saved, err, taken)
	}
	if s, err := i.State(t.Context()); s != hypervisor.Paused || err != nil {
		t.Errorf("held, it is %s, %v", s, err)
	}
	if got := h.vms[p.ID].Plan.Disks[0].Path; got != dir+"/new" {
		t.Errorf("it writes to %s", got)
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.Incoming = &hypervisor.Incoming{State: plan.State, Memory: plan.Memory, LinksDown: true}
	i, err = d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if text, down := h.Memory(p.ID); text != "seven" || !down[0] {
		t.Errorf("it remembers %q, down %v", text, down)
	}
	if err := i.(hypervisor.Linker).SetLink(t.Context(), 0, true); err != nil {
		t.Fatal(err)
	}
	if _, down := h.Memory(p.ID); down[0] {
		t.Error("the link is down still")
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.CPUs = 2
	if _, err := d.Launch(t.Context(), p); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("another number of CPUs: %v", err)
	}
	p.CPUs = 1
	if err := os.Truncate(plan.State, 3); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Launch(t.Context(), p); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("a truncated state: %v", err)
	}
}

// LastExit works until Kill removes the rest of the VM. Then nothing of it is left: the records of a node would pile up.
func TestAnEndIsForgottenWithItsRemains(t *testing.T) {
	dir := t.TempDir()
	d := New(Config{}, host(t, dir))
	inst, err := d.Launch(t.Context(), plan(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := inst.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := inst.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if exit, err := d.LastExit(t.Context(), inst.Handle()); err != nil || !exit.GuestShutdown {
		t.Errorf("before: %+v, %v", exit, err)
	}
	if err := inst.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := d.LastExit(t.Context(), inst.Handle()); !errdefs.IsNotFound(err) {
		t.Errorf("after: %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
}

// A record that a killed process did not finish is not a VM, and it is removed.
func TestUnfinishedRecord(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, string(vm.NewID())+".json"+unfinished), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	h := host(t, dir)
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 || len(h.Running()) > 0 {
		t.Errorf("there is %v (%v), and %v runs", left, err, h.Running())
	}
}
