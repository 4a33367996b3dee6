//go:build vm

package cloudhypervisor

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
	"cocoonstack.io/cocoon/internal/vm"
)

func run(t testing.TB, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return string(out)
}

func start(t *testing.T, d *Driver, p hypervisor.Plan) hypervisor.Instance {
	t.Helper()
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the log of the program: %s", jail.LastLine(filepath.Join(p.Dir, programLog), 0, func(string) bool { return false }))
		}
		_ = i.Kill(context.Background())
	})
	return i
}

// echoes checks that what listens in the guest answers, however the connection before was lost.
func echoes(t *testing.T, i hypervisor.Instance, what string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dialer, _ := hypervisor.As[hypervisor.GuestDialer](i)
	conn, err := dialer.DialGuest(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if _, err := conn.Write([]byte(what)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(what))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != what {
		t.Fatalf("%q comes back as %q, %v", what, got, err)
	}
}

// TestClones: two clones map the same memory. One has a disk that has grown, and is silent until OpenLink, also after a restart of the daemon, although its
// guest sends packets all the time.
func TestClones(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	ns := testguest.Bridged(t, 3)
	answers := func() bool {
		return exec.CommandContext(t.Context(), "ip", "netns", "exec", ns, "ping", "-c", "1", "-W", "1", "10.9.8.2").Run() == nil
	}
	plan := func(tap string, size int) hypervisor.Plan {
		disk := filepath.Join(t.TempDir(), "data")
		if err := os.WriteFile(disk, make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
		p := a.Plan(t)
		p.NICs = []vm.NIC{{Tap: tap, NetNS: "/run/netns/" + ns, MAC: "02:00:00:00:00:40"}}
		p.Disks = []vm.Disk{{Path: disk, Format: vm.DiskRaw, Serial: "data"}}
		return p
	}
	first := plan("tap0", 1<<20)
	i := start(t, d, first)
	testguest.Logged(t, i, "GUEST-READY")
	testguest.Say(t, i, "up 10.9.8.2/24")
	testguest.Logged(t, i, "UP")
	testguest.Await(t, "the guest answers", answers)
	grower, _ := hypervisor.As[hypervisor.DiskGrower](i)
	for serial, size := range map[string]int64{"none": 8 << 20, "": 8 << 20, "data": 1 << 19} {
		if err := grower.GrowDisk(t.Context(), serial, size); !errdefs.IsInvalid(err) {
			t.Errorf("grow %q to %d: %v", serial, size, err)
		}
	}
	if err := os.Truncate(first.Disks[0].Path, 2<<20); err != nil {
		t.Fatal(err)
	}
	pauser, _ := hypervisor.As[hypervisor.Pauser](i)
	if err := pauser.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := grower.GrowDisk(t.Context(), "data", 2<<20); !errdefs.IsUnavailable(err) {
		t.Errorf("grow a disk of a guest that is paused: %v", err)
	}
	if err := pauser.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := grower.GrowDisk(t.Context(), "data", 2<<20); err != nil {
			t.Fatal(err)
		}
	}
	testguest.Say(t, i, "sh while [ $(cat /sys/block/vda/size) != 4096 ]; do sleep 0.1; done; echo LARGER")
	testguest.Logged(t, i, "LARGER .")
	testguest.Say(t, i, "chatter 10.9.8.1")
	echoes(t, i, "booted")
	dir := t.TempDir()
	s := hypervisor.SavePlan{State: filepath.Join(dir, "vmstate"), Memory: filepath.Join(dir, "memory"), Hold: true}
	snapshotter, _ := hypervisor.As[hypervisor.Snapshotter](i)
	result, err := snapshotter.Save(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(s.Memory); err != nil || sparse.Occupied(st) > result.Memory+st.Size()/8 {
		t.Errorf("the memory: %v, %v; %d bytes are not zero", st, err, result.Memory)
	}
	if all, err := os.ReadDir(dir); err != nil || len(all) != 2 {
		t.Errorf("it has left %v, %v", all, err)
	}
	p, q := plan("tap1", 4<<20), plan("tap2", 2<<20)
	p.Incoming = &hypervisor.Incoming{State: s.State, Memory: s.Memory, LinksDown: true, Grown: []string{"data"}}
	q.Incoming = &hypervisor.Incoming{State: s.State, Memory: s.Memory, LinksDown: true}
	j, k := start(t, d, p), start(t, d, q)
	echoes(t, j, "resumed")
	echoes(t, k, "resumed too")
	testguest.Say(t, j, "sh while [ $(cat /sys/block/vda/size) != 8192 ]; do sleep 0.1; done; echo GROWN")
	testguest.Logged(t, j, "GROWN .")
	if answers() {
		t.Error("a clone answers before OpenLink")
	}
	for _, tap := range []string{"tap1", "tap2"} {
		if n := strings.TrimSpace(run(t, "ip", "netns", "exec", ns, "cat", "/sys/class/net/"+tap+"/statistics/rx_packets")); n != "0" {
			t.Errorf("%s packets came out of a guest before OpenLink", n)
		}
	}
	for _, i := range []hypervisor.Instance{j, k} {
		if shared := sharedBy(t, i.PID()); shared == 0 {
			t.Errorf("process %d shares no memory", i.PID())
		}
	}
	_ = j.Close()
	if j, err = testDriver(t).Adopt(t.Context(), j.Handle()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	opener, _ := hypervisor.As[hypervisor.LinkOpener](j)
	for range 2 {
		if err := opener.OpenLink(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
	}
	testguest.Await(t, "the clone answers", answers)
	if _, ok := hypervisor.As[hypervisor.Linker](j); ok {
		t.Error("it takes no carrier")
	}
	if err := opener.OpenLink(t.Context(), 7); !errdefs.IsNotFound(err) {
		t.Errorf("an interface that is not there: %v", err)
	}
	testguest.Say(t, j, "poweroff")
	if e, err := j.Wait(t.Context()); err != nil || !e.GuestShutdown {
		t.Errorf("%+v, %v", e, err)
	}
	testguest.Say(t, k, "reset")
	if e, err := k.Wait(t.Context()); err != nil || !e.GuestReset {
		t.Errorf("%+v, %v", e, err)
	}
}

// sharedBy returns how many KiB of the saved memory a process has mapped and shares.
func sharedBy(t *testing.T, pid int) (shared int64) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", pid))
	if err != nil {
		t.Fatal(err)
	}
	inside := false
	for line := range strings.Lines(string(text)) {
		switch fields := strings.Fields(line); {
		case len(fields) > 4 && strings.Contains(fields[0], "-"):
			inside = strings.Contains(line, "memfd:guest")
		case inside && (fields[0] == "Shared_Clean:" || fields[0] == "Shared_Dirty:"):
			var n int64
			_, _ = fmt.Sscan(fields[1], &n)
			shared += n
		}
	}
	return shared
}
