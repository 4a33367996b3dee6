//go:build bench

package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/guest/agent"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	cloneRounds = 7
	stormSmall  = 64
	stormLarge  = 100
	saveRounds  = 5
)

// clones compares a VM that resumes from a snapshot with one that boots, and with the plain QEMU commands for the same.
func clones(t *testing.T, results *table) {
	t.Run("pool", func(t *testing.T) { pooled(t, results) })
	d := start(t, "")
	ready := watchReady(t, d.Client)
	for _, name := range []string{"busy", "source"} {
		must(d.Launch(t.Context(), spec(name)))(t)
		ready.wait(t, name)
	}
	pauses(t, d, results)
	must(d.SaveSnapshot(t.Context(), "source", vm.SaveSpec{Name: "base"}))(t)

	var cold, clone, bare samples
	plainClone := newBareClone(t, d, ready)
	for n := range cloneRounds + 1 {
		b := timed(func() {
			must(d.Launch(t.Context(), spec(fmt.Sprintf("cold-%d", n))))(t)
			ready.wait(t, fmt.Sprintf("cold-%d", n))
		})
		c := timed(func() {
			must(d.Clone(t.Context(), vm.CloneSpec{Snapshot: "base", Name: fmt.Sprintf("clone-%d", n)}))(t)
			ready.wait(t, fmt.Sprintf("clone-%d", n))
		})
		p := plainClone.once(t, n)
		if n > 0 { // the first round only warms up
			cold, clone, bare = append(cold, b), append(clone, c), append(bare, p)
		}
		if n == cloneRounds {
			break // these two are compared below
		}
		remove(t, d, fmt.Sprintf("cold-%d", n), fmt.Sprintf("clone-%d", n))
	}
	ratio(results, "clone (A), cold boot (B): until the agent has set it up", clone.median(), cold.median(), 0.1, cloneRounds)
	ratio(results, "clone (A), bare QEMU commands (B)", clone.median(), bare.median(), 1.2, cloneRounds)
	cold1 := pss(t, d, fmt.Sprintf("cold-%d", cloneRounds))
	remove(t, d, fmt.Sprintf("cold-%d", cloneRounds), fmt.Sprintf("clone-%d", cloneRounds))
	for _, n := range []int{stormSmall, stormLarge} {
		each := storm(t, d, ready, results, n, clone.median())
		share := float64(each) / float64(cold1)
		results.add(row{
			what: fmt.Sprintf("memory (PSS) of each of %d idle clones (A), of a booted VM (B)", n), a: mib(each), b: mib(cold1),
			figure: fmt.Sprintf("%.1f %%", share*100), goal: "<= 16 %", missed: share > 0.16, n: n,
		})
	}
	hibernation(t, d, ready, results)
}

// engineMetrics is an address in the network namespace of the benchmarks.
const engineMetrics = "127.0.0.1:9477"

// pooled compares a VM from the pool with one that boots.
func pooled(t *testing.T, results *table) {
	d := start(t, fmt.Sprintf("pool: {size: 1, memory: %d}\nmetricsAddr: %s\n", int64(guestMemory), engineMetrics))
	ready := watchReady(t, d.Client)
	must(d.Launch(t.Context(), spec("source")))(t)
	ready.wait(t, "source")
	must(d.SaveSnapshot(t.Context(), "source", vm.SaveSpec{Name: "base"}))(t)
	var cold, clone samples
	for n := range cloneRounds + 1 {
		b := timed(func() {
			must(d.Launch(t.Context(), spec(fmt.Sprintf("cold-%d", n))))(t)
			ready.wait(t, fmt.Sprintf("cold-%d", n))
		})
		if n > 0 {
			until(t, time.Minute, "a clone is in the pool", func() bool { return engineMetric(t, "cocoon_pool_entries") == 1 })
		}
		c := timed(func() {
			must(d.Clone(t.Context(), vm.CloneSpec{Snapshot: "base", Name: fmt.Sprintf("clone-%d", n)}))(t)
			ready.wait(t, fmt.Sprintf("clone-%d", n))
		})
		if n > 0 { // the first is not from the pool
			cold, clone = append(cold, b), append(clone, c)
		}
		remove(t, d, fmt.Sprintf("cold-%d", n), fmt.Sprintf("clone-%d", n))
	}
	ratio(results, "clone from the pool (A), cold boot (B): until the agent has set it up", clone.median(), cold.median(), 1.0/15, cloneRounds)
}

// engineMetric returns a metric without labels from the cocoond that serves its metrics at engineMetrics.
func engineMetric(t *testing.T, name string) (value float64) {
	t.Helper()
	reply, err := http.Get("http://" + engineMetrics + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer reply.Body.Close()
	for s := bufio.NewScanner(reply.Body); s.Scan(); {
		if _, err := fmt.Sscanf(s.Text(), name+" %g", &value); err == nil {
			return value
		}
	}
	t.Fatalf("cocoond has no metric %s", name)
	return 0
}

func timed(f func()) time.Duration {
	began := time.Now()
	f()
	return time.Since(began)
}

func remove(t *testing.T, d *daemon, names ...string) {
	t.Helper()
	for _, name := range names {
		if err := d.Remove(t.Context(), name, true); err != nil {
			t.Fatal(err)
		}
	}
}

func ratio(results *table, what string, a, b time.Duration, goal float64, n int) {
	got := float64(a) / float64(b)
	r := row{what: what, a: ms(a), b: ms(b), figure: fmt.Sprintf("%.3f x", got), n: n}
	if goal > 0 {
		r.goal, r.missed = fmt.Sprintf("<= %.3g x", goal), got > goal
	}
	results.add(r)
}

// pauses measures how long a guest that writes to memory and disk is paused while it is saved.
func pauses(t *testing.T, d *daemon, results *table) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	busy := make(chan struct{})
	go func() {
		defer close(busy)
		_, _ = d.Exec(ctx, "busy", guest.Exec{Command: []string{
			"sh", "-c",
			"while :; do dd if=/dev/urandom of=/dev/shm/x bs=64k count=64; dd if=/dev/shm/x of=/x bs=64k conv=fsync; done 2>/dev/null",
		}}, guest.Streams{})
	}()
	var paused, took samples
	var method string
	for n := range saveRounds {
		began := time.Now()
		s := must(d.SaveSnapshot(t.Context(), "busy", vm.SaveSpec{Name: fmt.Sprintf("pause-%d", n)}))(t)
		took = append(took, time.Since(began))
		paused, method = append(paused, s.Pause), s.Method
		if err := d.RemoveSnapshot(t.Context(), s.Name); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	<-busy
	remove(t, d, "busy")
	results.add(row{what: "live save of a busy guest (" + method + "): pause (A), in all (B)", a: millis(paused.median()), b: ms(took.median()), n: saveRounds})
}

// pss is the memory of a VM's process, including its part of shared memory, in bytes.
func pss(t *testing.T, d *daemon, name string) int64 {
	t.Helper()
	r := must(d.Inspect(t.Context(), name))(t)
	f := must(os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", r.PID)))(t)
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if rest, ok := strings.CutPrefix(s.Text(), "Pss:"); ok {
			return int64(must(strconv.Atoi(strings.Fields(rest)[0]))(t)) << 10
		}
	}
	t.Fatal("no Pss in smaps_rollup")
	return 0
}

func mib(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

// storm clones n VMs at once and returns how much memory each of them uses, in bytes.
func storm(t *testing.T, d *daemon, ready *readiness, results *table, n int, one time.Duration) (each int64) {
	t.Helper()
	name := func(i int) string { return fmt.Sprintf("storm%d-%d", n, i) }
	began := time.Now()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			if _, err := d.Clone(t.Context(), vm.CloneSpec{Snapshot: "base", Name: name(i)}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	running := time.Since(began)
	for i := range n {
		ready.wait(t, name(i))
	}
	all := time.Since(began)
	results.add(row{
		what: fmt.Sprintf("%d clones at once: all run (A), all ready (B)", n), a: ms(running), b: ms(all),
		figure: fmt.Sprintf("%.0f ms each, %.2f x one", float64(all.Milliseconds())/float64(n), float64(all)/float64(n)/float64(one)), n: n,
	})
	for i := range n {
		each += pss(t, d, name(i)) / int64(n)
	}
	for i := range n {
		wg.Go(func() {
			if err := d.Remove(t.Context(), name(i), true); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	return each
}

// hibernation compares hibernating and waking a guest whose memory is full with copying the same number of bytes between files.
func hibernation(t *testing.T, d *daemon, ready *readiness, results *table) {
	t.Helper()
	s := spec("sleeper")
	s.Memory = 1 << 30
	must(d.Launch(t.Context(), s))(t)
	ready.wait(t, "sleeper")
	if code, err := d.Exec(t.Context(), "sleeper", guest.Exec{Command: []string{"dd", "if=/dev/urandom", "of=/dev/shm/x", "bs=1M", "count=480"}}, guest.Streams{}); err != nil || code != 0 {
		t.Fatal(code, err)
	}
	var down, up, copied samples
	var size int64
	for range 3 {
		down = append(down, timed(func() { must(d.Hibernate(t.Context(), "sleeper", ""))(t) }))
		r := must(d.Inspect(t.Context(), "sleeper"))(t)
		memory := filepath.Join(d.dir, "state", "snapshots", r.Snapshot, "memory-ranges")
		var st unix.Stat_t
		if err := unix.Stat(memory, &st); err != nil {
			t.Fatal(err)
		}
		size = st.Blocks * 512
		copied = append(copied, timed(func() {
			to := filepath.Join(d.dir, "copy")
			run(t, "cp", "--sparse=always", "--reflink=never", memory, to)
			run(t, "sync", to)
		}))
		run(t, "rm", filepath.Join(d.dir, "copy"))
		up = append(up, timed(func() {
			must(d.Wake(t.Context(), "sleeper"))(t)
			if code, err := d.Exec(t.Context(), "sleeper", guest.Exec{Command: []string{"true"}}, guest.Streams{}); err != nil || code != 0 {
				t.Fatal(code, err)
			}
		}))
	}
	perGiB := func(d time.Duration) time.Duration { return time.Duration(float64(d) / (float64(size) / (1 << 30))) }
	results.note("hibernated memory that is not zero: %s", mib(size))
	ratio(results, "hibernate per GiB of memory (A), cp and sync of it (B)", perGiB(down.median()), perGiB(copied.median()), 0, 3)
	ratio(results, "wake and first exec per GiB (A), cp and sync of it (B)", perGiB(up.median()), perGiB(copied.median()), 0, 3)
	remove(t, d, "sleeper")
}

// bareClone holds the plain QEMU commands that clone a template: no user, namespaces, cgroup, sandbox, journal.
type bareClone struct {
	*bare
	memory, state string
	told          guest.Resumed
}

func newBareClone(t *testing.T, d *daemon, ready *readiness) *bareClone {
	t.Helper()
	must(d.Clone(t.Context(), vm.CloneSpec{Snapshot: "base", Name: "model"}))(t)
	ready.wait(t, "model")
	model := must(d.Inspect(t.Context(), "model"))(t)
	cmdline := must(os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", model.PID)))(t)
	b := &bareClone{bare: &bare{dir: scratch(t)}}
	b.told = guest.Resumed{Entropy: make([]byte, 64), Hostname: "bare", Clone: &guest.CloneIdentity{MachineID: strings.Repeat("ab", 16)}}
	source := must(d.Inspect(t.Context(), "source"))(t)
	for i, n := range model.NICs {
		n.Tap, n.NetNS = "", ""
		b.told.NICs = append(b.told.NICs, n)
		b.told.Clone.MACs = append(b.told.Clone.MACs, source.NICs[i].MAC)
	}
	snapshot := filepath.Join(d.dir, "state", "snapshots", model.Snapshot)
	// The memory file is in memory, which is the fastest place. Ours is there too.
	shm := must(os.MkdirTemp("/dev/shm", "cocoon-bench-"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(shm) })
	b.memory, b.state = filepath.Join(shm, "memory"), filepath.Join(snapshot, "vmstate")
	run(t, "cp", "--sparse=always", filepath.Join(snapshot, "memory-ranges"), b.memory)
	files := b.files(model.Disks)
	var argv []string
	for _, a := range strings.Split(strings.TrimSuffix(string(cmdline), "\x00"), "\x00") {
		if strings.HasPrefix(a, "memory-backend-file,") {
			fields := strings.Split(a, ",")
			for i, f := range fields {
				if strings.HasPrefix(f, "mem-path=") {
					fields[i] = "mem-path=" + b.memory
				}
			}
			a = strings.Join(fields, ",")
		}
		argv = append(argv, a)
	}
	b.args = plain(t, argv, model.Boot, files, false)
	for i, disk := range b.disks { // the overlay from before the clone wrote to it would do as well
		b.disks[i] = filepath.Join(b.dir, fmt.Sprintf("template%d", i))
		run(t, "cp", "--sparse=always", "--reflink=auto", disk, b.disks[i])
	}
	must(d.Stop(t.Context(), "model", 0))(t) // its folder holds the backing files of the bare clones
	bareTapFor(t)
	return b
}

// once runs the commands and returns the time until the agent knows the identity of the guest.
func (b *bareClone) once(t *testing.T, n int) time.Duration {
	t.Helper()
	r := b.run(t, n)
	defer r.stop()
	dir, began := r.dir, r.began
	socket := filepath.Join(dir, "qmp.sock")
	until(t, 10*time.Second, "the bare QEMU listens", func() bool { _, err := os.Stat(socket); return err == nil })
	q := dialQMP(t, socket)
	defer q.Close()
	q.do(t, "qmp_capabilities", nil)
	q.do(t, "migrate-set-capabilities", map[string]any{"capabilities": []any{map[string]any{"capability": "events", "state": true}}})
	q.do(t, "migrate-incoming", map[string]any{"uri": "exec:cat " + b.state})
	q.migrated(t)
	q.do(t, "cont", nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	a, err := agent.Connector{}.Connect(ctx, func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(dir, "agent.sock"))
	})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	told := b.told
	told.Now = time.Now()
	if _, err := a.(guest.Resumer).Resumed(ctx, told); err != nil {
		t.Fatal(err)
	}
	return time.Since(began)
}

// qmpConn implements just enough of QMP for a script.
type qmpConn struct {
	net.Conn
	dec       *json.Decoder
	migration string // the last reported state
}

type qmpMessage struct {
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Desc string `json:"desc"`
	} `json:"error"`
	Event string `json:"event"`
	Data  struct {
		Status string `json:"status"`
	} `json:"data"`
}

func dialQMP(t *testing.T, socket string) *qmpConn {
	t.Helper()
	var conn net.Conn
	until(t, 10*time.Second, "QMP answers", func() bool {
		var err error
		conn, err = net.Dial("unix", socket)
		return err == nil
	})
	q := &qmpConn{Conn: conn, dec: json.NewDecoder(conn)}
	var greeting map[string]any
	if err := q.dec.Decode(&greeting); err != nil {
		t.Fatal(err)
	}
	return q
}

func (q *qmpConn) do(t *testing.T, command string, arguments map[string]any) {
	t.Helper()
	m := map[string]any{"execute": command}
	if arguments != nil {
		m["arguments"] = arguments
	}
	if err := json.NewEncoder(q.Conn).Encode(m); err != nil {
		t.Fatal(err)
	}
	for {
		r := q.next(t)
		switch {
		case r.Error != nil:
			t.Fatalf("%s: %s", command, r.Error.Desc)
		case r.Return != nil:
			return
		}
	}
}

// migrated waits until the migration reports that state.
func (q *qmpConn) migrated(t *testing.T) {
	t.Helper()
	for q.migration != "completed" {
		if q.migration == "failed" {
			t.Fatal("the bare QEMU did not take the state")
		}
		q.next(t)
	}
}

func (q *qmpConn) next(t *testing.T) qmpMessage {
	t.Helper()
	var m qmpMessage
	if err := q.dec.Decode(&m); err != nil {
		t.Fatal(err)
	}
	if m.Event == "MIGRATION" {
		q.migration = m.Data.Status
	}
	return m
}
