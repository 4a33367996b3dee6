//go:build host

package host

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

const (
	// A small guest with a secret that exists only in its memory.
	runGuest = "cocoon vm run --cpu 1 --memory 128M --wait-timeout 15m --name %[1]s demo && " +
		"cocoon vm exec %[1]s -- sh -c 'mkdir -p /dev/shm && mount -t tmpfs none /dev/shm; echo memory of %[1]s >/dev/shm/secret; echo disk of %[1]s >/kept; sync'"
	memoryOf = "cocoon vm exec %s -- cat /dev/shm/secret"
	pidOf    = "cocoon vm inspect %s | jq .pid"
	stateOf  = "cocoon vm inspect %s | jq -r .state"
)

// contend runs two busy loops in each of two cgroups for ten seconds, on the two cores, and prints the CPU time of the second
// group in percent of that of the first.
const contend = `
burn() { for i in 1 2; do sh -c "echo \$\$ >$1/cgroup.procs; timeout 15 sh -c 'while :; do :; done'" & done; }
usage() { awk '/usage_usec/ {print $2}' $1/cpu.stat; }
burn %[1]s >/dev/null; burn %[2]s >/dev/null
sleep 4
a=$(usage %[1]s); b=$(usage %[2]s)
sleep 10
echo $((($(usage %[2]s) - b) * 100 / ($(usage %[1]s) - a + 1)))
wait
rmdir %[2]s`

// payload is the set of files that a test brings to the machine: the package, a newer one, and the demo image.
func payload(t *testing.T) map[string]string {
	t.Helper()
	const word = "make test-host"
	return map[string]string{
		"cocoon.deb": need.Built(t, "bin/cocoon.deb", word), "newer.deb": need.Built(t, "bin/host/newer.deb", word),
		"demo.tar": need.Built(t, "bin/demo.tar", word),
	}
}

// installed is a running machine with the package installed and cocoond started.
func installed(t *testing.T) *machine {
	t.Helper()
	m := newMachine(t, payload(t), "")
	m.on()
	m.must("dpkg --force-unsafe-io -i /payload/cocoon.deb")
	m.must("systemctl enable --now cocoond")
	m.must("cocoon image import demo /payload/demo.tar")
	return m
}

func of(script string, name ...any) string { return fmt.Sprintf(script, name...) }

// TestHost goes through the life of a host. Each step depends on the one before, so the first failure ends the test.
func TestHost(t *testing.T) {
	m := installed(t)
	for _, step := range []struct {
		name string
		run  func(*testing.T, *machine)
	}{
		{"guests run on KVM", guestsRun},
		{"saved and cloned", savedAndCloned},
		{"limits bite", limitsBite},
		{"hibernated and woken", hibernatedAndWoken},
		{"a pod of a kubelet", podRuns},
		{"a daemon that hangs is started anew", daemonHangs},
		{"an upgrade leaves guests alone", upgraded},
		{"a reboot", rebooted},
		{"a reset", func(t *testing.T, m *machine) { powerCut(t, m, "reset", m.reset) }},
		{"a power cut", func(t *testing.T, m *machine) { powerCut(t, m, "unplugged", func() { m.off(); m.on() }) }},
	} {
		if !t.Run(step.name, func(t *testing.T) {
			m.t = t
			defer func() { m.t = nil }()
			step.run(t, m)
		}) {
			break
		}
	}
	m.t = t
}

func guestsRun(t *testing.T, m *machine) {
	m.want("cocoon node info -o json | jq -r '.drivers[] | select(.default) | .accel'", "kvm")
	m.want("cocoon doctor -o json | jq -c '[.[] | select(.status == \"fail\")]'", "[]")
	m.must(of(runGuest, "a"))
	argv := m.must("tr '\\0' ' ' </proc/$(" + of(pidOf, "a") + ")/cmdline")
	if !strings.Contains(argv, "kvm") || strings.Contains(argv, "tcg") {
		t.Errorf("the guest's hypervisor does not use KVM: %s", argv)
	}
	m.want(of(memoryOf, "a"), "memory of a")
	m.want("cocoon vm exec a -- nproc", "1")
	m.must("curl -sf -m 60 http://$(cocoon vm inspect a | jq -r .network_configs[0].address.ip):8080/ >/dev/null")
}

// limitsBite: processes in a VM's cgroup cannot exceed the VM's limits, and share the CPU by weight. The test ends the clone.
func limitsBite(t *testing.T, m *machine) {
	group := "/sys/fs/cgroup/cocoon/" + m.must("cocoon vm inspect b | jq -r .id")
	inside := func(script string) string { return "sh -c 'echo $$ >" + group + "/cgroup.procs; " + script + "'" }

	m.want("cat "+group+"/memory.oom.group "+group+"/cpu.weight | paste -sd,", "1,100")
	limit := number(t, m.must("cat "+group+"/memory.max"))
	if limit < 128<<20 || limit > 1<<30 {
		t.Errorf("memory.max is %d", limit)
	}
	if used := number(t, m.must("cat "+group+"/memory.current")); used == 0 || used > limit {
		t.Errorf("memory.current is %d of %d", used, limit)
	}

	m.must("mkdir /sys/fs/cgroup/cocoon/rival && echo 1000 >/sys/fs/cgroup/cocoon/rival/cpu.weight")
	share := number(t, m.must(of(contend, group, "/sys/fs/cgroup/cocoon/rival")))
	t.Logf("a rival of ten times the weight has %d %% of the CPU that the VM has", share)
	if share < 300 {
		t.Error("the CPU is not shared as cpu.weight says")
	}

	m.must("mkfifo /run/nobody")
	m.want(inside("for i in $(seq 700); do (read x </run/nobody) & done")+" 2>&1 | grep -c -m1 fork", "1") // pids.max
	m.must("for i in $(cat " + group + "/cgroup.procs); do [ $(cat /proc/$i/comm) != sh ] || kill $i; done")
	pid := m.must(of(pidOf, "b"))
	if out, err := m.run(inside("head -c 1G /dev/zero | tail >/dev/null")); err == nil {
		t.Errorf("a process in the VM's cgroup took 1 GiB: %s", out)
	}
	m.eventually("test ! -d /proc/" + pid + " && test $(" + of(stateOf, "b") + ") = stopped") // the whole group is killed at once
	m.want("cocoon vm inspect b | jq -r .reason", "Crashed")
	m.want(of(memoryOf, "a"), "memory of a")
	m.must("cocoon vm rm b")
	m.want("test -e "+group+" || echo gone", "gone")
}

func number(t *testing.T, s string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func savedAndCloned(_ *testing.T, m *machine) {
	m.must("cocoon snapshot save --name warm a")
	m.must("cocoon vm clone --wait-timeout 15m --name b warm")
	m.want(of(memoryOf, "b"), "memory of a")
	m.want("cocoon vm exec b -- hostname", "b")
	m.want(of(memoryOf, "a"), "memory of a")
}

func hibernatedAndWoken(_ *testing.T, m *machine) {
	m.must("cocoon vm hibernate a")
	m.want(of(stateOf, "a"), "hibernated")
	m.must("cocoon vm wake a")
	m.want(of(memoryOf, "a"), "memory of a")
}

// daemonHangs: systemd's watchdog ends a cocoond that does not answer, and starts another. Guests are not affected.
func daemonHangs(_ *testing.T, m *machine) {
	guest, daemon := m.must(of(pidOf, "a")), m.must("systemctl show -P MainPID cocoond")
	m.must("kill -STOP " + daemon)
	m.eventually("test $(systemctl show -P MainPID cocoond) != " + daemon + " && systemctl -q is-active cocoond")
	m.must("journalctl --no-pager -q -u cocoond | grep -i watchdog")
	m.want(of(pidOf, "a"), guest)
	m.want(of(memoryOf, "a"), "memory of a")
}

func upgraded(t *testing.T, m *machine) {
	guest, daemon := m.must(of(pidOf, "a")), m.must("systemctl show -P MainPID cocoond")
	before := m.must("cocoon node info -o json | jq -r .version")
	m.must("dpkg --force-unsafe-io -i /payload/newer.deb")
	m.eventually("test $(systemctl show -P MainPID cocoond) != " + daemon + " && cocoon node info -o json")
	if after := m.must("cocoon node info -o json | jq -r .version"); after == before {
		t.Errorf("cocoond is still %s", before)
	}
	m.want(of(pidOf, "a"), guest)
	m.want(of(memoryOf, "a"), "memory of a")
}

// rebooted: a hibernated VM wakes with its state. A running VM ends with the host, and keeps its disk and its address.
func rebooted(_ *testing.T, m *machine) {
	m.must(of(runGuest, "ran"))
	m.must("cocoon vm hibernate a")
	ip := m.must("cocoon vm inspect ran | jq -r .network_configs[0].address.ip")
	_, _ = m.run("systemctl reboot")
	m.leave()
	m.connect()
	m.back("a", "hibernated", "ran", "stopped")
	m.must("cocoon vm wake --wait-timeout 15m a")
	m.want(of(memoryOf, "a"), "memory of a")
	m.must("cocoon vm start ran")
	m.eventually("cocoon vm exec ran -- true")
	m.want("cocoon vm exec ran -- cat /kept", "disk of ran")
	m.want("cocoon vm inspect ran | jq -r .network_configs[0].address.ip", ip)
	m.must("cocoon vm rm --force ran")
}

// powerCut cuts the power right after the verbs have answered. All acknowledged results must survive.
func powerCut(_ *testing.T, m *machine, name string, cut func()) {
	m.must("cocoon snapshot save --name before-" + name + " a")
	m.must("cocoon vm create --name made-" + name + " demo")
	m.must("head -c 1M /dev/urandom >/run/disk && printf '\\125\\252' | dd of=/run/disk bs=1 seek=510 conv=notrunc status=none && " +
		"cocoon image import image-" + name + " /run/disk")
	m.must(of(runGuest, name) + " && cocoon vm hibernate a")
	cut()
	m.back("a", "hibernated", name, "stopped", "made-"+name, "created")
	m.want("cocoon snapshot inspect before-"+name+" | jq -r .name", "before-"+name)
	m.want("cocoon image inspect image-"+name+" | jq -r .name", "image-"+name+":latest")
	m.must("cocoon vm wake --wait-timeout 15m a")
	m.want(of(memoryOf, "a"), "memory of a")
	m.must("cocoon vm start " + name)
	m.eventually("cocoon vm exec " + name + " -- true")
	m.want("cocoon vm exec "+name+" -- cat /kept", "disk of "+name)
	m.must("cocoon vm clone --wait-timeout 15m --name clone before-" + name)
	m.want(of(memoryOf, "clone"), "memory of a")
	m.must("cocoon vm rm --force clone " + name)
}

// back waits until cocoond answers, and compares states: NAME, STATE and so on.
func (m *machine) back(states ...string) {
	m.t.Helper()
	m.eventually("cocoon vm list")
	for i := 0; i < len(states); i += 2 {
		m.want(of(stateOf, states[i]), states[i+1])
	}
}
