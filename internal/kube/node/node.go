// Package node is the virtual node itself: its object in the API, its capacity, its conditions.
//
// It measures the host and checks the VM engine. It does not handle pods. The heartbeat (lease and status) is sent by
// virtual-kubelet's node controller, to which it provides the data.
package node

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/probe"
	"cocoonstack.io/cocoon/internal/kube/stats"
)

// Config describes one node.
type Config struct {
	Name       string
	IP         string // its InternalIP
	Pool       string // label; "" is default
	CPUClass   string // label: nodes of one class can resume each other's snapshots of memory; "": not set
	ProviderID string
	Version    string // shown as kubelet and runtime version
	Port       int32  // of the kubelet API
	Reserve    int    // per cent of the host that is not offered to pods
	Sizes      Sizes
	Root       string       // directory of the VMs' disks
	Proc       string       // "" is /proc
	Healthy    func() error // checks that the VM engine answers
	// Hypervisor describes the default hypervisor of VMs, or returns why it is unusable; an Unavailable error is no answer.
	// Nil: not known.
	Hypervisor func(context.Context) (string, error)
	// Strays counts the VMs on the machine of which the engine has no record; an error is no answer. Nil: not known.
	Strays func(context.Context) (int, error)
	// Snapshots lists the snapshots that can be cloned here without a transfer, for schedulers; an error is no answer. Nil:
	// not known.
	Snapshots func(context.Context) ([]corev1.ContainerImage, error)
	ICMP      probe.Socket // the socket type for pinging guests
	NoRole    bool         // omit the role label: the API server forbids it to a node's own credentials
}

// interval is how often the host is measured; the engine is queried every sixth time.
const (
	interval   = 10 * time.Second
	engineTurn = 6
)

// Node provides virtual-kubelet's node controller with the node.
type Node struct {
	cfg  Config
	host stats.Host
	turn int // used only by Run's goroutine
	hv   hypervisor

	strays *int                    // as last reported; nil: never
	has    []corev1.ContainerImage // snapshots, as last reported

	mu     sync.Mutex
	node   *corev1.Node
	notify func(*corev1.Node)
	told   int64 // bytes of free disk from which the allocatable storage was computed
	poke   chan struct{}

	claimed chan struct{} // closed when no other machine serves the name
	once    sync.Once
}

// New measures the host once and returns the node.
func New(cfg Config) (*Node, error) {
	if cfg.Reserve < 0 || cfg.Reserve > 100 {
		return nil, errdefs.Invalidf("invalid reserve of %d per cent; use 0 to 100", cfg.Reserve)
	}
	cfg.Pool = cmp.Or(cfg.Pool, "default")
	n := &Node{cfg: cfg, host: stats.Host{Proc: cfg.Proc, Root: cfg.Root}, poke: make(chan struct{}, 1), claimed: make(chan struct{})}
	u, err := measure(n.host)
	if err != nil {
		return nil, fmt.Errorf("measure this host: %w", err)
	}
	n.node = n.object(u)
	return n, nil
}

// Object returns the current node object.
func (n *Node) Object() *corev1.Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.node.DeepCopy()
}

// Taint keeps pods away that do not ask for VMs.
func Taint() corev1.Taint {
	return corev1.Taint{Key: contract.TaintKey, Value: contract.TaintValue, Effect: corev1.TaintEffectNoSchedule}
}

func (n *Node) object(u usage) *corev1.Node {
	n.told = steady(0, u.diskFree)
	u.diskFree = n.told
	all, allocatable := capacity(u, n.cfg.Sizes, n.cfg.Reserve)
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: n.cfg.Name,
			Labels: map[string]string{
				"type": "virtual-kubelet", corev1.LabelHostname: n.cfg.Name,
				corev1.LabelOSStable: "linux", corev1.LabelArchStable: runtime.GOARCH,
				contract.LabelPool: n.cfg.Pool, contract.LabelNodeRole: "",
			},
		},
		Spec: corev1.NodeSpec{ProviderID: n.cfg.ProviderID, Taints: []corev1.Taint{Taint()}},
		Status: corev1.NodeStatus{
			Capacity: all, Allocatable: allocatable,
			NodeInfo:        n.info(),
			Addresses:       []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: n.cfg.Name}},
			DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: n.cfg.Port}},
		},
	}
	if n.cfg.IP != "" {
		node.Status.Addresses = append([]corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: n.cfg.IP}}, node.Status.Addresses...)
	}
	if n.cfg.CPUClass != "" {
		node.Labels[contract.LabelSnapshotCPUClass] = n.cfg.CPUClass
	}
	if n.cfg.NoRole {
		delete(node.Labels, contract.LabelNodeRole)
	}
	node.Status.Conditions = n.conditions(nil, u, nil, hypervisor{}, time.Now())
	return node
}

func (n *Node) info() corev1.NodeSystemInfo {
	first := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(b))
	}
	info := corev1.NodeSystemInfo{
		OperatingSystem: "linux", Architecture: runtime.GOARCH, KubeletVersion: n.cfg.Version,
		ContainerRuntimeVersion: contract.ContainerIDScheme + n.cfg.Version,
		MachineID:               first("/etc/machine-id"), BootID: first("/proc/sys/kernel/random/boot_id"), OSImage: osImage(),
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		info.KernelVersion = unix.ByteSliceToString(u.Release[:])
	}
	return info
}

func osImage() string {
	b, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "linux"
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); ok {
			return strings.Trim(v, `"`)
		}
	}
	return "linux"
}

// Ping is virtual-kubelet's heartbeat check. It only confirms that this process runs; the Ready condition reports the
// engine's state.
func (n *Node) Ping(ctx context.Context) error { return ctx.Err() }

// NotifyNodeStatus sets the callback for changes of the node.
func (n *Node) NotifyNodeStatus(_ context.Context, fn func(*corev1.Node)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.notify = fn
}

// Poke triggers a refresh of the conditions now.
func (n *Node) Poke() {
	select {
	case n.poke <- struct{}{}:
	default:
	}
}

// Run updates the conditions until ctx ends.
func (n *Node) Run(ctx context.Context) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		n.refresh(ctx)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		case <-n.poke:
		}
	}
}

// refresh measures the host, and notifies the node controller if a condition or the offered resources have changed.
func (n *Node) refresh(ctx context.Context) {
	u, err := measure(n.host)
	n.ask(ctx)
	n.mu.Lock()
	status := &n.node.Status
	before := status.Conditions
	after := n.conditions(before, u, err, n.hv, time.Now())
	status.Conditions = after
	changed := !alike(before, after) || !apiequality.Semantic.DeepEqual(status.Images, n.has)
	status.Images = n.has
	if err == nil {
		n.told = steady(n.told, u.diskFree)
		u.diskFree = n.told
		all, allocatable := capacity(u, n.cfg.Sizes, n.cfg.Reserve)
		changed = changed || !same(all, status.Capacity) || !same(allocatable, status.Allocatable)
		status.Capacity, status.Allocatable = all, allocatable
	}
	notify, node := n.notify, n.node.DeepCopy()
	n.mu.Unlock()
	if notify == nil || !changed {
		return
	}
	// The callback waits for a controller that may have ended. It must not block this goroutine then.
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		notify(node)
	}()
	select {
	case <-sent:
	case <-ctx.Done():
	}
}

// ask queries the engine every engineTurn turns, and in every turn until it has answered once. Without an answer, the earlier
// values stay.
func (n *Node) ask(ctx context.Context) {
	due := n.turn%engineTurn == 0 || n.cfg.Hypervisor != nil && !n.hv.asked
	n.turn++
	if !due {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, interval)
	defer cancel()
	if n.cfg.Hypervisor != nil {
		what, err := n.cfg.Hypervisor(ctx)
		if ctx.Err() != nil || errdefs.IsUnavailable(err) {
			return
		}
		n.hv = hypervisor{asked: true, what: what, err: err}
	}
	if n.cfg.Strays != nil {
		if count, err := n.cfg.Strays(ctx); err == nil {
			n.strays = &count
		}
	}
	if n.cfg.Snapshots != nil {
		if has, err := n.cfg.Snapshots(ctx); err == nil {
			n.has = has
		}
	}
}
