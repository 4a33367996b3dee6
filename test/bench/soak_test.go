//go:build bench

package bench

import (
	"context"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/leak"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// TestSoak creates and deletes pods while the processes that manage them are killed again and again. It stops the API server
// for minutes, and then looks for anything left over. `make soak` runs it.
func TestSoak(t *testing.T) {
	for _, s := range []soak{
		{name: "records", pods: 2000, wide: 40, image: recordDisk, every: 3 * time.Second, grace: 1, node: recordNode},
		{name: "qemu", pods: 50, wide: 4, image: image, every: 15 * time.Second, guests: true, node: guestNode},
	} {
		t.Run(s.name, s.run)
	}
}

// soak is one kind of soak test.
type soak struct {
	name   string
	pods   int // in total
	wide   int // at a time
	image  string
	every  time.Duration // a process is killed about this often
	guests bool          // the VMs are processes, which are killed too
	grace  int           // least grace of a pod, in seconds; a node that is down may miss the deletion of a pod with a grace of 0
	node   func(t *testing.T, kubeconfig string) (*daemon, *program)
}

// guestNode is a node whose VMs are real. It removes those whose pods were deleted without grace while it was down.
func guestNode(t *testing.T, kubeconfig string) (*daemon, *program) {
	t.Helper()
	engine := start(t, "network: {instance: soak, bridge: ccsoak}\nqemu: {cgroup: cocoon-soak, uidBase: 800000}\nlog: {level: warn}\n")
	return engine, virtualNode(t, kubeconfig, engine, "env", "VK_ORPHAN_POLICY=destroy")
}

// remains is what exists when there is no pod.
type remains struct {
	descriptors, goroutines [2]int // of cocoond and vk-cocoon
	files                   int    // in cocoond's folders
	machine                 []string
}

func (s soak) run(t *testing.T) {
	k := kubetest.Up(t)
	config := *k.Config
	config.QPS = -1
	c := &cluster{dir: k.Dir, kube: must(kubernetes.NewForConfig(&config))(t)}
	c.awaitAccount(t)
	engine, node := s.node(t, filepath.Join(k.Dir, "kubeconfig"))
	c.await(t, "ours")
	var kills [3]int

	s.lives(t, c, "warm", s.wide)
	before := s.settle(t, engine, node)
	ctx, cancel := context.WithCancel(t.Context())
	killed := make(chan struct{})
	go func() {
		defer close(killed)
		kills = s.kill(ctx, t, engine, node)
	}()
	volumes := make(chan moves, 1)
	if s.guests {
		go func() { volumes <- moveVolumes(ctx, t, engine) }()
	}
	began := time.Now()
	s.lives(t, c, "soak", s.pods)
	took := time.Since(began)
	cancel()
	<-killed
	if s.guests {
		away(t, k, c, engine)
		w := <-volumes
		t.Logf("%s: volumes attached %d and detached %d times", s.name, w.attached, w.detached)
		if w.attached == 0 || w.detached == 0 {
			t.Errorf("no volume came or went; the last failure: %v", w.failed)
		}
	}
	s.lives(t, c, "calm", s.wide)
	after := s.settle(t, engine, node)

	t.Logf("%s: %d pods in %s; killed cocoond %d, vk-cocoon %d, QEMU %d times", s.name, s.pods, took.Round(time.Second), kills[0], kills[1], kills[2])
	for i, who := range []string{"cocoond", "vk-cocoon"} {
		t.Logf("%s: %d descriptors, then %d; %d goroutines, then %d", who, before.descriptors[i], after.descriptors[i], before.goroutines[i], after.goroutines[i])
		// The number of connections varies; a leak would be as large as the number of pods, or of kills.
		if after.descriptors[i] > before.descriptors[i]+8 || after.goroutines[i] > before.goroutines[i]+20 {
			t.Errorf("%s holds more than before", who)
		}
	}
	if after.files > before.files+5 { // the number of the journal's own files varies
		t.Errorf("%d files, before %d", after.files, before.files)
	}
	for _, l := range leak.New(before.machine, after.machine) {
		t.Errorf("left behind: %s", l)
	}
}

// lives creates and deletes n pods, several at a time. A pod whose processes are killed must still start.
func (s soak) lives(t *testing.T, c *cluster, prefix string, n int) {
	t.Helper()
	api := c.kube.CoreV1().Pods(namespace)
	var next atomic.Int64
	var all sync.WaitGroup
	for range s.wide {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && !t.Failed(); i = int(next.Add(1)) - 1 {
				name := fmt.Sprintf("%s-%d", prefix, i)
				if _, err := api.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
					NodeName: "ours", TerminationGracePeriodSeconds: new(int64(s.grace + rand.IntN(4))),
					Containers: []corev1.Container{{Name: "main", Image: s.image, ImagePullPolicy: corev1.PullNever}},
				}}, metav1.CreateOptions{}); err != nil {
					t.Error(err)
					return
				}
				if rand.IntN(4) > 0 { // the others are deleted while they start
					reached(t, name+" is Ready", func() bool {
						pod, err := api.Get(t.Context(), name, metav1.GetOptions{})
						return err == nil && podReady(pod)
					})
				}
				if err := api.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
					t.Error(err)
				}
				reached(t, name+" is gone", func() bool {
					list, err := api.List(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + name})
					return err == nil && len(list.Items) == 0
				})
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// moves counts what became of volumes.
type moves struct {
	attached, detached int
	failed             error // the last one
}

// moveVolumes attaches volumes to VMs that run, and detaches them, until ctx ends. The processes are killed meanwhile, so each act may
// fail. Then every volume must be free again, when its VM is gone, and it is removed.
func moveVolumes(ctx context.Context, t *testing.T, engine *daemon) (done moves) {
	names := []string{"soak-a", "soak-b"}
	ctx = vm.OnBehalf(ctx, vm.Owner{Namespace: namespace}) // only that of the pods may give its volumes to them
	always := context.WithoutCancel(ctx)
	for _, name := range names {
		reached(t, name+" is made", func() bool {
			_, err := engine.CreateVolume(always, volume.Spec{Name: name, Size: 32 << 20})
			return err == nil || errdefs.IsAlreadyExists(err)
		})
	}
	for ctx.Err() == nil {
		name := names[rand.IntN(len(names))]
		all, _ := engine.List(ctx)
		all = slices.DeleteFunc(all, func(r vm.Record) bool { return !r.AgentReady })
		if len(all) > 0 {
			to := string(all[rand.IntN(len(all))].ID)
			_, err := engine.AttachVolume(ctx, to, vm.VolumeUse{Ref: name}, "/soak")
			if err == nil {
				done.attached++
				if _, err = engine.DetachVolume(ctx, to, name); err == nil {
					done.detached++
				}
			}
			if err != nil && ctx.Err() == nil {
				done.failed = err
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(rand.N(time.Second)):
		}
	}
	for _, name := range names {
		reached(t, name+" is free and gone", func() bool {
			err := engine.RemoveVolume(always, name)
			return err == nil || errdefs.IsNotFound(err)
		})
	}
	return done
}

// reached is until for the goroutines of a test.
func reached(t *testing.T, what string, ok func() bool) {
	deadline := time.Now().Add(3 * time.Minute)
	for !ok() {
		if time.Now().After(deadline) {
			t.Errorf("%s: not within three minutes", what)
			return
		}
		<-time.After(100 * time.Millisecond)
	}
}

// kill kills one of the processes, again and again, and restarts our own. It returns how often cocoond, vk-cocoon and
// hypervisors were killed.
func (s soak) kill(ctx context.Context, t *testing.T, engine *daemon, node *program) (n [3]int) {
	victims := []func() error{
		func() error { n[0]++; return again(engine.program) },
		func() error { n[1]++; return again(node) },
	}
	if s.guests {
		victims = append(victims, func() error {
			all, _ := engine.List(ctx) // none, if cocoond was killed a moment ago
			all = slices.DeleteFunc(all, func(r vm.Record) bool { return r.PID == 0 })
			if len(all) == 0 {
				return nil
			}
			n[2]++
			_ = syscall.Kill(all[rand.IntN(len(all))].PID, syscall.SIGKILL) // it may have ended by itself
			return nil
		})
	}
	for {
		select {
		case <-ctx.Done():
			return n
		case <-time.After(s.every/2 + rand.N(s.every)):
		}
		if err := victims[rand.IntN(len(victims))](); err != nil {
			t.Error(err)
			return n
		}
	}
}

func again(p *program) error {
	if err := p.kill(); err != nil {
		return err
	}
	return p.start()
}

var goroutine = regexp.MustCompile(`(?m)^goroutine \d+`)

// settle waits until nothing is left of any pod, and counts. SIGQUIT makes the two processes print their goroutines, which also
// ends them, so they are started again.
func (s soak) settle(t *testing.T, engine *daemon, node *program) (r remains) {
	t.Helper()
	until(t, time.Minute, "no VM is left", func() bool {
		all, err := engine.List(t.Context())
		return err == nil && len(all) == 0
	})
	var left []string
	defer func() {
		if t.Failed() {
			t.Logf("left: %v", left)
		}
	}()
	until(t, 10*time.Second, "nothing of VMs is left", func() bool {
		left = nil
		for _, of := range []string{"state/vms", "run/vms", "state/fake"} {
			files, _ := filepath.Glob(filepath.Join(engine.dir, of, "*"))
			left = append(left, files...)
		}
		return len(left) == 0
	})
	_ = filepath.WalkDir(engine.dir, func(string, fs.DirEntry, error) error { r.files++; return nil })
	r.machine = slices.DeleteFunc(leak.Snapshot(), func(l string) bool { // other tests have cgroups and files too; the pids of the two daemons change
		ours := strings.HasPrefix(l, "link ") || strings.HasPrefix(l, "nft ") || strings.Contains(l, engine.dir) || strings.Contains(l, "cocoon-soak")
		return !ours || strings.HasPrefix(l, "process ")
	})
	for i, p := range []*program{engine.program, node} {
		r.descriptors[i] = len(must(os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.pid)))(t))
		said := must(os.ReadFile(p.log))(t)
		if err := p.cmd.Process.Signal(syscall.SIGQUIT); err != nil {
			t.Fatal(err)
		}
		_ = p.cmd.Wait()
		r.goroutines[i] = len(goroutine.FindAll(must(os.ReadFile(p.log))(t)[len(said):], -1))
		if err := p.start(); err != nil {
			t.Fatal(err)
		}
	}
	until(t, time.Minute, "cocoond answers", func() bool { _, err := engine.Info(t.Context()); return err == nil })
	return r
}
