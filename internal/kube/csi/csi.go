// Package csi gives pods the volumes of CSI drivers of others, as the kubelet does: it says in the cluster which drivers run on this
// machine, waits until a volume is attached to it, and lets the node publish the volume.
//
// cocoond speaks with the drivers (package csinode), because that needs rights over the whole machine. This package knows what the
// cluster says about a volume: PersistentVolumes, CSIDrivers, VolumeAttachments, Secrets.
package csi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/pauses"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/vm"
)

// Node publishes volumes of the drivers of this machine; cocoond's node API has it.
type Node interface {
	// WatchDrivers calls fn with the registered drivers, and again at each change, until ctx ends or fn fails.
	// Errors: Unsupported if the machine is not configured for drivers.
	WatchDrivers(ctx context.Context, fn func([]csinode.Driver) error) error
	PublishVolume(ctx context.Context, r csinode.Request) (nodewire.Published, error)
	// UnpublishVolume ends what PublishVolume has made. Errors: FailedPrecondition while a VM has the volume.
	UnpublishVolume(ctx context.Context, k csinode.Key) error
	ListPublished(ctx context.Context) ([]nodewire.Published, error)
	// GrowPublished makes the driver grow a published volume on this machine. Errors: Unsupported if the driver has nothing to do.
	GrowPublished(ctx context.Context, k csinode.Key, size int64) (int64, error)
	// PublishedUsage asks the driver how full a published volume is. Errors: Unsupported if it does not know.
	PublishedUsage(ctx context.Context, k csinode.Key) (csinode.Usage, error)
}

// Config holds what Plugins use. All is required.
type Config struct {
	Name   string // of the node
	Client kubernetes.Interface
	Node   Node
	Log    *slog.Logger
	// Known reports whether a pod with the UID is on this node. It is called only after Run was.
	Known func(types.UID) bool
	// Changed is called when the result of InUse has changed.
	Changed func()
}

// Plugins are the CSI drivers of this machine and the volumes that pods have of them.
type Plugins struct {
	Config

	mu  sync.Mutex
	use map[csinode.Key]corev1.UniqueVolumeName // volumes that are published, or about to be
}

// New returns Plugins. They send nothing before Run.
func New(cfg Config) *Plugins {
	return &Plugins{Config: cfg, use: map[csinode.Key]corev1.UniqueVolumeName{}}
}

// Pauses of Run.
const (
	retryFirst = time.Second
	retryMost  = 30 * time.Second
	sweepEvery = time.Minute
	// patience is how long cocoond may be away without a warning of ours: it is back from a restart in seconds. The provider warns at once.
	patience = time.Minute
)

// absence is the time for which the node has not answered.
type absence struct{ since time.Time }

// short reports whether err is no reason to warn: there is none, or the node has been away for less than patience. An error of another kind,
// and none, end the absence.
func (a *absence) short(err error) bool {
	if !errdefs.IsUnavailable(err) {
		a.since = time.Time{}
		return err == nil
	}
	if a.since.IsZero() {
		a.since = time.Now()
	}
	return time.Since(a.since) < patience
}

// Run says in the cluster which drivers there are, and unpublishes what pods have left that are gone, until ctx ends. The node object
// must exist, or exist soon.
func (p *Plugins) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { p.sweep(ctx) })
	retries := pauses.Growing(retryFirst, retryMost, pauses.Many)
	var away absence
	for {
		err := p.Node.WatchDrivers(ctx, func(all []csinode.Driver) error {
			away.short(nil)
			err := p.say(ctx, all)
			if err == nil {
				retries = pauses.Growing(retryFirst, retryMost, pauses.Many)
			}
			return err
		})
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errdefs.Is(err, errdefs.Unsupported):
			if err := p.say(ctx, nil); err != nil {
				p.Log.Warn("cluster not told that there are no CSI drivers", "err", err)
			}
		case !away.short(err):
			p.Log.Warn("cluster not told of CSI drivers", "err", err)
		}
		if !pauses.Sleep(ctx, nil, retries.Step(), false) {
			return ctx.Err()
		}
	}
}

// InUse are the volumes that pods of this node have, for Node.status.volumesInUse: the cluster does not detach them.
func (p *Plugins) InUse() []corev1.UniqueVolumeName {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := slices.Sorted(maps.Values(p.use))
	return slices.Compact(all)
}

// using records that a holder uses a volume, or, with "", that it does not any more.
func (p *Plugins) using(k csinode.Key, name corev1.UniqueVolumeName) {
	p.mu.Lock()
	old := p.use[k]
	if name == "" {
		delete(p.use, k)
	} else {
		p.use[k] = name
	}
	p.mu.Unlock()
	if old != name {
		p.Changed()
	}
}

// uniqueName is the name of a volume in the status of a node, as the kubelet and the attach-detach controller form it.
func uniqueName(driver, handle string) corev1.UniqueVolumeName {
	return corev1.UniqueVolumeName("kubernetes.io/csi/" + driver + "^" + handle)
}

// sweep unpublishes the volumes of pods that are gone, such as those that were deleted while this process did not run.
func (p *Plugins) sweep(ctx context.Context) {
	gone := map[csinode.Key]bool{} // at the last look
	complaint := ""
	var away absence
	for wait := time.Duration(0); pauses.Sleep(ctx, nil, wait, false); wait = sweepEvery {
		all, err := p.Node.ListPublished(ctx)
		if short := away.short(err); err != nil {
			if ctx.Err() == nil && !short && !errdefs.Is(err, errdefs.Unsupported) && complaint != err.Error() {
				complaint = err.Error()
				p.Log.Warn("published volumes not listed", "err", err)
			}
			continue
		}
		complaint = ""
		p.recall(all)
		now := map[csinode.Key]bool{}
		for _, v := range all {
			if p.Known(types.UID(v.Holder)) {
				continue
			}
			now[v.Key] = true
			if !gone[v.Key] { // its pod may be about to appear
				continue
			}
			if err := p.unpublish(ctx, v.Key); err != nil && !errdefs.IsFailedPrecondition(err) && ctx.Err() == nil { // FailedPrecondition: a VM still has it
				p.Log.Warn("volume of a deleted pod not unpublished", "volume", v.Name, "holder", v.Holder, "driver", v.Driver, "err", err)
			}
		}
		gone = now
		p.forget(func(k csinode.Key) bool { return !now[k] && !p.Known(types.UID(k.Holder)) })
	}
}

// recall records what was published before this process started.
func (p *Plugins) recall(all []nodewire.Published) {
	for _, v := range all {
		p.using(v.Key, uniqueName(v.Driver, v.Handle))
	}
}

// unpublish ends one publication.
func (p *Plugins) unpublish(ctx context.Context, k csinode.Key) error {
	if err := p.Node.UnpublishVolume(ctx, k); err != nil {
		return err
	}
	p.using(k, "")
	return nil
}

// Stale reports whether a volume of pod must be published again, because the machine has started since or publishing was interrupted.
func (p *Plugins) Stale(ctx context.Context, pod *corev1.Pod) (bool, error) {
	all, err := p.of(ctx, pod)
	return slices.ContainsFunc(all, func(v nodewire.Published) bool { return !v.Ready }), err
}

// Release unpublishes all volumes of pod. Its VM must be gone.
// Errors: FailedPrecondition while a VM has one of them; those of the driver.
func (p *Plugins) Release(ctx context.Context, pod *corev1.Pod) error {
	all, err := p.of(ctx, pod)
	if err != nil {
		return err
	}
	var errs []error
	for _, v := range all {
		if err := p.unpublish(ctx, v.Key); err != nil {
			errs = append(errs, fmt.Errorf("UnmountVolume.TearDown failed for volume %q: %w", v.Name, err))
		}
	}
	if len(errs) == 0 {
		p.forget(func(k csinode.Key) bool { return k.Holder == string(pod.UID) })
	}
	return errors.Join(errs...)
}

// forget ends the use of volumes that were never published, such as those whose pod was deleted before they were attached.
func (p *Plugins) forget(gone func(csinode.Key) bool) {
	p.mu.Lock()
	before := len(p.use)
	maps.DeleteFunc(p.use, func(k csinode.Key, _ corev1.UniqueVolumeName) bool { return gone(k) })
	changed := len(p.use) != before
	p.mu.Unlock()
	if changed {
		p.Changed()
	}
}

// Grow makes a driver grow a volume wherever pods of namespace have it on this machine. here: one has it.
func (p *Plugins) Grow(ctx context.Context, namespace, driver, handle string, size int64) (here bool, err error) {
	all, err := p.Node.ListPublished(vm.OnBehalf(ctx, vm.Owner{Namespace: namespace}))
	if err != nil {
		return false, err
	}
	for _, v := range all {
		if v.Driver != driver || v.Handle != handle || !v.Ready {
			continue
		}
		if _, err := p.Node.GrowPublished(ctx, v.Key, size); err != nil && !errdefs.Is(err, errdefs.Unsupported) {
			return false, err
		}
		here = true
	}
	return here, nil
}

// Usage asks the driver how full a volume of pod is. Errors: Unsupported if it does not know.
func (p *Plugins) Usage(ctx context.Context, pod *corev1.Pod, volume string) (csinode.Usage, error) {
	return p.Node.PublishedUsage(ctx, csinode.Key{Owner: ownerOf(pod), Holder: string(pod.UID), Name: volume})
}

// of returns what is published for pod.
func (p *Plugins) of(ctx context.Context, pod *corev1.Pod) ([]nodewire.Published, error) {
	owner := ownerOf(pod)
	all, err := p.Node.ListPublished(vm.OnBehalf(ctx, owner))
	if errdefs.Is(err, errdefs.Unsupported) {
		return nil, nil
	}
	return slices.DeleteFunc(all, func(v nodewire.Published) bool {
		return v.Holder != string(pod.UID) || v.Owner.Namespace != owner.Namespace
	}), err
}
