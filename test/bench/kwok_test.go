//go:build bench

package bench

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/port"
)

const (
	manyPods   = 1000
	recordDisk = "records/disk:latest"
	kwokGoal   = 0.8
)

// manyOnOne creates and deletes a thousand pods on a virtual node whose VMs are only records, and on a node simulated by KWOK,
// with the same control plane. Our node writes a journal, makes a tap and an address for each VM, and probes whether it is
// reachable; KWOK's patches a status. A third node is in between: ours, with VMs that have no disk, no tap and no lease.
func manyOnOne(t *testing.T, results *table) {
	k := kubetest.Up(t)
	config := *k.Config
	config.QPS = -1
	c := &cluster{dir: k.Dir, kube: must(kubernetes.NewForConfig(&config))(t)}
	kubeconfig := filepath.Join(k.Dir, "kubeconfig")
	c.awaitAccount(t)

	engine, node := recordNode(t, kubeconfig)
	c.await(t, "ours")
	plane := controlPlane(t, k.Dir)
	ours := c.crowd(t, "ours", recordDisk, node.pid, engine.pid, plane)
	t.Logf("ours: %.0f pods/s up, %.0f pods/s down", ours.up, ours.down)
	if err := node.kill(); err != nil { // its remaining writes must not slow down the others
		t.Fatal(err)
	}
	inMemory := fakenode.Start(t, fakenode.Options{Name: "memory", Kubeconfig: kubeconfig})
	c.await(t, "memory")
	memory := c.crowd(t, "memory", fakenode.Image, os.Getpid(), plane)
	inMemory.Stop(t)
	kwok := c.kwok(t, kubeconfig)
	theirs := c.crowd(t, "kwok", recordDisk, kwok.pid, plane)

	ratio := ours.up / theirs.up
	results.add(row{
		what: "1,000 pods to Ready on one node: ours (A), KWOK (B)", a: fmt.Sprintf("%.0f /s", ours.up), b: fmt.Sprintf("%.0f /s", theirs.up),
		figure: fmt.Sprintf("%.2f x", ratio), goal: fmt.Sprintf(">= %.1f x", kwokGoal), n: manyPods, missed: ratio < kwokGoal,
	})
	ratio = memory.up / theirs.up
	results.add(row{
		what: "the same without disk, tap and lease (A), KWOK (B)", a: fmt.Sprintf("%.0f /s", memory.up), b: fmt.Sprintf("%.0f /s", theirs.up),
		figure: fmt.Sprintf("%.2f x", ratio), goal: fmt.Sprintf(">= %.1f x", kwokGoal), n: manyPods, missed: ratio < kwokGoal,
	})
	results.add(row{
		what: "the same deleted until the API server has none", a: fmt.Sprintf("%.0f /s", ours.down), b: fmt.Sprintf("%.0f /s", theirs.down),
		figure: fmt.Sprintf("%.2f x", ours.down/theirs.down), n: manyPods,
	})
	results.add(row{
		what: "RSS with 1,000 pods: vk-cocoon (A), KWOK (B)", a: fmt.Sprintf("%d MiB", ours.rss[0]>>10), b: fmt.Sprintf("%d MiB", theirs.rss[0]>>10),
		figure: fmt.Sprintf("%.2f x", float64(ours.rss[0])/float64(theirs.rss[0])), n: manyPods,
	})
	results.add(row{
		what: "API writes of the node in the life of each: ours (A), KWOK (B)", a: fmt.Sprintf("%.2f", ours.writes), b: fmt.Sprintf("%.2f", theirs.writes),
		figure: fmt.Sprintf("%.2f x", ours.writes/theirs.writes), goal: "<= 5", n: manyPods, missed: ours.writes > 5,
	})
	results.note("RSS of cocoond with 1,000 VMs that are records: %d MiB", ours.rss[1]>>10)
	results.note("\nCPU time for %d pods up and down, in seconds:", manyPods)
	for _, of := range []struct {
		what  string
		spent spent
	}{
		{"vk-cocoon", ours.spent[0]},
		{"cocoond", ours.spent[1]},
		{"control plane with ours", ours.spent[2]},
		{"the node without disks and taps, and this test", memory.spent[0]},
		{"control plane with that", memory.spent[1]},
		{"KWOK", theirs.spent[0]},
		{"control plane with KWOK", theirs.spent[1]},
	} {
		results.note("  %5.1f %5.1f  %s", of.spent.up.Seconds(), of.spent.down.Seconds(), of.what)
	}
	results.note("\nRequests to the API server for each pod, up and down, with those of this test: ours, KWOK")
	for r := range theirs.asked {
		ours.asked[r] += 0
	}
	for _, r := range slices.SortedFunc(maps.Keys(ours.asked), func(a, b request) int { return strings.Compare(a.resource+a.verb, b.resource+b.verb) }) {
		if a, b := float64(ours.asked[r])/manyPods, float64(theirs.asked[r])/manyPods; max(a, b) >= 0.01 {
			results.note("  %5.2f %5.2f  %-7s %s", a, b, r.verb, r.resource)
		}
	}
}

// recordNode starts a cocoond whose VMs are only records, and a vk-cocoon beside it. The node cannot open an ICMP socket, so an
// address counts as Ready: no guest would answer there.
func recordNode(t *testing.T, kubeconfig string) (engine *daemon, node *program) {
	t.Helper()
	engine = recordEngine(t)
	return engine, virtualNode(t, kubeconfig, engine, "setpriv", "--bounding-set=-net_raw")
}

// recordEngine starts a cocoond whose VMs are only records with a disk, a tap and an address.
func recordEngine(t *testing.T, config ...string) *daemon {
	t.Helper()
	engine := start(t, strings.Join(append(config, "driver: fake", "network: {instance: many, bridge: ccmany, subnet: 10.201.0.0/20}", "log: {level: warn}", ""), "\n"))
	disk := filepath.Join(t.TempDir(), "disk.qcow2")
	run(t, "qemu-img", "create", "-q", "-f", "qcow2", disk, "1M")
	file := must(os.Open(disk))(t)
	defer file.Close()
	must(engine.ImportImage(t.Context(), recordDisk, file, nil))(t)
	return engine
}

// virtualNode starts the vk-cocoon "ours" beside engine, through another program if by is set.
func virtualNode(t *testing.T, kubeconfig string, engine *daemon, by ...string) *program {
	t.Helper()
	_, kubelet, err := net.SplitHostPort(must(port.Free())(t))
	if err != nil {
		t.Fatal(err)
	}
	return background(t, "vk-cocoon", append(os.Environ(),
		"KUBECONFIG="+kubeconfig, "VK_NODE_NAME=ours", "VK_NODE_IP=127.0.0.1", "VK_BIND_ADDRESS=127.0.0.1", "VK_KUBELET_PORT="+kubelet,
		"VK_METRICS_ADDR=", "VK_NODE_PODS=2000", "VK_NODE_CPU=10k", "VK_NODE_MEM=100Ti", "VK_NODE_STORAGE=100Ti", "VK_LOG_LEVEL=warn",
		"COCOON_SOCKET="+engine.socket, "COCOON_ROOT_DIR="+engine.dir, "VK_LEASES_PATH="+filepath.Join(engine.dir, "state", "net", "leases.json"),
	), append(by, bin("vk-cocoon"))...)
}

// kwok creates a node that KWOK simulates.
func (c *cluster) kwok(t *testing.T, kubeconfig string) *program {
	t.Helper()
	must(c.kube.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "kwok"}}, metav1.CreateOptions{}))(t)
	p := background(t, "kwok", os.Environ(), bin("kwok"), "--config", bin("kwok-stages.yaml"), "--kubeconfig", kubeconfig, "--manage-single-node=kwok", "--cidr=10.202.0.0/16", "--node-ip=127.0.0.2")
	c.await(t, "kwok")
	return p
}

func (c *cluster) await(t *testing.T, node string) {
	t.Helper()
	until(t, time.Minute, node+" is Ready", func() bool {
		n, err := c.kube.CoreV1().Nodes().Get(t.Context(), node, metav1.GetOptions{})
		return err == nil && nodeReady(n)
	})
}

func (c *cluster) awaitAccount(t *testing.T) {
	t.Helper()
	until(t, time.Minute, "the namespace has its account", func() bool {
		_, err := c.kube.CoreV1().ServiceAccounts(namespace).Get(t.Context(), "default", metav1.GetOptions{})
		return err == nil
	})
}

// crowding is the result of a crowd of pods.
type crowding struct {
	up, down float64         // pods per second
	writes   float64         // of the node, per pod
	asked    map[request]int // requests to the API server, from all clients
	rss      []int           // KiB of each process while all pods exist
	spent    []spent         // by each process
}

// spent is CPU time.
type spent struct{ up, down time.Duration }

// controlPlane is the process that is the control plane of the instance in dir.
func controlPlane(t *testing.T, dir string) int {
	t.Helper()
	for _, path := range must(filepath.Glob("/proc/[0-9]*/cmdline"))(t) {
		argv, _ := os.ReadFile(path) // the process may have ended
		if strings.Contains(string(argv), "control-plane\x00") && strings.Contains(string(argv), dir+"/") {
			return must(strconv.Atoi(filepath.Base(filepath.Dir(path))))(t)
		}
	}
	t.Fatalf("the control plane of %s is not there", dir)
	return 0
}

// crowd creates many pods on a node, and deletes them.
func (c *cluster) crowd(t *testing.T, node, image string, pids ...int) crowding {
	t.Helper()
	api, seen := c.kube.CoreV1().Pods(namespace), c.follow(t, node)
	var out crowding
	used := func() (all []time.Duration) {
		for _, pid := range pids {
			all = append(all, cpuOf(t, pid))
		}
		return all
	}
	asked, before := c.asked(t), c.podWrites(t)
	atFirst := used()
	began := time.Now()
	at := c.each(t, seen, node, func(ctx context.Context, name string) error {
		_, err := api.Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
			NodeName: node, AutomountServiceAccountToken: new(false), TerminationGracePeriodSeconds: new(int64(5)),
			Containers: []corev1.Container{{Name: "main", Image: image, ImagePullPolicy: corev1.PullNever}},
		}}, metav1.CreateOptions{})
		return err
	}, func(e podEvent) bool { return !e.gone && podReady(e.pod) })
	out.up = manyPods / at.Sub(began).Seconds()
	between := used()
	for _, pid := range pids {
		out.rss = append(out.rss, rss(t, pid))
	}
	began = time.Now()
	at = c.each(t, seen, node, func(ctx context.Context, name string) error { return api.Delete(ctx, name, metav1.DeleteOptions{}) },
		func(e podEvent) bool { return e.gone })
	out.down = manyPods / at.Sub(began).Seconds()
	for i, end := range used() {
		out.spent = append(out.spent, spent{up: between[i] - atFirst[i], down: end - between[i]})
	}
	out.asked = c.asked(t)
	for r, n := range asked {
		out.asked[r] -= n
	}
	out.writes = float64(c.podWrites(t)-before)/manyPods - 2 // minus create and delete by this test
	return out
}

// podWrites counts the write requests to the API server for pods and Events.
func (c *cluster) podWrites(t *testing.T) (n int) {
	t.Helper()
	for r, of := range c.requests(t) {
		if strings.HasPrefix(r.resource, "pods") || r.resource == "events" {
			n += of
		}
	}
	return n
}

// podEvent is a change of a pod.
type podEvent struct {
	pod  *corev1.Pod
	gone bool
}

// follow reports the changes of the pods of a node. Unlike a bare watch it reconnects when the API server ends it, which it does
// to slow readers.
func (c *cluster) follow(t *testing.T, node string) <-chan podEvent {
	t.Helper()
	news := make(chan podEvent, 16*manyPods)
	factory := informers.NewSharedInformerFactoryWithOptions(c.kube, 0, informers.WithNamespace(namespace), informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
	}))
	tell := func(o any, gone bool) {
		if last, ok := o.(cache.DeletedFinalStateUnknown); ok {
			o = last.Obj
		}
		if pod, ok := o.(*corev1.Pod); ok {
			news <- podEvent{pod, gone}
		}
	}
	must(factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { tell(o, false) }, UpdateFunc: func(_, o any) { tell(o, false) }, DeleteFunc: func(o any) { tell(o, true) },
	}))(t)
	ctx, cancel := context.WithCancel(context.Background())
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	t.Cleanup(func() { cancel(); factory.Shutdown() })
	return news
}

// each calls do for each pod, several at a time, and returns when done was seen for the last one.
func (c *cluster) each(t *testing.T, seen <-chan podEvent, prefix string, do func(context.Context, string) error, done func(podEvent) bool) time.Time {
	t.Helper()
	var next atomic.Int64
	var all sync.WaitGroup
	defer all.Wait()
	for range clients {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < manyPods && !t.Failed(); i = int(next.Add(1)) - 1 {
				if err := do(t.Context(), fmt.Sprintf("%s-%d", prefix, i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	finished := map[string]bool{}
	for len(finished) < manyPods {
		select {
		case e := <-seen:
			if e.pod.Status.Phase == corev1.PodFailed && e.pod.DeletionTimestamp == nil {
				t.Fatalf("%s failed: %s %s", e.pod.Name, e.pod.Status.Reason, e.pod.Status.Message)
			}
			if done(e) {
				finished[e.pod.Name] = true
			}
		case <-time.After(time.Minute):
			t.Fatalf("of %s only %d are done", prefix, len(finished))
		}
	}
	return time.Now()
}

func podReady(p *corev1.Pod) bool {
	for _, cond := range p.Status.Conditions {
		if cond.Type == corev1.PodReady {
			return cond.Status == corev1.ConditionTrue
		}
	}
	return false
}
