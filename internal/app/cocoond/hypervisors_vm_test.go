//go:build vm

package cocoond_test

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// otherNode starts cocoond, whose VMs can ask for driver. settings is the driver's key in the configuration.
func otherNode(t *testing.T, driver, settings string) *node {
	t.Helper()
	n := newNode(t, fmt.Sprintf("%s: {binary: %s}", settings, need.Hypervisor(t, driver)))
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
