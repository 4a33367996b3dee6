//go:build vm

package cloudhypervisor

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestPlug plugs a file before the guest begins and a block device while it runs. The root of the process has them for as long as the guest.
func TestPlug(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	dir := t.TempDir()
	disk := func(port int) vm.Disk {
		path := filepath.Join(dir, fmt.Sprint(port))
		if err := os.WriteFile(path, append([]byte(fmt.Sprintf("disk %d\n", port)), make([]byte, 1<<20)...), 0o600); err != nil {
			t.Fatal(err)
		}
		return vm.Disk{Path: path, Format: vm.DiskRaw, Serial: fmt.Sprint("vol-", port), Role: vm.RoleVolume, Port: port}
	}
	file, image := disk(7), disk(1)
	p := a.Plan(t)
	p.Paused = true
	i := start(t, d, p)
	plugger, _ := hypervisor.As[hypervisor.DiskPlugger](i)
	pauser, _ := hypervisor.As[hypervisor.Pauser](i)
	has := func(ports ...string) {
		t.Helper()
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/root%s", i.PID(), rootPlugged))
		var got []string
		for _, e := range entries {
			got = append(got, e.Name())
		}
		if err != nil || !slices.Equal(got, ports) {
			t.Errorf("the root of the process has the disks %q, %v; want %q", got, err, ports)
		}
	}
	plug := func(d vm.Disk) {
		t.Helper()
		if err := plugger.PlugDisk(t.Context(), d); err != nil {
			t.Fatal(err)
		}
	}
	plug(file)
	plug(image)
	if err := plugger.UnplugDisk(t.Context(), image.Serial); err != nil {
		t.Fatalf("before the guest begins: %v", err)
	}
	has("7")
	if err := pauser.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	testguest.Logged(t, i, "GUEST-READY disks: vol-7 0")
	if out, err := exec.CommandContext(t.Context(), "losetup", "--find", "--show", "--read-only", image.Path).Output(); err == nil {
		image.Path, image.Device = strings.TrimSpace(string(out)), true
		t.Cleanup(func() { _ = exec.CommandContext(context.Background(), "losetup", "--detach", image.Path).Run() })
	} else {
		t.Logf("no block device is at hand: %v", err)
	}
	image.ReadOnly = true
	plug(image)
	has("1", "7")
	says(t, i, "for f in /sys/block/vd*/serial /sys/block/vd*/ro; do echo $(cat $f); done; head -n 1 /dev/vdb; (echo x >/dev/vdb) 2>/dev/null || echo refused", "vol-7", "vol-1", "0", "1", "disk", "1", "refused")
	says(t, i, "echo written >/dev/vda; sync; head -n 1 /dev/vda", "written")
	for _, d := range []vm.Disk{file, image} {
		if err := plugger.UnplugDisk(t.Context(), d.Serial); err != nil {
			t.Fatal(err)
		}
	}
	has()
	says(t, i, "ls /dev/vd* 2>/dev/null | wc -l", "0")
	if text, err := os.ReadFile(file.Path); err != nil || !bytes.HasPrefix(text, []byte("written\n")) {
		t.Errorf("the file begins with %.10q, %v", text, err)
	}
	plug(file) // what is plugged into a guest that is paused, it finds when it goes on
	if err := plugger.UnplugDisk(t.Context(), file.Serial); err != nil {
		t.Fatal(err)
	}
	if err := pauser.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	plug(file)
	if err := pauser.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	says(t, i, "cat /sys/block/vd*/serial", "vol-7")
}

// TestPlugNICOfClone: an interface of a guest that resumed silently makes room for another one, on a new tap.
func TestPlugNICOfClone(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	ns := testguest.Bridged(t, 2)
	nic := func(place int, mac string) vm.NIC {
		return vm.NIC{Tap: fmt.Sprintf("tap%d", place), NetNS: "/run/netns/" + ns, MAC: mac, Place: place}
	}
	p := a.Plan(t)
	p.NICs = []vm.NIC{nic(0, "02:00:00:00:00:40"), nic(1, "02:00:00:00:00:41")}
	i := start(t, d, p)
	testguest.Logged(t, i, "GUEST-READY")
	dir := t.TempDir()
	s := hypervisor.SavePlan{State: filepath.Join(dir, "vmstate"), Memory: filepath.Join(dir, "memory"), Hold: true}
	snapshotter, _ := hypervisor.As[hypervisor.Snapshotter](i)
	if _, err := snapshotter.Save(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	q := a.Plan(t)
	q.NICs, q.Incoming = p.NICs, &hypervisor.Incoming{State: s.State, Memory: s.Memory, LinksDown: true}
	j := start(t, d, q)
	opener, _ := hypervisor.As[hypervisor.LinkOpener](j)
	plugger, _ := hypervisor.As[hypervisor.NICPlugger](j)
	up := func() {
		t.Helper()
		for place := range 2 {
			if err := opener.OpenLink(t.Context(), place); err != nil {
				t.Fatal(err)
			}
		}
	}
	up()
	if err := plugger.UnplugNIC(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	says(t, j, "cat /sys/class/net/eth*/address", "02:00:00:00:00:40")
	run(t, "ip", "-n", ns, "link", "del", "tap1")
	run(t, "ip", "-n", ns, "tuntap", "add", "tap1", "mode", "tap", "vnet_hdr")
	run(t, "ip", "-n", ns, "link", "set", "tap1", "master", "br0", "up")
	if err := plugger.PlugNIC(t.Context(), nic(1, "02:00:00:00:00:42")); err != nil {
		t.Fatal(err)
	}
	up()
	says(t, j, "cat /sys/class/net/eth*/address | sort", "02:00:00:00:00:40", "02:00:00:00:00:42")
	testguest.Say(t, j, "sh ip link set eth1 up; ip addr add 10.9.8.2/24 dev eth1; echo UP")
	testguest.Logged(t, j, "UP .")
	testguest.Await(t, "the guest answers by its new interface", func() bool {
		return exec.CommandContext(t.Context(), "ip", "netns", "exec", ns, "ping", "-c", "1", "-W", "1", "10.9.8.2").Run() == nil
	})
}
