//go:build bench

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/placement"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

const (
	stickyNodes   = 1000
	stickyBatch   = 500 // pods
	stickyBatches = 5   // of each profile, in turns
	stickyClients = 16  // that create pods at a time
)

// placing measures how fast pods are placed on nodes. The nodes are only objects: no process serves them.
type placing struct {
	kube   *kubernetes.Clientset
	custom dynamic.Interface
	claims int // how many batches of VMs were given a node
}

// stickies compares how fast the sticky profile of cocoon-scheduler and the stock profile of the same process place pods:
// pods of VMs that have no node yet, and pods whose VM has claimed one. The profiles take turns.
func stickies(t *testing.T, results *table) {
	p := newPlacing(t, kubetest.Start(t, "--with", "scheduler"))
	if err := p.many(stickyNodes, func(i int) error { return p.node(t, i) }); err != nil {
		t.Fatal(err)
	}
	p.batch(t, corev1.DefaultSchedulerName, "warm-up")
	p.batch(t, contract.StickyScheduler, "warm-up-sticky")
	var stock, fresh, held samples
	for n := range stickyBatches {
		stock = append(stock, p.batch(t, corev1.DefaultSchedulerName, fmt.Sprint("stock-", n)))
		fresh = append(fresh, p.batch(t, contract.StickyScheduler, fmt.Sprint("fresh-", n)))
		again := fmt.Sprint("held-", n)
		p.hold(t, again)
		held = append(held, p.batch(t, contract.StickyScheduler, again))
	}
	rate := func(s samples) float64 { return stickyBatch / s.median().Seconds() }
	for what, s := range map[string]samples{"new VMs": fresh, "VMs that have claimed a node": held} {
		ratio := rate(s) / rate(stock)
		results.add(row{
			what: fmt.Sprintf("pods placed on %d nodes, %s: sticky (A), stock profile (B)", stickyNodes, what), a: fmt.Sprintf("%.0f/s", rate(s)), b: fmt.Sprintf("%.0f/s", rate(stock)),
			figure: fmt.Sprintf("%.2f x", ratio), goal: ">= 0.95 x", n: stickyBatch * stickyBatches, missed: ratio < 0.95,
		})
	}
}

func newPlacing(t *testing.T, config *rest.Config) *placing {
	t.Helper()
	config.QPS = -1
	p := &placing{kube: must(kubernetes.NewForConfig(config))(t), custom: must(dynamic.NewForConfig(config))(t)}
	until(t, time.Minute, "the namespace has its account", func() bool {
		_, err := p.kube.CoreV1().ServiceAccounts(namespace).Get(t.Context(), "default", metav1.GetOptions{})
		return err == nil
	})
	return p
}

func nodeName(i int) string { return fmt.Sprint("node-", i) }

func (p *placing) node(t *testing.T, i int) error {
	room := corev1.ResourceList{corev1.ResourcePods: resource.MustParse("110"), corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourceMemory: resource.MustParse("256Gi")}
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName(i)}}
	n.Status.Capacity, n.Status.Allocatable = room, room
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now()}}
	if _, err := p.kube.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
		return err
	}
	status, err := json.Marshal(map[string]any{"status": n.Status})
	if err != nil {
		return err
	}
	_, err = p.kube.CoreV1().Nodes().Patch(t.Context(), n.Name, types.MergePatchType, status, metav1.PatchOptions{}, "status")
	return err
}

// many calls do n times, some in parallel.
func (p *placing) many(n int, do func(i int) error) error {
	var wg sync.WaitGroup
	next := make(chan int)
	failed := make(chan error, n)
	for range stickyClients {
		wg.Go(func() {
			for i := range next {
				if err := do(i); err != nil {
					failed <- err
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	close(failed)
	return <-failed // nil if nothing failed
}

func (p *placing) pod(batch string, i int, profile string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("%s-%d", batch, i), Namespace: namespace, Labels: map[string]string{"batch": batch}, Annotations: map[string]string{contract.KeySticky: contract.StickyWait},
		},
		Spec: corev1.PodSpec{
			SchedulerName: profile, Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			Containers: []corev1.Container{{Name: "c", Image: "none", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m")}}}},
		},
	}
}

// hold makes the VMs of a batch claim nodes, as the nodes that create VMs do.
func (p *placing) hold(t *testing.T, batch string) {
	t.Helper()
	err := p.many(stickyBatch, func(i int) error {
		pod := p.pod(batch, i, contract.StickyScheduler)
		pod.UID = "before"
		return placement.Claims{Custom: p.custom, Nodes: p.kube, Node: nodeName((p.claims*7919 + i*31) % stickyNodes)}.Hold(t.Context(), pod)
	})
	if err != nil {
		t.Fatal(err)
	}
	p.claims++
}

// batch creates pods and returns how long it took until the last of them was bound.
func (p *placing) batch(t *testing.T, profile, name string) time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), 2*time.Minute, errors.New("not all pods are bound within 2 minutes"))
	defer cancel()
	bound := map[string]bool{}
	seen := make(chan error, 1)
	go func() {
		selected := func(o *metav1.ListOptions) {
			o.LabelSelector, o.FieldSelector = "batch="+name, fields.OneTermNotEqualSelector("spec.nodeName", "").String()
		}
		pods := cache.NewFilteredListWatchFromClient(p.kube.CoreV1().RESTClient(), "pods", namespace, selected)
		_, err := watchtools.UntilWithSync(ctx, pods, &corev1.Pod{}, nil, func(e watch.Event) (bool, error) {
			if pod, ok := e.Object.(*corev1.Pod); ok {
				bound[pod.Name] = true
			}
			return len(bound) == stickyBatch, nil
		})
		seen <- err
	}()
	began := time.Now()
	if err := p.many(stickyBatch, func(i int) error {
		_, err := p.kube.CoreV1().Pods(namespace).Create(ctx, p.pod(name, i, profile), metav1.CreateOptions{})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := <-seen; err != nil {
		t.Fatalf("%d of %d pods of %s are bound: %v", len(bound), stickyBatch, name, context.Cause(ctx))
	}
	return time.Since(began)
}
