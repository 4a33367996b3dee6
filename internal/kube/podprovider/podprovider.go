// Package podprovider is the virtual-kubelet provider of Cocoon: it runs one VM per Pod and reports its true state.
//
// Every pod has its own goroutine (worker), which takes one step at a time: it observes, decides (decide.go) and lets one of
// its parts act. The parts follow the life of a VM: creation, runs, hibernation, forkOffer, teardown. Each part owns its
// state. All parts build on base: the services of the node (common), the reports about the pod (report), and the state that
// the worker shares with other goroutines (podState). The index finds the podState of a pod. Other goroutines use only the
// podState, never the worker.
//
// virtual-kubelet's queues never wait, because its calls only record the wanted state. Statuses are sent as patches and not
// through virtual-kubelet's callback, because the callback writes back a whole copy of the pod, which may be stale; see
// writer.go.
//
// The package does not run VMs (that is the Runtime's job) and does not serve the kubelet's HTTP API. Package podstatus
// computes the statuses, package podhealth probes the guests, package podvolumes reads the volumes, package podsnapshots
// stores the saved states. The package keeps no state on disk. After a restart, it reads all that it needs from the cluster
// and the labels of the VMs.
package podprovider

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podhealth"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
	"cocoonstack.io/cocoon/internal/vm"
)

// Runtime runs VMs. The engine is one implementation, the node API client is another. A ref is an ID, a name or a unique
// prefix of an ID. Only the wiring uses it directly; other code uses operator and tenant.
type Runtime interface {
	overview
	machines
	guest.Access
	guest.Containers
	puller
}

// overview reads all VMs of the node.
type overview interface {
	List(ctx context.Context) ([]vm.Record, error)
	// Watch reports changes after the given revision until ctx ends or fn fails. A negative revision first reports every
	// existing VM as ADDED. Errors: FailedPrecondition if the history does not reach back so far.
	Watch(ctx context.Context, after int64, fn func(vm.Event) error) error
	// Stats asks the guest for its resource usage.
	Stats(ctx context.Context, ref string) (guest.Stats, error)
}

type machines interface {
	Launch(ctx context.Context, spec vm.Spec) (vm.Record, error)
	Start(ctx context.Context, ref string) (vm.Record, error)
	// Stop asks the guest to shut down and kills it after the grace period. A negative grace means that of the spec. 0
	// kills the guest immediately.
	Stop(ctx context.Context, ref string, grace time.Duration) (vm.Record, error)
	// Pause stops the CPUs of the running guest until Unpause. Both are idempotent.
	Pause(ctx context.Context, ref string) (vm.Record, error)
	Unpause(ctx context.Context, ref string) (vm.Record, error)
	// Reboot starts the running guest again, with hard at once. It returns when that has begun.
	Reboot(ctx context.Context, ref string, hard bool) (vm.Record, error)
	// Resize gives the running VM the CPUs and memory that it lacks of a size. FailedPrecondition if it cannot have that while it runs.
	Resize(ctx context.Context, ref string, to vm.Size) (vm.Record, error)
	// AttachVolume gives a VM a volume of the volume store as a disk; the guest mounts it at path unless that is "". It is no error if
	// the VM has it so already. DetachVolume takes it away; NotFound if the VM does not have it.
	AttachVolume(ctx context.Context, ref string, use vm.VolumeUse, path string) (vm.Record, error)
	DetachVolume(ctx context.Context, ref, volume string) (vm.Record, error)
	// DumpMemory writes the memory of the running VM to a volume that no VM has, as the file with that name.
	DumpMemory(ctx context.Context, ref, volume, file string) error
	nicPlugger
	Remove(ctx context.Context, ref string, force bool) error
	Inspect(ctx context.Context, ref string) (vm.Record, error)
}

type nicPlugger interface {
	// AttachNIC gives a VM one more interface on a network. It is no error if the VM has one beside its first there already. DetachNIC takes
	// away that on a network, or with a hardware address; NotFound if the VM does not have it.
	AttachNIC(ctx context.Context, ref string, want vm.NICSpec) (vm.Record, error)
	DetachNIC(ctx context.Context, ref, nic string) (vm.Record, error)
	// SetLink sets the link of the interface with a hardware address down, or up; NotFound if the VM does not have it.
	SetLink(ctx context.Context, ref, nic string, down bool) (vm.Record, error)
}

type puller interface {
	// Pull makes sure that an image is in the store; see image.Puller.
	Pull(ctx context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error)
}

// OrphanPolicy says what the provider does at start with a VM whose pod no longer exists.
type OrphanPolicy string

// The orphan policies.
const (
	OrphanAlert   OrphanPolicy = "alert"   // log and count the VM, and keep it
	OrphanDestroy OrphanPolicy = "destroy" // remove the VM
	OrphanKeep    OrphanPolicy = "keep"    // keep the VM without a report
)

// Config holds the settings that differ between nodes. A zero duration means the default.
type Config struct {
	Node       convert.Node
	Orphans    OrphanPolicy
	LeasesPath string // lease file to look up a missing address; "" for none
	Registry   podsnapshots.Registry

	StaticForward []netip.Prefix // networks to which ports of static pods may be forwarded

	BackoffBase time.Duration // restart delays of a crashing guest: 0, base, 2×base … (default 10 s)
	BackoffMax  time.Duration // default 5 min
	// Settle is how long the first "ContainerCreating" status is held back. If the VM is up before that, the status is not
	// written (default 500 ms; negative: no delay).
	Settle time.Duration
}

// PodGetter is the part of a pod lister that the provider needs. It returns the informer's state of the pod.
type PodGetter func(namespace, name string) (*corev1.Pod, error)

// Placements claims this node for the VMs that must stay on it; placement.Claims implements it.
type Placements interface {
	// Hold claims this node for the pod's VM, which is about to be created. Errors: FailedPrecondition if the VM's state is on
	// another machine.
	Hold(ctx context.Context, pod *corev1.Pod) error
	// Holder returns the node that has claimed the VM, found false for none. The claim of a VM ends with its owner.
	Holder(ctx context.Context, namespace, vmName string) (node string, found bool, err error)
}

// Deps are the services that the provider uses. All are required except Snapshots, Placements, Services, Plugins, Policed and StandIn. Without Snapshots
// or Placements, pods that ask for snapshots or to stay on a node are refused.
type Deps struct {
	Runtime    Runtime
	Snapshots  podsnapshots.Snapshots
	Placements Placements
	Client     kubernetes.Interface
	Recorder   record.EventRecorder
	Prober     podhealth.Prober
	Cached     PodGetter
	Services   ServiceLister        // nil: guests get no information about Services
	Plugins    podvolumes.Plugins   // volumes of CSI drivers; nil: the node has none
	Policed    func() (bool, error) // reports whether a new VM is closed until its network policies are set; nil: no VM is. After an error no VM is created
	// StandIn returns the hypervisor that runs VMs in the place of one that the node lacks; nil: none does. Errors: Unavailable.
	StandIn func(context.Context) (string, error)
	Metrics *Metrics
	Log     *slog.Logger
}

// ServiceLister returns the Services of a namespace from a cache. Errors: Unavailable until the cache is synced.
type ServiceLister func(namespace string) ([]*corev1.Service, error)
