package podprovider

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/pauses"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// The pauses before the event stream of the Runtime is restarted.
const (
	followClean = 2 * time.Second // after the Runtime closed the stream without an error
	followFirst = time.Second
	followMost  = time.Minute
)

// adopt assigns the existing VMs to their pods, once at start, and returns the revision to follow from. It retries until both
// the Runtime and the API server have answered. It fails only when ctx ends. It reads a consistent list of pods, because with
// a stale cache a VM could look like an orphan.
func (p *Provider) adopt(ctx context.Context) (int64, error) {
	var revision int64
	err := pauses.Growing(250*time.Millisecond, 10*time.Second, pauses.Many).DelayFunc().Until(ctx, true, true, func(ctx context.Context) (done bool, err error) {
		if revision, err = p.tryAdopt(ctx); err != nil && ctx.Err() == nil {
			p.Log.Warn("VMs not adopted yet, trying again", "err", err)
		}
		return err == nil, nil
	})
	return revision, err
}

func (p *Provider) tryAdopt(ctx context.Context) (int64, error) {
	recs, err := p.node.vms.List(ctx)
	p.setHealth(err)
	if err != nil {
		return 0, fmt.Errorf("list VMs: %w", err)
	}
	pods, err := p.Client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", p.cfg.Node.Name).String(),
	})
	if err != nil {
		return 0, fmt.Errorf("list pods of node %s: %w", p.cfg.Node.Name, err)
	}
	var revision int64
	byUID, byID := map[types.UID]*vm.Record{}, map[vm.ID]*vm.Record{}
	for i := range recs {
		r := &recs[i]
		revision = max(revision, r.Revision)
		byID[r.ID] = r
		if uid := r.Spec.Labels[contract.VMLabelPodUID]; uid != "" && r.Spec.Labels[contract.VMLabelNode] == p.cfg.Node.Name {
			byUID[types.UID(uid)] = r
		}
	}
	claimed, owners := map[vm.ID]bool{}, podstatus.OwnersOf(pointers(pods.Items))
	for i := range pods.Items {
		pod := &pods.Items[i]
		rec := byUID[pod.UID]
		if rec == nil && convert.Static(pod) {
			continue // the ID annotation of a static pod does not name a VM of this node
		}
		if rec == nil { // an adopted VM has no label of the pod
			r := byID[vm.ID(pod.Annotations[contract.KeyID])]
			if r != nil && r.Spec.Labels[contract.VMLabelPodUID] == "" && p.on(ownerOf(pod)).may(*r) && !claimed[r.ID] && (owners[r.ID] == "" || owners[r.ID] == pod.UID) {
				rec = r
			}
		}
		if rec == nil {
			if id := pod.Annotations[contract.KeyID]; id != "" && !terminal(pod) {
				p.Log.Warn("vm of pod does not exist, it will be created again", "pod", pod.Namespace+"/"+pod.Name, "vm", id)
			}
			continue
		}
		claimed[rec.ID] = true
		if err := p.ensure(pod, rec); err != nil {
			return 0, err
		}
	}
	p.orphans(byUID, claimed)
	return revision, nil
}

func pointers(pods []corev1.Pod) (out []*corev1.Pod) {
	for i := range pods {
		out = append(out, &pods[i])
	}
	return out
}

func terminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// orphans applies the policy to VMs of this node whose pod is gone. It ignores VMs without our labels.
func (p *Provider) orphans(byUID map[types.UID]*vm.Record, claimed map[vm.ID]bool) {
	n := 0
	for _, rec := range byUID {
		if claimed[rec.ID] {
			continue
		}
		pod := rec.Spec.Labels[contract.VMLabelPodNamespace] + "/" + rec.Spec.Labels[contract.VMLabelPodName]
		switch p.cfg.Orphans {
		case OrphanKeep:
			continue
		case OrphanAlert:
			p.Log.Warn("orphan vm not removed, the orphan policy keeps it", "vm", rec.ID, "pod", pod)
		case OrphanDestroy:
			p.Log.Warn("removing orphan vm", "vm", rec.ID, "pod", pod)
			p.background(func(ctx context.Context) {
				if err := p.removeOrphan(ctx, *rec); err != nil {
					p.Log.Warn("orphan vm not removed", "vm", rec.ID, "err", err)
				}
			})
		}
		n++
	}
	if p.cfg.Orphans != OrphanKeep {
		p.Metrics.orphans.Add(float64(n))
	}
}

// follow passes the Runtime's events to the workers until ctx ends. After every interruption it first reads the list of VMs,
// to find VMs that vanished meanwhile, and then resumes the stream.
func (p *Provider) follow(ctx context.Context, revision int64) {
	first := pauses.Growing(followFirst, followMost, 0)
	pause := first
	for ctx.Err() == nil {
		began, heard := time.Now(), false
		err := p.node.vms.Watch(ctx, revision, func(e vm.Event) error {
			heard = true
			p.setHealth(nil)
			revision = max(revision, e.Revision)
			p.index.dispatch(e)
			return nil
		})
		if ctx.Err() != nil {
			return
		}
		next, stale := followClean, false
		switch {
		case errdefs.IsFailedPrecondition(err):
			next, stale = time.Millisecond, true // the revision is too old; read the list
		case err != nil:
			if heard || time.Since(began) > followMost { // the stream was connected
				pause = first
			}
			p.setHealth(err)
			p.Log.Warn("event stream of the vm engine lost, trying again", "err", err)
			next = pause.Step()
		default:
			pause = first
		}
		for {
			if !pauses.Sleep(ctx, nil, next, false) {
				return
			}
			if at, err := p.resync(ctx); err == nil {
				if revision = at; stale {
					revision = -1
				}
				break
			} else if ctx.Err() == nil {
				p.Log.Warn("vm engine does not answer", "err", err)
				next = pause.Step()
			}
		}
	}
}

// resync compares every worker with the Runtime's list.
func (p *Provider) resync(ctx context.Context) (int64, error) {
	known := p.index.known()
	recs, err := p.node.vms.List(ctx)
	p.setHealth(err)
	if err != nil {
		return 0, err
	}
	var revision int64
	there := map[vm.ID]bool{}
	for _, r := range recs {
		there[r.ID], revision = true, max(revision, r.Revision)
		p.index.dispatch(vm.Event{Type: vm.EventModified, Revision: r.Revision, Record: r})
	}
	for id, s := range known {
		if !there[id] {
			s.missing(id)
		}
	}
	return revision, nil
}

// Run adopts the VMs of an earlier process, calls ready, and then follows the Runtime's events until ctx ends. It returns
// after all goroutines of the provider have ended. The VMs keep running.
func (p *Provider) Run(ctx context.Context, ready func()) error {
	var all sync.WaitGroup
	p.background = func(f func(context.Context)) context.CancelFunc {
		ctx, cancel := context.WithCancel(ctx)
		all.Go(func() {
			defer cancel()
			f(ctx)
		})
		return cancel
	}
	p.objects.Start(p.background)
	p.index.open(func(s, prior *podState) { p.background(newWorker(p.common, s, prior).run) })
	defer func() {
		p.index.close()
		all.Wait()
	}()
	p.background(func(ctx context.Context) { _ = p.probes.Run(ctx) }) // ends with ctx
	revision, err := p.adopt(ctx)
	if err != nil {
		return err // ctx has ended
	}
	ready()
	p.background(p.sweepKept)
	p.follow(ctx, revision)
	return ctx.Err()
}
