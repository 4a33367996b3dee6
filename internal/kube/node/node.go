// Package node provides the Node object of the virtual node: its capacity and its conditions.
//
// It measures the host and checks the VM engine. It does not handle pods. virtual-kubelet's node controller sends the
// heartbeat (lease and status) with the data of this package.
package node

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"slices"
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
	IP         string // the node's InternalIP
	Pool       string // label; "" is default
	CPUClass   string // label; nodes of one class can resume each other's live snapshots; "": not set
	ProviderID string
	Version    string // shown as kubelet and runtime version
	Port       int32  // of the kubelet API
	Reserve    int    // per cent of the host that is not offered to pods
	Sizes      Sizes
	Root       string       // directory of the VMs' disks
	Proc       string       // "" is /proc
	Sys        string       // "" is /sys
	Healthy    func() error // checks that the VM engine answers
	// Hypervisors describes the hypervisors of VMs, or returns why the default one is unusable. After an Unavailable error the node
	// keeps the earlier answer. Nil: not known.
	Hypervisors func(context.Context) (Hypervisors, error)
	// Strays counts the VMs on the machine of which the engine has no record. After an error the node keeps the earlier
	// answer. Nil: not known.
	Strays func(context.Context) (int, error)
	// Snapshots lists, for schedulers, the snapshots that can be cloned on this node without a transfer. After an error the
	// node keeps the earlier answer. Nil: not known.
	Snapshots func(context.Context) ([]corev1.ContainerImage, error)
	// Network returns why pods that start now have no network. Nil: not known, which counts as usable.
	Network func() error
	// InUse are the volumes of CSI drivers that pods have, which the cluster must not detach. Nil: none.
	InUse  func() []corev1.UniqueVolumeName
	ICMP   probe.Socket // the socket type for pinging guests
	NoRole bool         // omit the role label, because the API server does not let a node's own credentials set it
}

// Hypervisors are those of a node.
type Hypervisors struct {
	Default string             // what it is, for a person
	Usable  []contract.Backend // those that run VMs now
}

// interval is the time between two measurements of the host. The engine is queried every engineTurn intervals.
const (
	interval   = 10 * time.Second
	engineTurn = 6
)

// Node provides the node object to virtual-kubelet's node controller.
type Node struct {
	cfg  Config
	host stats.Host
	turn int // used only by Run's goroutine
	hv   hypervisor

	strays *int                    // last answer of Strays; nil: none yet
	has    []corev1.ContainerImage // last answer of Snapshots

	mu       sync.Mutex
	node     *corev1.Node
	notify   func(*corev1.Node)
	reported int64 // reported free bytes of the disk, from which the allocatable storage is computed
	poke     chan struct{}

	claimed chan struct{} // closed when it is known that no other machine serves the node
	once    sync.Once
}

// New measures the host once and returns the node.
func New(cfg Config) (*Node, error) {
	if cfg.Reserve < 0 || cfg.Reserve > 100 {
		return nil, errdefs.Invalidf("invalid reserve of %d per cent; use 0 to 100", cfg.Reserve)
	}
	cfg.Pool = cmp.Or(cfg.Pool, "default")
	n := &Node{cfg: cfg, host: stats.Host{Proc: cfg.Proc, Sys: cfg.Sys, Root: cfg.Root}, poke: make(chan struct{}, 1), claimed: make(chan struct{})}
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

// Taint returns the taint that keeps away pods without VMs.
func Taint() corev1.Taint {
	return corev1.Taint{Key: contract.TaintKey, Value: contract.TaintValue, Effect: corev1.TaintEffectNoSchedule}
}

func (n *Node) object(u usage) *corev1.Node {
	n.reported = steady(0, u.diskFree)
	u.diskFree = n.reported
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
			Features:        &corev1.NodeFeatures{SupplementalGroupsPolicy: new(true)},
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
		OperatingSystem: "linux", Architecture: runtime.GOARCH, KubeletVersion: kubeletVersion(n.cfg.Version),
		ContainerRuntimeVersion: contract.ContainerIDScheme + n.cfg.Version,
		MachineID:               first("/etc/machine-id"), BootID: first("/proc/sys/kernel/random/boot_id"), OSImage: osImage(),
		SystemUUID: first("/sys/class/dmi/id/product_uuid"), // readable by root
	}
	if info.SystemUUID == "" { // as in cAdvisor
		info.SystemUUID = info.MachineID
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		info.KernelVersion = unix.ByteSliceToString(u.Release[:])
	}
	return info
}

// kubernetesVersion is the release of Kubernetes whose API this node implements, the same as that of the libraries in go.mod.
const kubernetesVersion = "v1.37.1"

var notInVersion = regexp.MustCompile(`[^0-9A-Za-z.-]+`)

// kubeletVersion returns the version of this node in the form that programs for Kubernetes can parse: a release of Kubernetes,
// with the version of Cocoon as build metadata (semver.org).
func kubeletVersion(own string) string {
	if own = strings.Trim(notInVersion.ReplaceAllString(own, "-"), ".-"); own == "" {
		return kubernetesVersion
	}
	return kubernetesVersion + "+cocoon." + own
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

// Ping is virtual-kubelet's heartbeat check. It only confirms that this process runs. The Ready condition reports the state of
// the engine.
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
	if n.hv.asked {
		changed = n.label(n.hv.Usable) || changed
	}
	if n.cfg.InUse != nil {
		used := n.cfg.InUse()
		changed = changed || !slices.Equal(used, status.VolumesInUse)
		status.VolumesInUse = used
	}
	if err == nil {
		n.reported = steady(n.reported, u.diskFree)
		u.diskFree = n.reported
		all, allocatable := capacity(u, n.cfg.Sizes, n.cfg.Reserve)
		changed = changed || !same(all, status.Capacity) || !same(allocatable, status.Allocatable)
		status.Capacity, status.Allocatable = all, allocatable
	}
	notify, node := n.notify, n.node.DeepCopy()
	n.mu.Unlock()
	if notify == nil || !changed {
		return
	}
	// The callback waits for the node controller. It must not block this goroutine if that controller has ended.
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

// label gives the node the labels of the hypervisors that it has, and takes those of others away. It reports whether it changed one.
// Preconditions: n.mu is held.
func (n *Node) label(usable []contract.Backend) (changed bool) {
	for _, b := range contract.Backends() {
		key := contract.LabelBackend(b)
		switch has := n.node.Labels[key] != ""; {
		case slices.Contains(usable, b) && !has:
			n.node.Labels[key], changed = "true", true
		case !slices.Contains(usable, b) && has:
			delete(n.node.Labels, key)
			changed = true
		}
	}
	return changed
}

// ask queries the engine every engineTurn turns, and in every turn until the engine has answered once. Without an answer it
// keeps the earlier values.
func (n *Node) ask(ctx context.Context) {
	due := n.turn%engineTurn == 0 || n.cfg.Hypervisors != nil && !n.hv.asked
	n.turn++
	if !due {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, interval)
	defer cancel()
	if n.cfg.Hypervisors != nil {
		are, err := n.cfg.Hypervisors(ctx)
		if ctx.Err() != nil || errdefs.IsUnavailable(err) {
			return
		}
		n.hv = hypervisor{asked: true, Hypervisors: are, err: err}
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
