//go:build vm

package qemu

import (
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
	"cocoonstack.io/cocoon/internal/vm"
)

func pings(t testing.TB, ns, address string) bool {
	t.Helper()
	return exec.CommandContext(t.Context(), "ip", "netns", "exec", ns, "ping", "-c", "1", "-W", "1", address).Run() == nil
}

// heard returns the number of packets that came out of the guest.
func heard(t testing.TB, ns, tap string) string {
	t.Helper()
	return strings.TrimSpace(run(t, "ip", "netns", "exec", ns, "cat", "/sys/class/net/"+tap+"/statistics/rx_packets"))
}

// carriers waits until the guest has a carrier on each of these interfaces whose LinkDown is false, and on no other.
func carriers(t *testing.T, i hypervisor.Instance, nics ...vm.NIC) {
	t.Helper()
	var want []string
	for _, n := range nics {
		carrier := "1"
		if n.LinkDown {
			carrier = "0"
		}
		want = append(want, n.MAC+"="+carrier)
	}
	slices.Sort(want)
	await(t, "the guest has the carriers "+strings.Join(want, " "), func() bool {
		before := strings.Count(consoleOf(t, i), "HEARD sh")
		say(t, i, "sh cd /sys/class/net; for e in eth*; do ip link set $e up; done; echo CARRIERS $(for e in eth*; do echo $(cat $e/address)=$(cat $e/carrier); done | sort)")
		await(t, "the guest answers", func() bool {
			answers := strings.Split(consoleOf(t, i), "HEARD sh")
			return len(answers) > before+1 && strings.Contains(answers[len(answers)-1], " .")
		})
		text := consoleOf(t, i)
		return strings.Contains(text[strings.LastIndex(text, "HEARD sh"):], "CARRIERS "+strings.Join(want, " ")+" .")
	})
}

// TestLinks starts a clone of a guest that sends packets, checks that the clone is silent, and replaces its NIC.
func TestLinks(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	ns := testguest.Bridged(t, 2)
	p := a.plan(t)
	p.NICs = []vm.NIC{{Tap: "tap0", NetNS: "/run/netns/" + ns, MAC: "02:00:00:00:00:42", MTU: 1400}}
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	say(t, i, "up 10.9.8.2/24")
	logged(t, i, "UP")
	await(t, "the guest answers", func() bool { return pings(t, ns, "10.9.8.2") })
	say(t, i, "chatter 10.9.8.1")
	s := saved(t)
	s.Hold = true
	doSave(t, i, s)
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	q := from(t, p, s)
	q.NICs = []vm.NIC{p.NICs[0]}
	q.NICs[0].Tap = "tap1"
	q.Incoming.LinksDown = true
	j := start(t, d, q)
	say(t, j, "mac")
	if got := line(t, j, "LINK "); strings.TrimSpace(got) != "0" {
		t.Errorf("carrier of a clone: %s", got)
	}
	if pings(t, ns, "10.9.8.2") {
		t.Error("the clone answers without carrier")
	}
	if n := heard(t, ns, "tap1"); n != "0" {
		t.Errorf("%s packets came out of a guest without carrier", n)
	}
	linker, _ := hypervisor.As[hypervisor.Linker](j)
	if err := linker.SetLink(t.Context(), 0, true); err != nil {
		t.Fatal(err)
	}
	await(t, "the clone answers", func() bool { return pings(t, ns, "10.9.8.2") })
	if err := linker.SetLink(t.Context(), 1, true); !errdefs.IsNotFound(err) {
		t.Errorf("link of an interface that is not there: %v", err)
	}

	swapper, _ := hypervisor.As[hypervisor.NICSwapper](j)
	if err := swapper.SwapNIC(t.Context(), 0, "03:00:00:00:00:99"); !errdefs.IsInvalid(err) {
		t.Errorf("a multicast address: %v", err)
	}
	before := time.Now()
	if err := swapper.SwapNIC(t.Context(), 0, "02:00:00:00:00:99"); err != nil {
		t.Fatal(err)
	}
	t.Logf("interface replaced in %v", time.Since(before))
	quiet := heard(t, ns, "tap1")
	await(t, "the guest sees the new interface", func() bool {
		say(t, j, "mac")
		return strings.Contains(consoleOf(t, j), "02:00:00:00:00:99")
	})
	say(t, j, "up 10.9.8.3/24")
	if pings(t, ns, "10.9.8.3") || heard(t, ns, "tap1") != quiet {
		t.Error("the new interface has a carrier")
	}
	if err := linker.SetLink(t.Context(), 0, true); err != nil {
		t.Fatal(err)
	}
	await(t, "the clone answers at its new address", func() bool { return pings(t, ns, "10.9.8.3") })

	// A guest with a replaced NIC can also be saved and resumed.
	again := saved(t)
	again.Hold = true
	doSave(t, j, again)
	if err := j.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := from(t, q, again)
	r.NICs = []vm.NIC{q.NICs[0]}
	r.NICs[0].MAC = "02:00:00:00:00:99"
	r.Incoming.Alone = true
	start(t, d, r)
	await(t, "the guest that was woken answers", func() bool { return pings(t, ns, "10.9.8.3") })
}

// TestModels shows that a guest finds interfaces of each model on its PCI bus, also after it was saved and resumed.
func TestModels(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	ns := testguest.Bridged(t, 4)
	p := a.firmware(t)
	p.Models = []vm.NICModel{vm.NICE1000, vm.NICE1000E, "", vm.NICRTL8139}
	for n := range p.Models {
		p.NICs = append(p.NICs, vm.NIC{Tap: fmt.Sprintf("tap%d", n), NetNS: "/run/netns/" + ns, MAC: fmt.Sprintf("02:00:00:00:00:%02x", n), MTU: 1400})
	}
	i := start(t, d, p)
	logged(t, i, "disk-demo is up")
	shown := func(i hypervisor.Instance, tag string) {
		t.Helper()
		shell(t, i, "echo "+tag+" $(cat /sys/bus/pci/devices/*/device)", "the guest lists its devices", func(log string) bool {
			lists := regexp.MustCompile(tag+" 0x.*").FindAllString(log, -1)
			return slices.ContainsFunc(lists, func(list string) bool {
				for _, id := range []string{"0x100e", "0x10d3", "0x1041", "0x8139"} {
					if !strings.Contains(list, id) {
						return false
					}
				}
				return true
			})
		})
	}
	shown(i, "FIRST")
	s := saved(t)
	s.Hold = true
	doSave(t, i, s)
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	q := from(t, p, s)
	q.Boot, q.Incoming.Alone = p.Boot, true
	shown(start(t, d, q), "SECOND")
}

// TestPluggedTraffic sends packets through an interface that a guest got while it ran, also after the guest was saved and resumed, and finds none after
// the interface is gone.
func TestPluggedTraffic(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	ns := testguest.Bridged(t, 2)
	p := a.plan(t)
	for n := range 2 {
		p.NICs = append(p.NICs, vm.NIC{Tap: fmt.Sprintf("tap%d", n), NetNS: "/run/netns/" + ns, MAC: fmt.Sprintf("02:00:00:00:00:%02x", n), MTU: 1400, Place: n})
	}
	later := p.NICs[1]
	p.NICs = p.NICs[:1:1]
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	plugger, _ := hypervisor.As[hypervisor.NICPlugger](i)
	began := time.Now()
	if err := plugger.PlugNIC(t.Context(), later); err != nil {
		t.Fatal(err)
	}
	await(t, "the guest finds the interface", func() bool {
		say(t, i, "sh ip link set eth1 up && ip addr add 10.9.8.7/24 dev eth1; cat /sys/class/net/eth1/mtu")
		return strings.Contains(consoleOf(t, i), "1400 .")
	})
	await(t, "the guest answers", func() bool { return pings(t, ns, "10.9.8.7") })
	t.Logf("an interface that is plugged answers after %v", time.Since(began))
	s := saved(t)
	s.Hold = true
	doSave(t, i, s)
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	q := from(t, p, s)
	q.NICs, q.BootNICs, q.Incoming.Alone = append(p.NICs, later), 1, true
	j := start(t, d, q)
	await(t, "the guest that was woken answers", func() bool { return pings(t, ns, "10.9.8.7") })
	linker, _ := hypervisor.As[hypervisor.Linker](j)
	if err := linker.SetLink(t.Context(), 1, false); err != nil {
		t.Fatal(err)
	}
	if pings(t, ns, "10.9.8.7") {
		t.Error("the guest answers without carrier")
	}
	if err := linker.SetLink(t.Context(), 1, true); err != nil {
		t.Fatal(err)
	}
	await(t, "the guest answers again", func() bool { return pings(t, ns, "10.9.8.7") })
	plugger, _ = hypervisor.As[hypervisor.NICPlugger](j)
	if err := plugger.UnplugNIC(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	run(t, "ip", "-n", ns, "tuntap", "del", "tap1", "mode", "tap") // nobody has it open
	if pings(t, ns, "10.9.8.7") {
		t.Error("the guest answers through an interface that is gone")
	}
}
