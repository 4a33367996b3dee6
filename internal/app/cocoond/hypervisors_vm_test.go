//go:build vm

package cocoond_test

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// otherNode starts cocoond with the program of another driver. settings is the key of that driver in the configuration. more are further lines of it.
func otherNode(t *testing.T, driver, settings string, more ...string) *node {
	t.Helper()
	n := newNode(t, append(more, fmt.Sprintf("%s: {binary: %s}", settings, need.Hypervisor(t, driver)))...)
	info, err := n.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(info.Drivers, func(d nodewire.Driver) bool { return d.Name == driver })
	if at < 0 {
		t.Fatalf("the node has the drivers %+v", info.Drivers)
	}
	if d := info.Drivers[at]; d.Error != "" {
		t.Skip(d.Error)
	}
	return n
}

// others are the drivers beside QEMU, and their keys in the configuration.
var others = map[string]string{"cloud-hypervisor": "cloudHypervisor", "firecracker": "firecracker"}

// TestVMHypervisorsCNI: the taps of pods are in network namespaces of their own.
func TestVMHypervisorsCNI(t *testing.T) {
	for driver, settings := range others {
		t.Run(driver, func(t *testing.T) { withCNI(t, otherNode(t, driver, settings), driver) })
	}
}

// TestVMHypervisorsPlug: volumes, interfaces and containers come and go while a VM of Cloud Hypervisor runs, as in one of QEMU.
func TestVMHypervisorsPlug(t *testing.T) {
	const driver = "cloud-hypervisor"
	for what, test := range map[string]func(*testing.T, *node){"volume": attachesVolume, "interfaces": getsInterfaces, "container": addsContainer} {
		t.Run(what, func(t *testing.T) { test(t, otherNode(t, driver, others[driver], "driver: "+driver)) })
	}
}

// TestVMHypervisors takes a VM through its life in each of the other hypervisors, on a node that is killed in between.
func TestVMHypervisors(t *testing.T) {
	for driver, settings := range others {
		t.Run(driver, func(t *testing.T) {
			n := otherNode(t, driver, settings)
			_, err := n.Launch(t.Context(), vm.Spec{
				Name: "web", Driver: driver, Image: demo, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20, NICs: []vm.NICSpec{{}},
				Process: vm.Process{Entrypoint: []string{"sh", "-c", "n=0; while :; do n=$((n+1)); echo count $n; sleep 0.5; done & exec /usr/bin/server"}},
			})
			if err != nil {
				t.Fatal(err)
			}
			r := n.ready("web")
			if r.Driver != driver || r.Spec.Driver != driver {
				t.Fatalf("it asked for %s, and runs in %s", r.Spec.Driver, r.Driver)
			}
			n.goesOn("web")
			n.serves(r)
			n.givesBack(r)
			n.plugs(driver)
			if got := n.sh("web", "echo kept >/root/file && sync && hostname"); got != "web" {
				t.Errorf("its name is %q", got)
			}

			n.crash()
			if again := n.ready("web"); again.PID != r.PID {
				t.Errorf("process %d became %d", r.PID, again.PID)
			}
			n.goesOn("web")
			n.serves(r)

			if _, err := n.Stop(t.Context(), "web", time.Minute); err != nil {
				t.Fatal(err)
			}
			if _, err := n.Start(t.Context(), "web"); err != nil {
				t.Fatal(err)
			}
			r = n.ready("web")
			if got := n.sh("web", "cat /root/file"); got != "kept" {
				t.Errorf("after a restart the file has %q", got)
			}
			n.snapshots(r)
			if err := n.Remove(t.Context(), "web", true); err != nil {
				t.Error(err)
			}
		})
	}
}

// givesBack checks that the guest of the VM web returns free memory to the node.
func (n *node) givesBack(r vm.Record) {
	n.t.Helper()
	const used = 64 << 10 // KiB
	n.sh("web", "dd if=/dev/zero of=/dev/shm/used bs=1M count=64 2>&1")
	most := n.resident(r.PID)
	if most < used {
		n.t.Fatalf("the process has %d KiB, of which the guest has written %d", most, used)
	}
	n.sh("web", "rm /dev/shm/used")
	n.until("most of what the guest has freed is given back", func() bool { return n.resident(r.PID) < most-used*3/4 })
}

// resident is how much memory a process has, in KiB.
func (n *node) resident(pid int) (kib int) {
	n.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		n.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "\nRss:")
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		n.t.Fatalf("the memory of process %d: %v\n%s", pid, err, text)
	}
	return kib
}

// plugs gives the VM web a volume while it runs, and takes it away, if its driver can do that.
func (n *node) plugs(driver string) {
	n.t.Helper()
	ctx := n.t.Context()
	if _, err := n.CreateVolume(ctx, volume.Spec{Name: "data", Size: 32 << 20}); err != nil {
		n.t.Fatal(err)
	}
	_, err := n.AttachVolume(ctx, "web", vm.VolumeUse{Ref: "data"}, "/data")
	if driver == "firecracker" {
		if !errdefs.Is(err, errdefs.Unsupported) {
			n.t.Errorf("a volume for a VM that runs: %v", err)
		}
		return
	}
	if err != nil {
		n.t.Fatal(err)
	}
	n.sh("web", "echo kept >/data/file")
	n.crash()
	n.ready("web")
	if got := n.sh("web", "cat /data/file"); got != "kept" {
		n.t.Errorf("the volume has %q", got)
	}
	if _, err := n.DetachVolume(ctx, "web", "data"); err != nil {
		n.t.Fatal(err)
	}
	if got := n.sh("web", "mount | grep -c /data || true; ls -A /data"); got != "0" {
		n.t.Errorf("without the volume: %q", got)
	}
}

// addsContainer adds a container to a VM that runs. Its image is on disks that are plugged, also when the guest goes on after it slept.
func addsContainer(t *testing.T, n *node) {
	t.Helper()
	process := vm.Process{Entrypoint: []string{"sleep", "100000"}}
	_, err := n.Launch(t.Context(), vm.Spec{
		Name: "pod", Image: demo, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20, NICs: []vm.NICSpec{{}},
		Containers: []vm.Container{{Name: "main", Kind: vm.ContainerApp, Image: demo, Process: process}},
	})
	if err != nil {
		t.Fatal(err)
	}
	n.ready("pod")
	if _, err := n.AddContainer(t.Context(), "pod", vm.Container{Name: "tool", Kind: vm.ContainerEphemeral, Image: demo, Process: process}); err != nil {
		t.Fatal(err)
	}
	works := func() {
		t.Helper()
		n.until("the container runs", func() bool {
			r, err := n.Inspect(t.Context(), "pod")
			return err == nil && r.Container("tool").Status.State == vm.ContainerRunning
		})
		if got := n.shIn("pod", "tool", "cat /usr/bin/server | wc -c"); got == "0" {
			t.Errorf("its image has %s bytes", got)
		}
	}
	works()
	if _, err := n.Hibernate(t.Context(), "pod", ""); err != nil {
		t.Fatal(err)
	}
	n.crash()
	if _, err := n.Wake(t.Context(), "pod"); err != nil {
		t.Fatal(err)
	}
	n.ready("pod")
	works()
}

// serves waits until the web server of a VM answers this host.
func (n *node) serves(r vm.Record) {
	n.t.Helper()
	n.until("its web server answers", func() bool {
		res, err := http.Get("http://" + r.NICs[0].IP + ":8080/") //nolint:noctx // the caller has its own limit
		if err != nil {
			return false
		}
		defer res.Body.Close()
		_, err = io.Copy(io.Discard, res.Body)
		return err == nil && res.StatusCode == http.StatusOK
	})
}

// snapshots saves the VM web, clones it, and lets it sleep, wake and go back.
func (n *node) snapshots(r vm.Record) {
	n.t.Helper()
	ctx := n.t.Context()
	boot := n.sh("web", "cat /proc/sys/kernel/random/boot_id")
	if _, err := n.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"}); err != nil {
		n.t.Fatal(err)
	}
	n.goesOn("web")
	n.sh("web", "echo later >/root/file && sync")
	if _, err := n.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "twin"}); err != nil {
		n.t.Fatal(err)
	}
	c := n.ready("twin")
	if c.Driver != r.Driver || c.NICs[0].IP == r.NICs[0].IP || c.NICs[0].MAC == r.NICs[0].MAC {
		n.t.Errorf("the clone is %+v", c)
	}
	if got := n.sh("twin", "cat /root/file /proc/sys/kernel/random/boot_id && hostname"); strings.Join(strings.Fields(got), " ") != "kept "+boot+" twin" {
		n.t.Errorf("in the clone: %q, want that of boot %s", got, boot)
	}
	n.serves(c)
	n.goesOn("twin")
	n.serves(r)
	if _, err := n.Hibernate(ctx, "web", ""); err != nil {
		n.t.Fatal(err)
	}
	n.crash()
	if _, err := n.Wake(ctx, "web"); err != nil {
		n.t.Fatal(err)
	}
	if awake := n.ready("web"); awake.NICs[0].IP != r.NICs[0].IP {
		n.t.Errorf("awake it has %v", awake.NICs)
	}
	n.goesOn("web")
	n.serves(r)
	if got := n.sh("web", "cat /root/file /proc/sys/kernel/random/boot_id"); strings.Join(strings.Fields(got), " ") != "later "+boot {
		n.t.Errorf("awake: %q", got)
	}
	if _, err := n.Restore(ctx, "web", "gold"); err != nil {
		n.t.Fatal(err)
	}
	n.ready("web")
	if got := n.sh("web", "cat /root/file"); got != "kept" {
		n.t.Errorf("after it went back to the snapshot: %q", got)
	}
}
