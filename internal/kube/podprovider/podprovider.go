// Package podprovider is the virtual-kubelet provider of Cocoon: it makes one VM per Pod and tells the truth about it.
//
// Every pod has a goroutine of its own (worker) that takes one step at a time: bring the VM up, watch it, restart it,
// take it down. virtual-kubelet's queues are never held up: its calls only note what is wanted. Statuses go out as
// patches of our own instead of through virtual-kubelet's callback, because that writes back a whole, possibly stale,
// copy of the pod; see writer.go.
//
// The package neither runs VMs (that is the Runtime's job) nor serves the kubelet's HTTP API, and it keeps no state on
// disk: after a restart the cluster and the labels of the VMs tell everything.
package podprovider

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	vknode "github.com/virtual-kubelet/virtual-kubelet/node"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/probe"
	"cocoonstack.io/cocoon/internal/vm"
)

// Runtime runs VMs. The engine is one, the client of the node API another. A ref is an id, a name or a unique prefix.
type Runtime interface {
	Launch(ctx context.Context, spec vm.Spec) (vm.Record, error)
	Start(ctx context.Context, ref string) (vm.Record, error)
	// Stop asks the guest to shut down and kills it when grace is over: negative means the spec's grace, 0 kills now.
	Stop(ctx context.Context, ref string, grace time.Duration) (vm.Record, error)
	Remove(ctx context.Context, ref string, force bool) error
	Inspect(ctx context.Context, ref string) (vm.Record, error)
	List(ctx context.Context) ([]vm.Record, error)
	// Watch presents changes after the revision until ctx ends or fn fails; a negative revision presents what there is
	// as ADDED first. FailedPrecondition: the history does not reach back so far.
	Watch(ctx context.Context, after int64, fn func(vm.Event) error) error
	Exec(ctx context.Context, ref string, e guest.Exec, s guest.Streams) (int, error)
	// Attach joins the standard files of the guest's process; see guest.Attacher.
	Attach(ctx context.Context, ref string, a guest.Attach, s guest.Streams) error
	// Forward connects to a TCP port from inside the guest; see guest.Forwarder.
	Forward(ctx context.Context, ref string, port int, s guest.Streams) error
	// Stats asks the guest for its use of resources.
	Stats(ctx context.Context, ref string) (guest.Stats, error)
	Logs(ctx context.Context, ref string, o guest.LogOptions, fn func(guest.LogEntry) error) error
	// UpdateVolume replaces the content of a volume of files, in the running guest too.
	UpdateVolume(ctx context.Context, ref, volume string, files []vm.VolumeFile) error
	// KillContainer ends one run of a container of a guest that has several; see guest.ContainerKeeper.
	KillContainer(ctx context.Context, ref, container string, run int, grace time.Duration) error
	// ReleaseContainer lets the containers start that wait for one that holds them.
	ReleaseContainer(ctx context.Context, ref, container string) error
	// Pull makes sure that an image is there; see image.Puller.
	Pull(ctx context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error)
}

// OrphanPolicy says what becomes of a VM of ours whose pod is gone, found at start.
type OrphanPolicy string

// The orphan policies.
const (
	OrphanAlert   OrphanPolicy = "alert"   // log, count, leave it alone
	OrphanDestroy OrphanPolicy = "destroy" // remove it
	OrphanKeep    OrphanPolicy = "keep"    // leave it alone in silence
)

// Config is what varies from node to node. Zero durations mean the defaults.
type Config struct {
	Node       convert.Node
	Orphans    OrphanPolicy
	LeasesPath string // lease file by which a missing address is found; "" for none
	Registry   Registry

	StaticForward []netip.Prefix // networks to whose machines ports of static pods are forwarded

	BackoffBase time.Duration // of a crashing guest: 0, base, 2×base … (default 10 s)
	BackoffMax  time.Duration // default 5 min
	// Settle is how long the first "ContainerCreating" is held back, so that a VM that is up sooner costs one status
	// write less (default 500 ms; negative: not at all).
	Settle time.Duration
}

// PodGetter is the part of a pod lister the provider needs: the pod as the informer knows it, or an error.
type PodGetter func(namespace, name string) (*corev1.Pod, error)

// Placements is where a node claims the VMs that are to stay on it; placement.Claims is one.
type Placements interface {
	// Hold has the pod's VM, which is about to be made here, claim this node. FailedPrecondition: its state is elsewhere.
	Hold(ctx context.Context, pod *corev1.Pod) error
}

// Deps is whom the provider talks to. All are needed but Snapshots and Placements: without them pods that ask for snapshots,
// or to stay, are refused.
type Deps struct {
	Runtime    Runtime
	Snapshots  Snapshots
	Placements Placements
	Client     kubernetes.Interface
	Recorder   record.EventRecorder
	Prober     Prober
	Cached     PodGetter
	Services   ServiceLister // nil: guests are told of none
	Metrics    *Metrics
	Log        *slog.Logger
}

// Provider implements virtual-kubelet's asynchronous provider.
type Provider struct {
	cfg  Config
	Deps          // but for Runtime and Snapshots
	node operator // which are reached through it, or through a tenant

	mu       sync.Mutex
	begin    func(*worker)      // starts a worker that lives as long as Run; nil before
	ended    bool               // Run is over
	health   error              // of the last contact with the Runtime
	onHeal   func()             // called when health changes
	workers  map[string]*worker // by namespace/name: the current one
	byUID    map[types.UID]*worker
	holders  map[string]*worker // by namespace and VM name: the last worker that was given the name
	adopters map[vm.ID]*worker  // of VMs that bear no label of ours
	leaving  deletionLog
	turns    turns         // of those who would make the same snapshot
	pace     *rate.Limiter // of statuses that may wait
	objects  *objects
	probes   *probe.Scheduler
	wg       sync.WaitGroup
}

var (
	_ vknode.PodLifecycleHandler = (*Provider)(nil)
	_ vknode.PodNotifier         = (*Provider)(nil)
)

// New returns a provider that does nothing until Run.
func New(cfg Config, deps Deps) (*Provider, error) {
	switch cfg.Orphans {
	case "":
		cfg.Orphans = OrphanAlert
	case OrphanAlert, OrphanDestroy, OrphanKeep:
	default:
		return nil, errdefs.Invalidf("orphan policy %q is none of alert, destroy, keep", cfg.Orphans)
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
	node := operator{deps.Runtime, deps.Snapshots}
	deps.Runtime, deps.Snapshots = nil, nil
	return &Provider{
		cfg: cfg, Deps: deps, node: node, health: errdefs.Unavailablef("the VM engine was not asked yet"),
		pace:   rate.NewLimiter(waitingRate, waitingBurst),
		probes: probe.NewScheduler(), objects: newObjects(deps.Client, deps.Log), workers: map[string]*worker{}, byUID: map[types.UID]*worker{}, holders: map[string]*worker{}, adopters: map[vm.ID]*worker{},
	}, nil
}

// Run adopts what an earlier process left, calls ready, and then follows the Runtime's events until ctx ends. It returns
// when every goroutine of the provider has ended. No VM is touched by its end.
func (p *Provider) Run(ctx context.Context, ready func()) error {
	p.objects.spawn = func(f func(context.Context)) context.CancelFunc {
		ctx, cancel := context.WithCancel(ctx)
		p.wg.Go(func() { f(ctx) })
		return cancel
	}
	p.mu.Lock()
	p.begin = func(w *worker) {
		w.writer.spawn = func() { p.wg.Go(func() { w.writer.run(ctx) }) }
		p.wg.Go(func() { w.run(ctx) })
	}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		p.ended = true
		p.mu.Unlock()
		p.wg.Wait()
	}()
	p.wg.Go(func() { _ = p.probes.Run(ctx) }) // ends with ctx, as everything does
	revision, err := p.adopt(ctx)
	if err != nil {
		return err // only when ctx has ended
	}
	ready()
	p.follow(ctx, revision)
	return ctx.Err()
}

// Health is nil while the Runtime answers.
func (p *Provider) Health() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.health
}

// OnHealth has fn called after each change of Health. It must be set before Run and must not block.
func (p *Provider) OnHealth(fn func()) { p.onHeal = fn }

func (p *Provider) setHealth(err error) {
	p.mu.Lock()
	changed := (p.health == nil) != (err == nil)
	p.health = err
	p.mu.Unlock()
	if changed && p.onHeal != nil {
		p.onHeal()
	}
}
