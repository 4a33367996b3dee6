//go:build os

package appliance

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// A machine whose clock says 1970 is adopted. A configuration of its network that does not work falls back by itself, also after a power
// cut; one that works stays when it was confirmed, also over a restart.
func TestNetwork(t *testing.T) {
	image := disk(t)
	api, moved := freePort(t), freePort(t)
	forward := fmt.Sprintf("hostfwd=tcp:127.0.0.1:%d-:50000", api)
	other := fmt.Sprintf("hostfwd=tcp:127.0.0.1:%d-10.0.2.77:50000", moved)
	m, cmd := firmwareWith(t, image, true, userNet(forward, other), "-rtc", "base=1970-01-02")
	o := &operator{t: t, m: m, dir: t.TempDir(), addr: fmt.Sprintf("127.0.0.1:%d", api)}
	m.wait(m.serial, "10.0.2.15:50000")
	o.until("box is adopted", "adopt", "--capsule", o.addr, "--name", "box", "--yes")
	if out := o.do("capsule", "info"); !strings.Contains(out, "s from here)") {
		t.Errorf("a machine at 1970 says:\n%s", out)
	}
	t.Logf("the network of a new machine:\n%s", o.until("10.0.2.15/24", "network", "get"))

	// What cannot work is refused.
	for text, want := range map[string]string{
		"link: eth7": "no Ethernet link eth7", "ipv4: {method: static, address: 172.20.1.1/24}": "network of the workloads", "ipv4: {method: static, address: 10.0.2.77/24, gateway: 10.9.9.9}": "cannot be reached",
	} {
		if out, err := o.try("network", "set", "-f", o.file("bad.yaml", text)); err == nil || !strings.Contains(out, want) {
			t.Errorf("%s: %s", text, out)
		}
	}

	// A wrong address: the operator loses the machine, and it comes back.
	wrong := o.file("wrong.yaml", "ipv4: {method: static, address: 192.0.2.7/24, gateway: 192.0.2.1}\n")
	o.do("network", "set", "-f", wrong, "--confirm-within", "30s")
	begin := time.Now()
	m.wait(m.serial, "10.0.2.15:50000", "192.0.2.7:50000")
	if out, err := o.try("network", "confirm"); err == nil {
		t.Errorf("a wrong address is confirmed: %s", out)
	}
	m.wait(m.serial, "192.0.2.7:50000", "10.0.2.15:50000")
	o.until("went back to what was confirmed before", "network", "get")
	t.Logf("%s from the wrong address to the old one", time.Since(begin).Round(time.Second))

	// A power cut during a trial.
	o.do("network", "set", "-f", wrong, "--confirm-within", "1h")
	m.wait(m.serial, "192.0.2.7:50000", "10.0.2.15:50000", "192.0.2.7:50000")
	m.off(cmd)
	m, cmd = firmware(t, image, true, forward, other)
	o.m = m
	m.wait(m.serial, "10.0.2.15:50000")
	if text, _ := m.serial.Said(); strings.Contains(text, "192.0.2.7") {
		t.Error("after a power cut the trial goes on")
	}

	// A right one, with a resolver and servers of time: confirmed at its new address, which the context has from then on.
	right := o.file("right.yaml", "link: eth0\nipv4: {method: static, address: 10.0.2.77/24, gateway: 10.0.2.2}\ndns: [10.0.2.3]\nntp: [10.0.2.2]\n")
	at := fmt.Sprintf("127.0.0.1:%d", moved)
	o.until("box keeps it", "network", "set", "-f", right, "--confirm-within", "3m", "--auto-confirm", "--at", at)
	m.off(cmd)
	m, cmd = firmware(t, image, true, forward, other)
	o.m = m
	m.wait(m.serial, "10.0.2.77:50000")
	out := o.until("10.0.2.77/24", "network", "get")
	if !strings.Contains(out, "10.0.2.3") || strings.Contains(out, "10.0.2.15") {
		t.Errorf("after a restart:\n%s", out)
	}
	t.Logf("after a restart:\n%s", out)
	m.off(cmd)
}
