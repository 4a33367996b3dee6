package netpolicy

import (
	"context"
	"log/slog"
	"net/netip"
	"reflect"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/pauses"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// Runtime runs the VMs of the node and enforces their policies.
type Runtime interface {
	List(ctx context.Context) ([]vm.Record, error)
	Watch(ctx context.Context, after int64, fn func(vm.Event) error) error
	Police(ctx context.Context, p network.Policies) error
}

// Config describes the node whose VMs are policed.
type Config struct {
	Node    string
	Client  kubernetes.Interface
	Runtime Runtime
	// Unpoliced returns why the network of pods without a network of their own enforces no policies, "" if it does.
	Unpoliced func(ctx context.Context) (string, error)
	Off       bool           // open every pod, also those that were policed before
	Changed   func()         // called after each change of Policed
	Static    []netip.Prefix // networks in which static pods may be peers; see networks
	Events    record.EventRecorder
	Log       *slog.Logger
}

// debounce is how long changes gather before policies are compiled, and setLimit how long the runtime may take to set them.
const (
	debounce = 20 * time.Millisecond
	setLimit = 30 * time.Second
)

// Enforcer keeps the policies of a node's VMs current.
type Enforcer struct {
	cfg        Config
	cluster    *watched // nil when off
	guests     guests
	metrics    *metrics
	complaints complaints
	poke       chan struct{} // capacity 1

	mu      sync.Mutex
	why     error         // see Policed
	settled chan struct{} // closed once Policed has an answer
	once    sync.Once
}

// New returns an Enforcer. It watches nothing before Run.
func New(cfg Config, r prometheus.Registerer) (*Enforcer, error) {
	if cfg.Changed == nil {
		cfg.Changed = func() {}
	}
	e := &Enforcer{
		cfg: cfg, metrics: newMetrics(r), poke: make(chan struct{}, 1),
		settled: make(chan struct{}), why: errdefs.Unavailablef("the network policies of the cluster are not loaded yet"),
	}
	e.guests.node = cfg.Node
	e.complaints = complaints{log: cfg.Log, events: cfg.Events, closed: e.metrics.closed}
	if cfg.Off {
		e.set(errOff)
		return e, nil
	}
	var err error
	e.cluster, err = watch(cfg.Client, cfg.Node, cfg.Static, e.wake, e.denied)
	return e, err
}

// errOff is the state in which guests are not policed, on purpose. It never leaves this package as an error.
var errOff = errdefs.Preconditionf("network policies are off")

// wake makes Run look again soon.
func (e *Enforcer) wake() {
	select {
	case e.poke <- struct{}{}:
	default:
	}
}

// Policed reports whether the VM of a new pod must be attached as policed. Errors: Unavailable while the policies are not known,
// FailedPrecondition if the node may not read them; then no pod may start, because it would be open.
func (e *Enforcer) Policed() (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.why == errOff: //nolint:errorlint // our own value, never wrapped
		return false, nil
	case e.why != nil:
		return false, e.why
	}
	return true, nil
}

// Usable returns why new pods have no network because their policies cannot be known. It returns nil while they are loaded.
func (e *Enforcer) Usable() error {
	if _, err := e.Policed(); err != nil && !errdefs.IsUnavailable(err) {
		return err
	}
	return nil
}

func (e *Enforcer) set(why error) {
	e.mu.Lock()
	changed := e.why != why //nolint:errorlint // the same state, not the same class
	e.why = why
	e.mu.Unlock()
	e.once.Do(func() { close(e.settled) })
	e.metrics.enforce(why == nil)
	if changed {
		e.cfg.Changed()
	}
}

// Wait returns when Policed has an answer.
func (e *Enforcer) Wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-e.settled:
		return nil
	}
}

// denied is called when the API server refuses to list what policies need.
func (e *Enforcer) denied(err error) {
	if e.cluster.synced() {
		return // what is known stays in force
	}
	e.mu.Lock()
	first := errdefs.IsUnavailable(e.why)
	e.mu.Unlock()
	if first {
		e.cfg.Log.Error("no pod starts, because this node may not read network policies, pods and namespaces; apply deploy/vk-cocoon/policies, or switch network policies off with VK_NETWORK_POLICY=ignore", "err", err)
		e.set(errdefs.New(errdefs.FailedPrecondition, "this node may not read the network policies, pods and namespaces of the cluster, so it cannot enforce policies; apply deploy/vk-cocoon/policies, or set VK_NETWORK_POLICY=ignore: %w", err))
	}
}

// Run enforces policies until ctx ends. It retries whatever fails.
func (e *Enforcer) Run(ctx context.Context) error {
	if !e.settle(ctx) {
		<-ctx.Done()
		return ctx.Err()
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { e.guests.follow(ctx, e.cfg.Runtime, e.wake, e.cfg.Log) })
	if e.cluster != nil {
		e.cluster.start(ctx)
		defer e.cluster.stop()
		wg.Go(func() {
			if e.cluster.wait(ctx) {
				e.set(nil)
				e.wake()
			}
		})
	}
	e.loop(ctx)
	return ctx.Err()
}

// settle finds out whether the network enforces policies. If it does not, somebody else may, and Run has nothing to do.
func (e *Enforcer) settle(ctx context.Context) bool {
	var why string
	var err error
	retries := pauses.Growing(100*time.Millisecond, 10*time.Second, pauses.Many)
	for {
		if why, err = e.cfg.Unpoliced(ctx); err == nil {
			break
		}
		if !pauses.Sleep(ctx, nil, retries.Step(), false) {
			return false
		}
	}
	if why == "" {
		return true
	}
	if !e.cfg.Off {
		e.cfg.Log.Warn("this node does not enforce network policies", "err", why)
	}
	e.set(errOff)
	return false
}

// loop compiles and sets policies after changes, and again when the runtime may have lost them.
func (e *Enforcer) loop(ctx context.Context) {
	var last *network.Policies
	contact, complaint := 0, ""
	retries := pauses.Growing(100*time.Millisecond, 10*time.Second, pauses.Many)
	var next time.Duration
	var ended time.Time // of the last push
	for pauses.Sleep(ctx, e.poke, next, next == 0) {
		// The first change after a while does not wait, because a pod may have just been started.
		if !pauses.Sleep(ctx, nil, time.Until(ended.Add(debounce)), false) {
			return
		}
		next = 0
		p, current, ok := e.compile()
		if !ok || last != nil && current == contact && reflect.DeepEqual(*last, p) {
			continue
		}
		err := e.push(ctx, p)
		if ended = time.Now(); err != nil {
			if text := err.Error(); text != complaint && ctx.Err() == nil {
				complaint = text
				e.cfg.Log.Error("network policies not set, trying again", "err", err)
			}
			next = retries.Step()
			continue
		}
		last, contact, complaint = &p, current, ""
		retries = pauses.Growing(100*time.Millisecond, 10*time.Second, pauses.Many)
	}
}

// compile returns the policies as they should be now, and the number of the contact with the runtime in which its VMs were
// listed. ok is false while something is not known yet.
func (e *Enforcer) compile() (p network.Policies, contact int, ok bool) {
	records, contact := e.guests.all()
	if contact == 0 || e.cluster != nil && !e.cluster.synced() {
		return p, contact, false
	}
	if e.cluster == nil {
		return open(e.cfg.Node, records), contact, true
	}
	began := time.Now()
	p, refused := compile(e.cfg.Node, e.cluster.read(e.cfg.Node, records))
	e.metrics.compile.Observe(time.Since(began).Seconds())
	e.complaints.tell(refused)
	return p, contact, true
}

func (e *Enforcer) push(ctx context.Context, p network.Policies) error {
	ctx, cancel := context.WithTimeout(ctx, setLimit)
	defer cancel()
	began := time.Now()
	err := e.cfg.Runtime.Police(ctx, p)
	e.metrics.pushed(p, time.Since(began), err)
	if err == nil {
		e.cfg.Log.Debug("network policies set", "count", len(p.Ingress)+len(p.Egress), "dur", time.Since(began))
	}
	return err
}
