//go:build os

package appliance

import (
	"strings"
	"testing"
	"time"
)

// The image starts by its firmware and loader, makes its volumes, gets an address and runs its daemon. After a power cut it finds the volumes again,
// and a daemon that is killed is started again; nothing of what process 1 inherits stays dead. In the end it unmounts everything.
func TestImage(t *testing.T) {
	image := disk(t)
	m, cmd := firmware(t, image, false)
	text := m.wait(m.serial, "slot a, files", "making the group of volumes", "making /perm", "making the pool", `op="find the volumes"`, "Cocoon OS", "10.0.2.15:50000")
	t.Logf("first start: %s to the address", time.Since(m.begin).Round(time.Second))
	healthy(t, text)
	m.wait(m.serial, "child=cocoond")
	m.off(cmd) // a power cut

	m = withShell(t, image, "")
	text = m.wait(m.serial, `op="find the volumes"`, "Cocoon OS", "10.0.2.15:50000")
	t.Logf("second start: %s to the address", time.Since(m.begin).Round(time.Second))
	healthy(t, text)
	if strings.Contains(text, "first start") {
		t.Error("the second start made volumes")
	}
	m.run("export PATH=/usr/sbin:/usr/bin")
	for command, want := range map[string]string{
		"lvm lvs --noheadings -o lv_name capsule | sort | xargs":                       "lv_perm thinpool",
		"lvm lvs --noheadings --units m --nosuffix -o lv_size capsule/lv_perm | xargs": "1024.00",
		"grep -c '^/dev/capsule/lv_perm /perm ext4' /proc/mounts":                      "1",
		"grep -c ' /boot vfat rw' /proc/mounts":                                        "1",
		"ls /boot/EFI/BOOT | xargs":                                                    "BOOTX64.EFI grub.cfg grubenv",
		"grep -c ' /sys/fs/cgroup cgroup2' /proc/mounts":                               "1",
		"readlink /proc/1/exe":                                                         "/usr/bin/cocoond",
		"i=0; until [ -S /run/containerd/containerd.sock ] || [ $i = 60 ]; do i=$((i+1)); sleep 1; done; [ -S /run/containerd/containerd.sock ] && echo there || tail -n 5 /run/log/containerd.log": "there",
		"[ -s /perm/cocoon/dhcp-clientid ] && cat /perm/cocoon/dhcp-address":                                                                "10.0.2.15",
		"ls -d /dev/kvm 2>/dev/null; cat /proc/sys/kernel/hostname":                                                                         "/dev/kvm\ncapsule-123456",
		"i=0; until cocoon vm list >/dev/null 2>&1 || [ $i = 30 ]; do i=$((i+1)); sleep 1; done; cocoon vm list >/dev/null && echo answers": "answers",
	} {
		if got := m.run(command); got != want {
			t.Errorf("%s: got %q, want %q", command, got, want)
		}
	}

	t.Logf("cocoon doctor:\n%s", m.run("COCOOND_CONFIG=/etc/cocoon/cocoond.yaml cocoon doctor"))

	const daemon = `ps -o pid,args | grep -v grep | grep 'cocoond.yaml' | awk '{print $1}'`
	first := m.run(daemon)
	if first == "" || strings.Contains(first, "\n") {
		t.Fatalf("the daemon is %q", first)
	}
	// Orphans: a process that lives on, and many that die.
	m.run(`sh -c 'sleep 10000 & for i in 1 2 3 4 5 6 7 8 9; do (sleep 1 &) ; done'`)
	m.run("kill -9 " + first)
	m.wait(m.serial, `msg="child ended" child=cocoond err="signal: killed"`, "child=cocoond pid=")
	if second := m.run("i=0; until " + daemon + " | grep -q . || [ $i = 100 ]; do i=$((i+1)); usleep 100000; done; " + daemon); second == "" || second == first {
		t.Errorf("after a kill the daemon is %q", second)
	}
	if got := m.run("ps -o args | grep -c '[s]leep 10000'"); got != "1" {
		t.Errorf("%s processes of others are left", got)
	}
	m.run("sleep 3")
	if got := m.run("ps -o stat,pid,args | grep '^Z'"); got != "" {
		t.Errorf("zombies: %s", got)
	}
	if _, err := m.input.Write([]byte("kill -TERM 1\n")); err != nil {
		t.Fatal(err)
	}
	m.wait(m.serial, "ending all processes", "reboot: Restarting system")
	if text, _ := m.serial.Said(); strings.Contains(text, "not unmounted") {
		t.Errorf("a file system was busy:\n%s", tail(text))
	}
	<-m.ended
}

// healthy wants no step to have failed.
func healthy(t *testing.T, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		if strings.Contains(line, "pid1:") && (strings.Contains(line, "level=ERROR") || strings.Contains(line, "level=WARN")) {
			t.Errorf("%s", line)
		}
	}
}
