// Package vkcocoon wires the virtual node: the pod provider, the node object, the kubelet API and virtual-kubelet between
// them. The vk-cocoon binary and cocoond (in-process) run the same Node.
//
// It contains no behaviour of its own beyond configuration and the order of starting and stopping.
package vkcocoon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	vklog "github.com/virtual-kubelet/virtual-kubelet/log"
	vknode "github.com/virtual-kubelet/virtual-kubelet/node"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/scheme"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/app/service"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/csi"
	"cocoonstack.io/cocoon/internal/kube/kubelet"
	"cocoonstack.io/cocoon/internal/kube/netpolicy"
	"cocoonstack.io/cocoon/internal/kube/node"
	"cocoonstack.io/cocoon/internal/kube/placement"
	"cocoonstack.io/cocoon/internal/kube/podprovider"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/kube/probe"
	"cocoonstack.io/cocoon/internal/kube/stats"
	"cocoonstack.io/cocoon/internal/kube/storage"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodewire"
)

// Runtime runs the VMs: the engine itself, or the client of a node API. Both also keep snapshots.
type Runtime = podprovider.Runtime

// Informer is a Runtime that can report what it runs VMs on.
type Informer interface {
	Info(ctx context.Context) (nodewire.NodeInfo, error)
}

var (
	_ Informer               = (*nodeclient.Client)(nil)
	_ podprovider.Runtime    = (*nodeclient.Client)(nil)
	_ podsnapshots.Snapshots = (*nodeclient.Client)(nil)
)

// podWorkers is how many calls of virtual-kubelet run at a time. They only queue work for the provider.
const podWorkers = 16

// Node is one virtual node.
type Node struct {
	cfg     Config
	runtime Runtime
	log     *slog.Logger
	service bool // the process runs only this node: report its state to systemd
}

// New validates the configuration. Nothing is opened before Run.
func New(cfg Config, runtime Runtime, log *slog.Logger) (*Node, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	if runtime == nil || log == nil {
		return nil, errdefs.Invalidf("the virtual node needs a runtime and a logger")
	}
	return &Node{cfg: cfg, runtime: runtime, log: log.With("component", "virtual-node", "node", cfg.NodeName)}, nil
}

// Run serves the node until ctx ends and returns when all of it has stopped; VMs keep running. It waits for an API
// server or a runtime that is unavailable. It fails at once where waiting cannot help: a bad kubeconfig, a port that is
// taken.
func (n *Node) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if n.cfg.BootstrapKubeconfig != "" {
		stop, err := n.cfg.bootstrap(ctx, clientset, n.log)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		defer stop()
	}
	clients, err := connect(n.cfg)
	if err != nil {
		return err
	}
	renew := func(context.Context) error { return nil }
	if n.cfg.ServingCSR {
		var path string
		if path, renew, err = n.cfg.serving(clients.main); err != nil {
			return err
		}
		n.cfg.TLSCert, n.cfg.TLSKey = path, path // reloaded when the file changes
	}
	parts, err := n.build(ctx, clients)
	if err != nil {
		return err
	}
	listener, err := parts.kubelet.Listen()
	if err != nil {
		return err
	}
	stopEvents := parts.record()
	defer stopEvents()

	var wg sync.WaitGroup
	run := func(what string, f func(context.Context) error) {
		wg.Go(func() {
			if err := f(ctx); err != nil && ctx.Err() == nil {
				cancel(fmt.Errorf("%s: %w", what, err))
			}
		})
	}
	run("kubelet API", func(ctx context.Context) error { return parts.kubelet.Run(ctx, listener) })
	run("client certificate authority", parts.followCA)
	run("serving certificate", renew)
	run("metrics", func(ctx context.Context) error { return n.serveMetrics(ctx, parts.registry) })
	run("pings", parts.pinger.Run)
	run("node conditions", parts.node.Run)
	run("node registration", func(ctx context.Context) error { return parts.node.Serve(ctx, clients.main, n.log) })
	run("image mappings", parts.mappings.run)
	run("services", parts.services.run)
	run("network policies", parts.policies.Run)
	if parts.storage != nil {
		run("volumes of claims", func(ctx context.Context) error {
			select {
			case <-parts.node.Claimed(): // before that, the volumes may be of another machine
				return parts.storage.Run(ctx)
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}
	if parts.plugins != nil {
		run("volumes of CSI drivers", func(ctx context.Context) error {
			select {
			case <-parts.node.Claimed(): // before that, the node may be another machine
				return parts.plugins.Run(ctx)
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}
	if n.service {
		run("watchdog", func(ctx context.Context) error {
			return service.Watchdog(ctx, func(context.Context) error {
				// Whether the runtime and the API server answer does not matter here: a restart fixes neither. The
				// check is that they are asked, and that no goroutine holds the provider or the node forever.
				_ = parts.provider.Health()
				_ = parts.node.Object()
				return nil
			}, n.log)
		})
	}
	adopted := make(chan struct{})
	run("pods", func(ctx context.Context) error {
		select {
		case <-parts.node.Claimed(): // before that, the pods may belong to another machine
		case <-ctx.Done():
			return ctx.Err()
		}
		return parts.provider.Run(ctx, func() { close(adopted) })
	})
	run("pod controller", func(ctx context.Context) error {
		select {
		case <-adopted:
		case <-ctx.Done():
			return ctx.Err()
		}
		parts.mappings.settle(ctx, n.log)
		if err := errors.Join(parts.services.wait(ctx), parts.policies.Wait(ctx)); err != nil {
			return err
		}
		n.log.Info("virtual node is up")
		if n.service {
			service.Ready(n.log)
		}
		return parts.control(vklog.WithLogger(ctx, vkLogger{n.log}))
	})
	wg.Wait()
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// parts are the components of a running node.
type parts struct {
	clients  clients
	registry *prometheus.Registry
	events   record.EventBroadcaster
	provider *podprovider.Provider
	stats    *stats.Collector
	pinger   *probe.Pinger // nil: no address can be pinged
	node     *node.Node
	kubelet  *kubelet.Server
	mappings mappings
	services *services
	policies *netpolicy.Enforcer
	storage  *storage.Storage // nil: the runtime keeps no volumes
	plugins  *csi.Plugins     // nil: the runtime does not publish volumes of CSI drivers
	pods     informers.SharedInformerFactory
	followCA func(context.Context) error
}

func (n *Node) build(ctx context.Context, c clients) (*parts, error) {
	p := &parts{clients: c, registry: prometheus.NewRegistry()}
	var err error
	if p.pinger, err = probe.OpenPinger(); err != nil {
		n.log.Warn("guests cannot be pinged, so an address alone makes them ready; grant CAP_NET_RAW", "err", err)
	}
	metrics := podprovider.NewMetrics(p.registry)
	metrics.PingedBy(p.pinger.Kind())
	p.pods = informers.NewSharedInformerFactoryWithOptions(c.main, 0, informers.WithTransform(slim),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", n.cfg.NodeName).String()
		}))
	lister := p.pods.Core().V1().Pods().Lister()
	if p.services, err = newServices(c.main, n.log); err != nil {
		return nil, fmt.Errorf("set up the watch of Services: %w", err)
	}
	p.events = newBroadcaster(ctx)
	recorder := p.events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "vk-cocoon", Host: n.cfg.NodeName})
	p.policies, err = n.policies(c, p.registry, recorder, func() {
		if p.node != nil {
			p.node.Poke()
		}
	})
	if err != nil {
		return nil, err
	}
	snapshots, _ := n.runtime.(podsnapshots.Snapshots)
	p.plugins = n.plugins(p)
	p.provider, err = podprovider.New(podprovider.Config{
		Node: convert.Node{Name: n.cfg.NodeName, IP: n.cfg.NodeIP, Memory: n.cfg.memory(), ClusterDomain: n.cfg.ClusterDomain, ClusterDNS: n.cfg.dns, Searches: host.Searches()}, Orphans: podprovider.OrphanPolicy(n.cfg.Orphans),
		LeasesPath: n.cfg.LeasesPath, Registry: n.cfg.snapshots, BackoffBase: n.cfg.BackoffBase, BackoffMax: n.cfg.BackoffMax,
		StaticForward: n.cfg.static,
	}, podprovider.Deps{
		Runtime: n.runtime, Snapshots: snapshots, Client: c.main, Prober: probe.NewNet(p.pinger), Metrics: metrics, Log: n.log,
		Placements: placement.Claims{Custom: c.custom, Nodes: c.main, Node: n.cfg.NodeName},
		Recorder:   recorder,
		Cached:     func(namespace, name string) (*corev1.Pod, error) { return lister.Pods(namespace).Get(name) },
		Services:   p.services.list,
		Policed:    p.policies.Policed,
		Plugins:    p.published(),
		StandIn:    n.standIn(),
	})
	if err != nil {
		return nil, err
	}
	p.stats, err = stats.New(stats.Config{Node: n.cfg.NodeName, Root: n.cfg.RootDir, Source: p.provider.Tracked, Inside: p.provider.Inside, Log: n.log})
	if err != nil {
		return nil, err
	}
	p.registry.MustRegister(stats.Families{Collector: p.stats}, stats.Claims{Collector: p.stats})
	p.node, err = node.New(node.Config{
		Name: n.cfg.NodeName, IP: n.cfg.NodeIP, Pool: n.cfg.Pool, ProviderID: n.cfg.ProviderID, Version: n.cfg.Version,
		Port: int32(n.cfg.KubeletPort), Reserve: n.cfg.ReservePercent, Sizes: n.cfg.sizes, Root: n.cfg.RootDir,
		Healthy: p.provider.Health, Hypervisors: n.hypervisors(), Strays: n.strays(), ICMP: p.pinger.Kind(), NoRole: n.cfg.NoRole,
		CPUClass: n.cfg.CPUClass, Snapshots: p.provider.Offered, Network: p.policies.Usable,
		InUse: p.inUse(),
	})
	if err != nil {
		return nil, err
	}
	if p.mappings, err = n.mappings(c); err != nil {
		return nil, err
	}
	if p.storage, err = n.storage(ctx, c, recorder, p.node, p.others()); err != nil {
		return nil, err
	}
	p.provider.OnHealth(func() {
		p.node.Poke()
		p.mappings.poke()
	})
	p.kubelet, err = n.kubelet(p)
	return p, err
}

// strays returns the function that counts VMs that are not on record; nil when the runtime cannot tell.
func (n *Node) strays() func(context.Context) (int, error) {
	informer, ok := n.runtime.(Informer)
	if !ok {
		return nil
	}
	return func(ctx context.Context) (int, error) {
		info, err := informer.Info(ctx)
		return info.Strays, err
	}
}

// standIn returns the function that names the default hypervisor; nil when the runtime cannot tell.
func (n *Node) standIn() func(context.Context) (string, error) {
	informer, ok := n.runtime.(Informer)
	if !ok {
		return nil
	}
	return func(ctx context.Context) (string, error) {
		info, err := informer.Info(ctx)
		if err != nil {
			return "", errdefs.Unavailablef("read the hypervisors of the engine: %w", err)
		}
		for _, d := range info.Drivers {
			if d.Default {
				return d.Name, nil
			}
		}
		return "", nil
	}
}

// hypervisors returns the function that reports the hypervisors; nil when the runtime cannot tell.
func (n *Node) hypervisors() func(context.Context) (node.Hypervisors, error) {
	informer, ok := n.runtime.(Informer)
	if !ok {
		return nil
	}
	return func(ctx context.Context) (are node.Hypervisors, err error) {
		info, err := informer.Info(ctx)
		if err != nil {
			return are, errdefs.Unavailablef("read the hypervisors of the engine: %w", err)
		}
		err = errdefs.Preconditionf("the engine has no default hypervisor")
		for _, d := range info.Drivers {
			if d.Error == "" {
				are.Usable = append(are.Usable, contract.Backend(d.Name))
			}
			switch {
			case !d.Default:
			case d.Error != "":
				err = errdefs.Preconditionf("%s cannot be used: %s", d.Name, d.Error)
			default:
				are.Default, err = fmt.Sprintf("%s %s, accelerated by %s", d.Name, d.Version, d.Accel), nil
			}
		}
		return are, err
	}
}

func (n *Node) kubelet(p *parts) (*kubelet.Server, error) {
	ca, follow, err := clientCA(n.cfg, p.clients.rest)
	if err != nil {
		return nil, err
	}
	p.followCA = follow
	if ca == nil {
		n.log.Warn("no client certificate authority is configured, the kubelet API accepts only bearer tokens")
	}
	auth, err := kubelet.Delegate(p.clients.main, n.cfg.NodeName, ca)
	if err != nil {
		return nil, err
	}
	tls, selfMade, err := kubelet.TLS(n.cfg.TLSCert, n.cfg.TLSKey, n.cfg.NodeName, n.cfg.NodeIP)
	if err != nil {
		return nil, err
	}
	if selfMade != "" {
		n.log.Warn("serving a self-signed certificate on the kubelet API", "err", selfMade)
	}
	return kubelet.New(kubelet.Config{
		Addr: net.JoinHostPort(n.cfg.BindAddress, fmt.Sprint(n.cfg.KubeletPort)), TLS: tls, Auth: auth, Backend: p.provider, Healthy: p.provider.Health, Log: n.log,
		More: n.routes(p),
	})
}

// routes are those of the kubelet API that the provider does not serve.
func (n *Node) routes(p *parts) map[string]http.Handler {
	all := p.stats.Routes()
	all["GET /configz"] = n.cfg.configz()
	all["GET /metrics"] = promhttp.HandlerFor(p.registry, promhttp.HandlerOpts{})
	return all
}

// record starts writing events and returns the function that stops it. Events have their own client, so that statuses
// never queue behind them.
func (p *parts) record() (stop func()) {
	w := p.events.StartRecordingToSink(&typed.EventSinkImpl{Interface: p.clients.events.CoreV1().Events("")})
	return func() {
		w.Stop()
		p.events.Shutdown()
	}
}

// control runs virtual-kubelet's pod controller.
func (p *parts) control(ctx context.Context) error {
	quick := func() workqueue.TypedRateLimiter[any] { // the default allows ten pods a second
		return workqueue.NewTypedItemExponentialFailureRateLimiter[any](time.Millisecond, 10*time.Second)
	}
	// Never started: the provider reads ConfigMaps and Secrets one by one; virtual-kubelet only requires listers.
	idle := informers.NewSharedInformerFactory(p.clients.main, 0).Core().V1()
	controller, err := vknode.NewPodController(vknode.PodControllerConfig{
		PodClient: p.provider.PodClient(), PodInformer: p.provider.PodInformer(p.pods.Core().V1().Pods()), Provider: p.provider, EventRecorder: silence{},
		ConfigMapInformer: idle.ConfigMaps(), SecretInformer: idle.Secrets(), ServiceInformer: idle.Services(),
		SkipDownwardAPIResolution:            true,
		SyncPodsFromKubernetesRateLimiter:    quick(),
		DeletePodsFromKubernetesRateLimiter:  quick(),
		SyncPodStatusFromProviderRateLimiter: quick(),
	})
	if err != nil {
		return fmt.Errorf("set up pod controller: %w", err)
	}
	p.pods.Start(ctx.Done())
	defer p.pods.Shutdown()
	return controller.Run(ctx, podWorkers)
}

// slim drops fields that nothing here reads from the objects in the cache.
func slim(obj any) (any, error) {
	if pod, ok := obj.(*corev1.Pod); ok {
		pod.ManagedFields = nil
	}
	return obj, nil
}

// serveMetrics serves Prometheus in plain HTTP; the listen address limits who can reach it. If the port is taken, only
// metrics are missing.
func (n *Node) serveMetrics(ctx context.Context, registry *prometheus.Registry) error {
	if n.cfg.MetricsAddr == "" {
		return nil
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", n.cfg.MetricsAddr)
	if err != nil {
		n.log.Warn("metrics are not served", "err", err)
		return nil
	}
	if at, ok := l.Addr().(*net.TCPAddr); ok && !at.IP.IsLoopback() {
		n.log.Warn("everybody who reaches this address can read the metrics; the kubelet API serves them only to clients that may get nodes/metrics", "addr", l.Addr().String())
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	<-ctx.Done()
	_ = srv.Close()
	<-done
	return ctx.Err()
}
