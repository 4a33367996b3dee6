// Package node is the virtual node itself: its object in the API, its capacity, its conditions.
//
// It measures the host and asks whether the VM engine answers; pods are not its business, and the heartbeat (lease and
// status) is virtual-kubelet's node controller, which it feeds.
package node

import (
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
	CPUClass   string // label: nodes of one class go on with each other's snapshots of memory; "": not said
	ProviderID string
	Version    string // shown as kubelet and runtime version
	Port       int32  // of the kubelet API
	Reserve    int    // per cent of the host kept for itself
	Sizes      Sizes
	Root       string       // folder of the VMs' disks
	Proc       string       // "" is /proc
	Healthy    func() error // whether the VM engine answers
	// Hypervisor says what VMs run on by default, or why they cannot; an Unavailable error is no answer. Nil: not known.
	Hypervisor func(context.Context) (string, error)
	// Strays counts the VMs on the machine that the engine does not have on record; an error is no answer. Nil: not known.
	Strays func(context.Context) (int, error)
	// Snapshots names what VMs can be cloned from here without a transfer, for schedulers; an error is no answer. Nil: not known.
	Snapshots func(context.Context) ([]corev1.ContainerImage, error)
	ICMP      probe.Socket // by what guests are pinged
	NoRole    bool         // leave out the role label: the API server forbids it to a node's own credentials
}

// interval is how often the host is measured; the engine is asked what it has at every sixth time.
const (
	interval   = 10 * time.Second
	engineTurn = 6
)

// Node feeds virtual-kubelet's node controller.
type Node struct {
	cfg  Config
	host stats.Host
	turn int // of Run's goroutine alone
	hv   hypervisor

	strays *int                    // as last told; nil: never
	has    []corev1.ContainerImage // snapshots, as they were last told

	mu     sync.Mutex
	node   *corev1.Node
	notify func(*corev1.Node)
	told   int64 // bytes of free disk that the allocatable storage was reckoned from
	poke   chan struct{}

	claimed chan struct{} // closed when the name is known to be ours
	once    sync.Once
}

// New measures the host once and returns the node it makes.
func New(cfg Config) (*Node, error) {
	if cfg.Reserve < 0 || cfg.Reserve > 100 {
		return nil, errdefs.Invalidf("a reserve of %d per cent is not between 0 and 100", cfg.Reserve)
	}
	if cfg.Pool == "" {
		cfg.Pool = "default"
	}
	n := &Node{cfg: cfg, host: stats.Host{Proc: cfg.Proc, Root: cfg.Root}, poke: make(chan struct{}, 1), claimed: make(chan struct{})}
	u, err := measure(n.host)
	if err != nil {
		return nil, fmt.Errorf("measure this host: %w", err)
	}
	n.node = n.object(u)
	return n, nil
}

// Object is the node as it should be now.
func (n *Node) Object() *corev1.Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.node.DeepCopy()
}

// Taint keeps away pods that do not ask for VMs.
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

// Ping is virtual-kubelet's heartbeat check. This process is there; how the engine does is said by the Ready condition.
func (n *Node) Ping(ctx context.Context) error { return ctx.Err() }

// NotifyNodeStatus takes where to send the node when it has changed.
func (n *Node) NotifyNodeStatus(_ context.Context, fn func(*corev1.Node)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.notify = fn
}

// Poke has the conditions looked at now.
func (n *Node) Poke() {
	select {
	case n.poke <- struct{}{}:
	default:
	}
}

// Run keeps the conditions true until ctx ends.
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

// refresh measures, and tells the node controller when a condition or what the node offers has changed.
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
	// The callback waits for a controller that may have ended; it must not hold us then.
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

// ask asks the engine what it has, when it is its turn or as soon as it can tell. Without an answer, what was said stands.
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
