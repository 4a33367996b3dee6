//go:build cri

package cocoond_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/containers"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// The workloads of a churn: most are left alone, and the others change all the time.
const (
	churnSteady  = 34 // containers
	churnRestful = 1  // micro-VMs
	churnBusy    = 14 // containers
	churnRestive = 1  // micro-VMs
)

// churn is an appliance whose daemon is killed at random.
type churn struct {
	*operator
	d      *containerdtest.Daemon
	dice   *rand.Rand
	port   uint32            // the first of those of the busy containers
	steady map[string]string // processes of the workloads that are left alone, by name
	vms    map[string]bool   // ids of all VMs that were seen
	calls  map[codes.Code]int
}

// TestApplianceIsKilled kills the daemon at random moments while 50 workloads run and some of them change: those that are left alone
// keep their processes, no VM runs twice, the others become what they shall be, and nothing is left of those that are deleted. The
// environment sets the number of kills (make churn).
func TestApplianceIsKilled(t *testing.T) {
	kills := 8
	if text := os.Getenv("COCOON_TEST_KILLS"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatal(err)
		}
		kills = n
	}
	d := containerdtest.Start(t)
	_, o := newAppliance(t, "appliance: {containerd: "+d.Socket()+", listen: ADDR}")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	c := &churn{operator: o, d: d, dice: rand.New(rand.NewPCG(1, seed)), port: parsePort(t, freePort(t)), steady: map[string]string{}, vms: map[string]bool{}, calls: map[codes.Code]int{}}
	o.push()
	before := append(c.things(), "mount "+o.n.dir+"/run/mounted") // of all that is mounted for containers, while the machine runs
	for i := range 4 {
		if _, err := o.volumes.Create(t.Context(), &capsulev1.VolumeCreateRequest{Name: fmt.Sprint("churn-", i), SizeMib: 32}); err != nil {
			t.Fatal(err)
		}
	}
	for _, w := range c.all() {
		o.apply(w)
	}
	c.settle()
	for name := range c.steady {
		c.steady[name] = c.processes(name)
	}
	began := time.Now()
	for k := range kills {
		c.kill()
		if (k+1)%25 == 0 || k+1 == kills {
			c.settle()
			t.Logf("%d kills in %s, calls %v", k+1, time.Since(began).Round(time.Second), c.calls)
		}
		if t.Failed() {
			break
		}
	}
	names := slices.Sorted(maps.Keys(c.workloads()))
	o.delete(names...)
	for i := range 4 {
		if _, err := o.volumes.Delete(t.Context(), &capsulev1.VolumeDeleteRequest{Name: fmt.Sprint("churn-", i)}); err != nil {
			t.Error(err)
		}
	}
	var left []string
	defer func() {
		if t.Failed() {
			t.Logf("left: %s", strings.Join(left, "\n"))
		}
	}()
	o.n.until("nothing is left", func() bool {
		left = slices.DeleteFunc(c.things(), func(s string) bool { return slices.Contains(before, s) })
		return len(left) == 0
	})
}

// workloads returns all workloads by name, as they are at the beginning.
func (c *churn) workloads() map[string]*capsulev1.Workload {
	all := map[string]*capsulev1.Workload{}
	for _, w := range c.all() {
		all[w.GetName()] = w
	}
	return all
}

// all returns all workloads, and notes which are left alone.
func (c *churn) all() (all []*capsulev1.Workload) {
	sleep := []string{"sleep", "1000000"}
	container := func(name string) *capsulev1.Workload {
		return ofContainer(name, &capsulev1.ContainerSpec{Command: sleep})
	}
	for i := range churnSteady {
		w := container(fmt.Sprint("churn-steady-", i))
		if i < 2 {
			w.Container.Mounts = []*capsulev1.VolumeMount{{VolumeName: fmt.Sprint("churn-", i), MountPath: "/data"}}
		}
		all = append(all, w)
	}
	for i := range churnRestful {
		all = append(all, microVM(fmt.Sprint("churn-steady-vm-", i), &capsulev1.MicroVMSpec{Command: sleep, MemoryMib: 128}))
	}
	for _, w := range all {
		c.steady[w.GetName()] += ""
	}
	for i := range churnBusy {
		w := container(fmt.Sprint("churn-busy-", i))
		switch {
		case i < 2:
			w.Container.Mounts = []*capsulev1.VolumeMount{{VolumeName: fmt.Sprint("churn-", 2+i), MountPath: "/data"}}
		case i < 6:
			w.Container.Ports = []*capsulev1.PortMapping{{ContainerPort: 80, HostPort: c.port + uint32(i)}}
		}
		all = append(all, w)
	}
	for i := range churnRestive {
		all = append(all, microVM(fmt.Sprint("churn-busy-vm-", i), &capsulev1.MicroVMSpec{Command: sleep, MemoryMib: 128}))
	}
	for _, w := range all {
		w.StopGraceSeconds = 1
	}
	return all
}

// kill starts the daemon if it is killed, changes workloads, and kills the daemon at a random moment, perhaps before it listens.
func (c *churn) kill() {
	c.n.begin()
	ctx, cancel := context.WithCancel(c.n.t.Context())
	var calls sync.WaitGroup
	calls.Go(func() {
		for ctx.Err() == nil {
			c.change(ctx)
		}
	})
	after := time.Duration(c.dice.Int64N(int64([]time.Duration{time.Second, 4 * time.Second}[c.dice.IntN(2)])))
	<-time.After(after)
	_ = c.n.process.Process.Kill()
	_ = c.n.process.Wait()
	cancel()
	calls.Wait()
}

// change makes one call about a busy workload. It may fail because the daemon is gone, or in the state of the workload.
func (c *churn) change(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	name := fmt.Sprint("churn-busy-", rand.IntN(churnBusy))
	if rand.IntN(10) == 0 {
		name = fmt.Sprint("churn-busy-vm-", rand.IntN(churnRestive))
	}
	var err error
	switch rand.IntN(6) {
	case 0:
		_, err = c.operator.workloads.Stop(ctx, &capsulev1.WorkloadStopRequest{Name: name})
	case 1:
		_, err = c.operator.workloads.Start(ctx, &capsulev1.WorkloadStartRequest{Name: name})
	case 2:
		_, err = c.operator.workloads.Restart(ctx, &capsulev1.WorkloadRestartRequest{Name: name})
	case 3:
		_, err = c.operator.workloads.Delete(ctx, &capsulev1.WorkloadDeleteRequest{Name: name})
	default:
		w := c.workloads()[name]
		env := map[string]string{"N": strconv.Itoa(rand.IntN(3))}
		if w.GetContainer() != nil {
			w.Container.Env = env
		} else {
			w.MicroVm.Env = env
		}
		_, err = c.operator.workloads.Apply(ctx, &capsulev1.WorkloadApplyRequest{Workload: w})
	}
	code := status.Code(err)
	switch code {
	case codes.OK, codes.Unavailable, codes.Canceled, codes.DeadlineExceeded, codes.NotFound, codes.FailedPrecondition, codes.Aborted:
	default:
		c.n.t.Errorf("%s: %v", name, err)
	}
	c.calls[code]++
	if err != nil { // not as fast as possible while nobody listens
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// settle applies and starts all workloads, and waits until they run. Then it checks what the machine has of them.
func (c *churn) settle() {
	t := c.n.t
	t.Helper()
	c.n.begin()
	all := c.workloads()
	c.n.until("all workloads are as they shall be", func() bool {
		for name, w := range all { // one that is being deleted comes later
			if _, err := c.operator.workloads.Apply(t.Context(), &capsulev1.WorkloadApplyRequest{Workload: w}); err != nil {
				return false
			}
			if _, err := c.operator.workloads.Start(t.Context(), &capsulev1.WorkloadStartRequest{Name: name}); err != nil {
				return false
			}
		}
		return true
	})
	waits := ""
	defer func() {
		if t.Failed() {
			t.Log(waits)
		}
	}()
	c.n.until("all workloads run", func() bool {
		list, err := c.operator.workloads.List(t.Context(), &capsulev1.WorkloadListRequest{})
		if err != nil {
			waits = err.Error()
			return false
		}
		for _, w := range list.GetWorkloads() {
			if s := w.GetStatus(); s.GetPhase() != capsulev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING || s.GetObservedGeneration() != w.GetGeneration() {
				waits = fmt.Sprint(w.GetName(), ": ", s)
				return false
			}
		}
		return len(list.GetWorkloads()) == len(all)
	})
	for name, was := range c.steady {
		if now := c.processes(name); was != "" && now != was {
			t.Errorf("%s has the processes %q, and had %q", name, now, was)
		}
		if n := c.get(name).GetStatus().GetRestartCount(); n != 0 {
			t.Errorf("%s has restarted %d times", name, n)
		}
	}
	for name := range all {
		if n := len(strings.Fields(c.processes(name))); n != 1 {
			t.Errorf("%s has %d processes: %s", name, n, c.processes(name))
		}
	}
	c.n.until("nobody is a zombie", func() bool { return len(c.zombies()) == 0 })
}

// processes returns the main processes of a workload, each with its time of start: what runs in its container, or its hypervisors.
func (c *churn) processes(name string) string {
	id := string(containers.ID(name))
	if strings.Contains(name, "-vm-") {
		r, err := c.n.Inspect(c.n.t.Context(), name)
		if err != nil {
			return err.Error()
		}
		id = string(r.ID)
		c.vms[id] = true
	}
	var all []string
	for _, p := range pids() {
		group, _ := os.ReadFile(filepath.Join(p, "cgroup"))
		exe, _ := os.Readlink(filepath.Join(p, "exe"))
		if !bytes.Contains(group, []byte(id)) || strings.Contains(name, "-vm-") && !strings.HasPrefix(filepath.Base(exe), "qemu-system") {
			continue
		}
		if f := stat(p); len(f) > 20 {
			all = append(all, filepath.Base(p)+"@"+f[19])
		}
	}
	return strings.Join(all, " ")
}

// zombies returns the processes that have ended, and whose parent is one of ours.
func (c *churn) zombies() (all []string) {
	for _, p := range pids() {
		if f := stat(p); len(f) > 20 && f[0] == "Z" && c.ours("/proc/"+f[1]) {
			all = append(all, p)
		}
	}
	return all
}

// ours reports whether the test has started a process: the daemon, or a process with a path of the test in its arguments.
func (c *churn) ours(p string) bool {
	args, _ := os.ReadFile(filepath.Join(p, "cmdline"))
	return bytes.Contains(args, []byte(c.n.dir+"/")) || bytes.Contains(args, []byte(c.d.State+"/"))
}

func pids() []string {
	all, _ := filepath.Glob("/proc/[0-9]*")
	return all
}

// stat returns the fields of a process from its state on; proc(5).
func stat(p string) []string {
	b, _ := os.ReadFile(filepath.Join(p, "stat"))
	return strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
}

// things returns what there is of workloads on the machine.
func (c *churn) things() (all []string) {
	add := func(what string, names ...string) {
		for _, n := range names {
			all = append(all, what+" "+n)
		}
	}
	links, _ := os.ReadDir("/sys/class/net")
	for _, l := range links {
		add("link", l.Name())
	}
	rules, err := exec.Command(need.Tool(c.n.t, "nft"), "-s", "list", "ruleset").Output()
	if err != nil {
		c.n.t.Error(err)
	}
	for line := range strings.Lines(string(rules)) {
		add("rule", strings.TrimSpace(line))
	}
	add("mount", proc.MountsBelow(c.n.dir)...)
	add("mount", proc.MountsBelow(c.d.State)...)
	for _, pattern := range []string{
		c.n.dir + "/run/netns/*", c.n.dir + "/run/mounted/*", c.n.dir + "/run/containers/exec/*", c.n.dir + "/state/nics/*", c.n.dir + "/state/containers/*",
		c.n.dir + "/state/logs/*", c.n.dir + "/state/vms/*", c.n.dir + "/state/volumes/volumes/*", c.d.State + "/state/io.containerd.runtime.v2.task/capsule/*",
	} {
		found, _ := filepath.Glob(pattern)
		add("file", found...)
	}
	backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range backing {
		if b, _ := os.ReadFile(f); bytes.HasPrefix(b, []byte(c.n.dir+"/")) {
			add("loop device of", strings.TrimSpace(string(b)))
		}
	}
	ids := slices.Collect(maps.Keys(c.vms))
	for name := range c.workloads() {
		ids = append(ids, string(containers.ID(name)))
	}
	for _, id := range ids {
		for _, depth := range []string{"*/*", "*/*/*", "*/*/*/*"} {
			found, _ := filepath.Glob("/sys/fs/cgroup/" + depth + id + "*")
			add("cgroup", found...)
		}
	}
	for _, p := range pids() {
		args, _ := os.ReadFile(filepath.Join(p, "cmdline"))
		words := strings.Split(string(args), "\x00")
		if base := filepath.Base(words[0]); base != "cocoond" && base != "containerd" && c.ours(p) {
			add("process", filepath.Base(p)+" "+strings.Join(words, " "))
		}
	}
	add("zombie", c.zombies()...)
	for what, args := range map[string][]string{"container": {"containers", "ls", "-q"}, "task": {"tasks", "ls", "-q"}, "lease": {"leases", "ls", "-q"}, "snapshot": {"snapshots", "ls"}} {
		out, err := exec.Command(c.d.Program("ctr"), append([]string{"--address", c.d.Socket(), "--namespace", "capsule"}, args...)...).Output()
		if err != nil {
			add("containerd", err.Error())
		}
		for line := range strings.Lines(string(out)) {
			if what != "snapshot" || strings.HasSuffix(strings.TrimSpace(line), "Active") {
				add(what, strings.TrimSpace(line))
			}
		}
	}
	return all
}
