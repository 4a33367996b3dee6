//go:build vm

package cocoond_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/vm"
)

// guard watches the machine's links for packets with the MAC or the IP of a VM that do not come from its tap.
type guard struct {
	fd   int
	done chan struct{}

	mu    sync.Mutex
	seen  int
	alien []string
}

func newGuard(t *testing.T, own vm.NIC) *guard {
	t.Helper()
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
	if err != nil {
		t.Fatal(err)
	}
	tv := unix.NsecToTimeval(int64(100 * time.Millisecond))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		t.Fatal(err)
	}
	tap, err := net.InterfaceByName(own.Tap)
	if err != nil {
		t.Fatal(err)
	}
	g := &guard{fd: fd, done: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	go g.watch(ctx, tap.Index, own)
	t.Cleanup(func() { cancel(); <-g.done })
	return g
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

func (g *guard) watch(ctx context.Context, tap int, own vm.NIC) {
	defer close(g.done)
	defer unix.Close(g.fd)
	buf := make([]byte, 2048)
	for ctx.Err() == nil {
		n, from, err := unix.Recvfrom(g.fd, buf, 0)
		ll, ok := from.(*unix.SockaddrLinklayer)
		if err != nil || !ok || n < 14 || ll.Pkttype == unix.PACKET_OUTGOING || ll.Ifindex == tap {
			continue // nothing, or a packet from the host to a guest
		}
		mac, ip := senders(buf[:n])
		g.mu.Lock()
		g.seen++
		if mac == own.MAC || ip == own.IP {
			g.alien = append(g.alien, fmt.Sprintf("link %d: from %s (%s): % x", ll.Ifindex, mac, ip, buf[:min(n, 64)]))
		}
		g.mu.Unlock()
	}
}

// senders reads the sender of a frame: its MAC and, for ARP and IPv4, its IP.
func senders(f []byte) (mac, ip string) {
	mac = fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", f[6], f[7], f[8], f[9], f[10], f[11])
	at := 0
	switch binary.BigEndian.Uint16(f[12:]) {
	case unix.ETH_P_IP:
		at = 14 + 12
	case unix.ETH_P_ARP:
		at = 14 + 14
	}
	if at > 0 && len(f) >= at+4 {
		ip = netip.AddrFrom4([4]byte(f[at : at+4])).String()
	}
	return mac, ip
}

// TestVMSixteenClones makes 16 VMs of one snapshot at once, some of them from the pool. Each has its own identity, none
// is ever mistaken for the source, and the snapshot stays unchanged. A short run has five.
func TestVMSixteenClones(t *testing.T) {
	number, ready := 16, 4
	if testing.Short() {
		number, ready = 5, 2
	}
	n := newNode(t, "metricsAddr: "+metricsAddr, fmt.Sprintf("pool: {size: %d, memory: %d}", ready, int64(ready)<<28))
	source := n.countingEvery("source", "0.4")
	who := "cat /sys/class/net/eth0/address; ip -o -4 addr show eth0 | grep -o 'inet [0-9.]*'; hostname; cat /etc/machine-id; cat /proc/sys/kernel/random/uuid"
	own := n.sh("source", who)
	boot := n.sh("source", "cat /proc/sys/kernel/random/boot_id")
	x, err := n.SaveSnapshot(t.Context(), "source", vm.SaveSpec{Name: "base", Quiesce: true})
	if err != nil {
		t.Fatal(err)
	}
	if !x.Quiesced {
		t.Error("the guest's file systems were not frozen")
	}
	n.goesOn("source")
	had := n.counts("source")
	folder := filepath.Join(n.dir, "state")
	before := sums(t, snapshotDir(t, folder, x.ID))
	g := newGuard(t, source.NICs[0])
	if _, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: "base", Name: "first"}); err != nil {
		t.Fatal(err)
	}
	n.ready("first")
	n.until("the pool is full", func() bool { return n.metric("cocoon_pool_entries") == float64(ready) })

	var wg sync.WaitGroup
	for i := range number {
		wg.Go(func() {
			if _, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: "base", Name: fmt.Sprintf("clone-%d", i)}); err != nil {
				t.Errorf("clone %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	known := map[string]string{}
	unique := func(name, who string) {
		t.Helper()
		lines := strings.Split(who, "\n")
		if len(lines) != 5 {
			t.Errorf("%s says %q", name, who)
		}
		for _, l := range lines {
			if other, ok := known[l]; ok {
				t.Errorf("%s and %s both have %s", name, other, l)
			}
			known[l] = name
		}
	}
	unique("source", own)
	for i := range number {
		name := fmt.Sprintf("clone-%d", i)
		r := n.ready(name)
		got := n.sh(name, who)
		unique(name, got)
		if want := r.NICs[0].MAC + "\ninet " + r.NICs[0].IP + "\n" + name + "\n"; !strings.HasPrefix(got, want) {
			t.Errorf("%s is %q, its record says %q", name, got, want)
		}
		if b := n.sh(name, "cat /proc/sys/kernel/random/boot_id"); b != boot {
			t.Errorf("%s has booted", name)
		}
		if c := n.counts(name); len(c) > 0 && c[0] <= 3 {
			t.Errorf("%s counts from the beginning: %v", name, c[:1])
		}
		n.goesOn(name)
		reply, err := http.Get("http://" + r.NICs[0].IP + ":8080/")
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		page, _ := io.ReadAll(reply.Body)
		reply.Body.Close()
		if !bytes.Contains(page, []byte("Hello from "+name)) {
			t.Errorf("%s answers %.80q", name, page)
		}
	}
	if now := n.sh("source", who); now[:strings.LastIndex(now, "\n")] != own[:strings.LastIndex(own, "\n")] {
		t.Errorf("the source was %q and is %q", own, now)
	}
	if now := n.counts("source"); len(now) <= len(had) {
		t.Error("the source has stopped counting")
	}
	if after := sums(t, snapshotDir(t, folder, x.ID)); !maps.Equal(before, after) {
		t.Errorf("the snapshot has changed: %v, before %v", after, before)
	}
	n.sh("first", "cd /sys/bus/virtio/drivers/virtio_net && for d in virtio*; do echo $d >unbind; echo $d >bind; done") // as a reboot resets it
	n.sh("first", "true")
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.seen == 0 || len(g.alien) > 0 {
		t.Errorf("of %d packets of clones these are the source's: %s", g.seen, strings.Join(g.alien, "\n"))
	}
	t.Logf("%d packets of clones, none of the source", g.seen)
	if hits := n.metric(`cocoon_pool_clones_total{result="hit"}`); hits < float64(ready) {
		t.Errorf("%g clones came from the pool", hits)
	}
	n.until("the pool is full again", func() bool { return n.metric("cocoon_pool_entries") == float64(ready) })
	waiting := n.unlisted()
	if len(waiting) != ready || !process(waiting[0]) {
		t.Errorf("in the pool: %v", waiting)
	}
	n.crash()
	if left := n.unlisted(); len(left) > 0 || slices.ContainsFunc(waiting, process) {
		t.Errorf("of the pool of a daemon that was killed %v is left", left)
	}
	if r := n.ready("clone-0"); n.sh("clone-0", "hostname") != r.Spec.Name {
		t.Error("a VM from the pool is not itself after its daemon was killed")
	}
	for i := range number {
		if err := n.Remove(t.Context(), fmt.Sprintf("clone-%d", i), true); err != nil {
			t.Error(err)
		}
	}
	if after := sums(t, snapshotDir(t, folder, x.ID)); !maps.Equal(before, after) {
		t.Error("removing the clones has changed the snapshot")
	}
}

// metricsAddr is in the network namespace of the tests.
const metricsAddr = "127.0.0.1:9477"

// metric is the value of a metric, -1 when it is not available.
func (n *node) metric(name string) float64 {
	reply, err := http.Get("http://" + metricsAddr + "/metrics")
	if err != nil {
		return -1
	}
	defer reply.Body.Close()
	text, _ := io.ReadAll(reply.Body)
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, name+" "); ok {
			if v, err := strconv.ParseFloat(strings.TrimSpace(rest), 64); err == nil {
				return v
			}
		}
	}
	return -1
}

// unlisted returns the ids of VMs that have a folder, a process or a lease on this node but are not in its list.
func (n *node) unlisted() []string {
	n.t.Helper()
	var found []string
	for _, parent := range []string{"state/vms", "run/vms"} {
		entries, err := os.ReadDir(filepath.Join(n.dir, parent))
		if err != nil {
			n.t.Fatal(err)
		}
		for _, e := range entries {
			found = append(found, e.Name())
		}
	}
	var leases []struct {
		ID string `json:"vm_id"`
	}
	text, err := os.ReadFile(filepath.Join(n.dir, "state/net/leases.json"))
	if err == nil {
		err = json.Unmarshal(text, &leases)
	}
	if err != nil {
		n.t.Error(err)
	}
	for _, l := range leases {
		found = append(found, l.ID)
	}
	all, err := n.List(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	slices.Sort(found)
	return slices.DeleteFunc(slices.Compact(found), func(id string) bool {
		return slices.ContainsFunc(all, func(r vm.Record) bool { return string(r.ID) == id })
	})
}

// process reports whether a hypervisor started for the pool's clone id is running.
func process(id string) bool {
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	return slices.ContainsFunc(lines, func(file string) bool {
		text, _ := os.ReadFile(file)
		return strings.Contains(string(text), "guest=cocoon-pooled-"+id+",")
	})
}

// snapshotDir returns the folder of a snapshot.
func snapshotDir(t *testing.T, state, id string) string {
	t.Helper()
	found := ""
	_ = filepath.WalkDir(state, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Name() == "snapshot.json" && strings.Contains(path, id) {
			found = filepath.Dir(path)
		}
		return nil
	})
	if found == "" {
		t.Fatalf("snapshot %s has no folder below %s", id, state)
	}
	return found
}
