package podprovider

import (
	"context"
	"slices"
	"sync"
	"time"

	vknode "github.com/virtual-kubelet/virtual-kubelet/node"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
	"cocoonstack.io/cocoon/internal/kube/stats"
	"cocoonstack.io/cocoon/internal/probing"
	"cocoonstack.io/cocoon/internal/vm"
)

// Provider implements virtual-kubelet's asynchronous provider, and with Exec, Attach, Logs and Forward the kubelet's API.
type Provider struct {
	*common
	contact // Health and OnHealth
	door    // Exec, Attach, Logs and Forward
}

var (
	_ vknode.PodLifecycleHandler = (*Provider)(nil)
	_ vknode.PodNotifier         = (*Provider)(nil)
)

// New returns a provider. It does nothing before Run.
func New(cfg Config, deps Deps) (*Provider, error) {
	switch cfg.Orphans {
	case "":
		cfg.Orphans = OrphanAlert
	case OrphanAlert, OrphanDestroy, OrphanKeep:
	default:
		return nil, errdefs.Invalidf("orphan policy %q must be one of: alert, destroy, keep", cfg.Orphans)
	}
	if cfg.Node.Name == "" {
		return nil, errdefs.Invalidf("the virtual node needs a name")
	}
	if cfg.BackoffBase <= 0 {
		cfg.BackoffBase = 10 * time.Second
	}
	if cfg.BackoffMax <= 0 {
		cfg.BackoffMax = 5 * time.Minute
	}
	switch {
	case cfg.Settle == 0:
		cfg.Settle = 500 * time.Millisecond
	case cfg.Settle < 0:
		cfg.Settle = 0
	}
	m := deps.Metrics
	node := operator{deps.Runtime, deps.Runtime, podsnapshots.New(cfg.Node.Name, deps.Snapshots, cfg.Registry,
		podsnapshots.Metrics{Saved: m.saved, Pushed: m.pushed, Pulled: m.pulled})}
	deps.Runtime, deps.Snapshots = nil, nil
	c := &common{
		cfg: cfg, Deps: deps, node: node, index: newIndex(m), deletions: deletionLog{pods: map[types.UID]time.Time{}}, keeper: keeper{seen: map[string]time.Time{}}, pace: rate.NewLimiter(waitingRate, waitingBurst),
		objects: podvolumes.NewObjects(deps.Client, deps.Log), probes: probing.NewScheduler(),
	}
	c.objects.Plugins = deps.Plugins
	return &Provider{
		common: c, contact: contact{err: errdefs.Unavailablef("the VM engine has not answered yet")}, door: door{pods: c.index, allowed: cfg.StaticForward},
	}, nil
}

// Offered returns the snapshots of this node from which pods can be cloned; see podsnapshots.Store.
func (p *Provider) Offered(ctx context.Context) ([]corev1.ContainerImage, error) {
	return p.node.snapshots.Offered(ctx)
}

// contact is the result of the last contact with the Runtime.
type contact struct {
	mu       sync.Mutex // taken only when no other lock is held, and released before onChange is called
	err      error
	onChange func()
}

// Health returns nil while the Runtime answers, else the last error.
func (c *contact) Health() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// OnHealth sets the function that is called after each change of Health. It must be set before Run. fn must not block.
func (c *contact) OnHealth(fn func()) { c.onChange = fn }

func (c *contact) setHealth(err error) {
	c.mu.Lock()
	changed := (c.err == nil) != (err == nil)
	c.err = err
	c.mu.Unlock()
	if changed && c.onChange != nil {
		c.onChange()
	}
}

// Inside returns what a guest tells about its usage, and CSI drivers about the folders that it shares; see stats.Config.
func (p *Provider) Inside(ctx context.Context, id vm.ID) (guest.Stats, error) {
	out, err := p.node.vms.Stats(ctx, string(id))
	if err != nil || p.objects.Plugins == nil {
		return out, err
	}
	if s := p.index.withVM(id); s != nil {
		out.Volumes = append(out.Volumes, p.published(ctx, s)...)
	}
	return out, nil
}

// published returns how full the folders are that CSI drivers have published for the pod s. A driver that does not know is left out.
func (p *Provider) published(ctx context.Context, s *podState) (out []guest.VolumeStats) {
	f := s.look()
	if f.rec == nil {
		return nil
	}
	for _, v := range f.rec.Spec.Dirs() {
		if !v.Dir.Published {
			continue
		}
		if u, err := p.objects.Plugins.Usage(ctx, f.pod, v.Name); err == nil && u.Bytes.Total > 0 {
			out = append(out, guest.VolumeStats{
				Name: v.Name, Size: u.Bytes.Total, Used: u.Bytes.Used, Available: u.Bytes.Available, Inodes: u.Inodes.Total, InodesFree: u.Inodes.Available,
			})
		}
	}
	return out
}

// Known reports whether a pod with the UID is on this node.
func (p *Provider) Known(uid types.UID) bool { return p.index.withUID(uid) != nil }

// Tracked returns the VMs of the pods, from the engine's events. It sends no request.
func (p *Provider) Tracked() []stats.VM {
	all := p.index.all()
	out := make([]stats.VM, 0, len(all))
	for _, s := range all {
		f := s.look()
		pod, rec := f.pod, f.rec
		if rec == nil || f.lost || rec.ID == "" {
			continue
		}
		v := stats.VM{
			ID: rec.ID, Name: rec.Spec.Name, Namespace: pod.Namespace, Pod: pod.Name, UID: string(pod.UID),
			Backend: rec.Driver, StartedAt: rec.StartedAt,
		}
		if len(rec.Containers) == 0 && len(pod.Spec.Containers) > 0 {
			v.Containers = []string{pod.Spec.Containers[0].Name}
		}
		if rec.State == vm.StateRunning {
			v.PID = rec.PID
		}
		for _, c := range rec.Containers {
			v.Several = true
			if rec.RootContainer() && len(pod.Spec.Containers) > 0 { // a clone's container may have the name of its source's
				c.Name = pod.Spec.Containers[0].Name
			}
			if c.Status.State == vm.ContainerRunning {
				v.Containers = append(v.Containers, c.Name)
			}
		}
		v.Claims = claimsOf(pod, rec)
		for _, n := range rec.NICs {
			v.Taps = append(v.Taps, stats.Tap{Name: n.Tap, NetNS: n.NetNS})
		}
		for _, d := range rec.Disks {
			if d.Role == vm.RoleCOW {
				v.COW = d.Path
			}
		}
		out = append(out, v)
	}
	return out
}

// claimsOf returns the names of the claims that rec, the VM of pod, has as disks or as folders of CSI drivers, by the names of their
// volumes. nil: it has none.
func claimsOf(pod *corev1.Pod, rec *vm.Record) map[string]string {
	published := func(name string) bool {
		return slices.ContainsFunc(rec.Spec.Dirs(), func(v vm.Volume) bool { return v.Name == name && v.Dir.Published })
	}
	if len(rec.Attached) == 0 && len(rec.Spec.Dirs()) == 0 {
		return nil
	}
	claims := map[string]string{}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		claim := convert.ClaimName(pod, v)
		if claim != "" && (published(v.Name) || slices.ContainsFunc(rec.Attached, func(a vm.AttachedVolume) bool { return a.Volume == v.Name })) {
			claims[v.Name] = claim
		}
	}
	return claims
}
