// Package storage offers the volumes of a node to the cluster: it makes the volumes of PersistentVolumeClaims that were scheduled to
// the node, grows and removes them, and tells the scheduler how much room there is.
//
// It speaks with the API server and with the volume store of the node. It attaches nothing: the VM of a pod has its volumes by its
// specification, see package convert. The community's library sig-storage-lib-external-provisioner decides when a volume must be made
// or removed.
package storage

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	storagelisters "k8s.io/client-go/listers/storage/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// Volumes are the volumes of the node; engine.Volumes and the client of the node API have them. A context says for which namespace a call is.
type Volumes interface {
	Create(ctx context.Context, s volume.Spec) (volume.Volume, error)
	Clone(ctx context.Context, ref string, s volume.Spec) (volume.Volume, error)
	// FromImage pulls an image and makes a volume with its disk.
	FromImage(ctx context.Context, s volume.Spec, from image.PullRequest, progress func(image.Progress)) (volume.Volume, error)
	Get(ctx context.Context, ref string) (volume.Volume, error)
	// Grow also says which guests do not use the new size yet.
	Grow(ctx context.Context, ref string, size int64) (volume.Resized, error)
	Delete(ctx context.Context, ref string) error
	List(ctx context.Context) ([]volume.Volume, error)
}

// Others are the volumes of CSI drivers of others that pods of the node have; csi.Plugins has them.
type Others interface {
	// Grow makes a driver grow one of its volumes on the node. here: a pod of the namespace has it here.
	Grow(ctx context.Context, namespace, driver, handle string, size int64) (here bool, err error)
}

// Free returns the bytes that volumes of a kind may still take, "" being the kind of volumes that ask for none. false: the node makes
// no volumes of that kind.
type Free func(ctx context.Context, kind string) (bytes int64, ok bool, err error)

// Uploads returns the image that was uploaded for a claim, by its UID and the digest that the claim has.
type Uploads func(namespace, claim, digest string) (image.PullRequest, error)

// Config holds what a Storage uses. All is required except Uploads, Others, and Snapshots and Snapshotted, which belong together.
type Config struct {
	Node        string
	Client      kubernetes.Interface
	Volumes     Volumes
	Snapshots   Snapshots                // nil: the node takes none
	Snapshotted snapshotclient.Interface // client of VolumeSnapshots
	Uploads     Uploads                  // nil: the node has no registry
	Others      Others                   // volumes of CSI drivers of others; nil: none
	Free        Free
	Events      record.EventRecorder
	Log         *slog.Logger
}

// Storage is the part of a virtual node that serves claims.
type Storage struct {
	Config
	factory informers.SharedInformerFactory
	claims  corelisters.PersistentVolumeClaimLister
	volumes corelisters.PersistentVolumeLister
	classes storagelisters.StorageClassLister
	synced  []cache.InformerSynced
	grown   workqueue.TypedRateLimitingInterface[cache.ObjectName]
	changed chan struct{} // the room has changed
	once    sync.Once     // says that the node lacks rights
	maker   *controller.ProvisionController
	making  sync.WaitGroup // the goroutines of maker
	fills   fills
}

// The provisioner's pauses between attempts, and its number of claims at a time.
const (
	retryFirst = time.Second
	retryMost  = time.Minute
	workers    = 16
)

// New returns a Storage, whose Run must end with ctx. It sends nothing before Run.
//
// The provisioner's library adds types to client-go's scheme, which every request of the process reads. So New must be called
// before the process talks with an API server.
func New(ctx context.Context, cfg Config) (*Storage, error) {
	s := &Storage{Config: cfg, factory: informers.NewSharedInformerFactoryWithOptions(cfg.Client, 0, informers.WithTransform(slim)), changed: make(chan struct{}, 1)}
	core, storage := s.factory.Core().V1(), s.factory.Storage().V1()
	s.claims, s.volumes, s.classes = core.PersistentVolumeClaims().Lister(), core.PersistentVolumes().Lister(), storage.StorageClasses().Lister()
	s.grown = workqueue.NewTypedRateLimitingQueue(limiter[cache.ObjectName]())
	for _, informer := range []cache.SharedIndexInformer{core.PersistentVolumeClaims().Informer(), core.PersistentVolumes().Informer(), storage.StorageClasses().Informer()} {
		if err := informer.SetWatchErrorHandlerWithContext(s.unreadable); err != nil {
			return nil, fmt.Errorf("watch claims and volumes: %w", err)
		}
		s.synced = append(s.synced, informer.HasSynced)
	}
	if _, err := core.PersistentVolumeClaims().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: s.claimed, UpdateFunc: func(_, now any) { s.claimed(now) }}); err != nil {
		return nil, fmt.Errorf("watch claims: %w", err)
	}
	poke := func(any) { s.poke() }
	if _, err := storage.StorageClasses().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: poke, DeleteFunc: poke, UpdateFunc: func(any, any) { s.poke() }}); err != nil {
		return nil, fmt.Errorf("watch storage classes: %w", err)
	}
	s.maker = controller.NewProvisionController(ctx, s.Client, contract.VolumeDriver, s.provisioner(),
		controller.LeaderElection(false), // each node serves the claims that are scheduled to it
		controller.AddFinalizer(true), controller.Threadiness(workers), controller.RateLimiter(limiter[string]()),
		controller.FailedProvisionThreshold(0), controller.FailedDeleteThreshold(0),
		controller.CreateProvisionedPVBackoff(wait.Backoff{Duration: retryFirst / 4, Factor: 2, Steps: 8}), // then the volume is removed, and made anew
		controller.ClaimsInformer(core.PersistentVolumeClaims().Informer()),
		controller.VolumesInformer(core.PersistentVolumes().Informer()),
		controller.ClassesInformer(storage.StorageClasses().Informer()))
	s.maker.ControllerWaitGroup(&s.making)
	return s, nil
}

func limiter[T comparable]() workqueue.TypedRateLimiter[T] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[T](retryFirst, retryMost)
}

// slim drops what nothing here reads.
func slim(obj any) (any, error) {
	if o, err := meta.Accessor(obj); err == nil {
		o.SetManagedFields(nil)
	}
	return obj, nil
}

// unreadable says once that the node has no right to see claims.
func (s *Storage) unreadable(ctx context.Context, r *cache.Reflector, err error) {
	if apierrors.IsForbidden(err) {
		s.once.Do(func() {
			s.Log.Warn("this node serves no PersistentVolumeClaims because it may not read them; apply deploy/vk-cocoon/volumes", "err", err)
		})
	}
	cache.DefaultWatchErrorHandler(ctx, r, err)
}

// Run serves claims until ctx ends. The node object must exist, or exist soon.
func (s *Storage) Run(ctx context.Context) error {
	began := time.Now()
	s.factory.Start(ctx.Done())
	defer s.factory.Shutdown()
	if !cache.WaitForCacheSync(ctx.Done(), s.synced...) {
		return ctx.Err()
	}
	if err := s.tellLeft(ctx, began); err != nil && ctx.Err() == nil {
		s.Log.Warn("node has not looked for volumes that nobody has", "err", err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { s.maker.Run(ctx) })
	wg.Go(func() { s.grow(ctx) })
	wg.Go(func() { s.announce(ctx) })
	if s.Snapshots != nil {
		wg.Go(func() { s.snapshots(ctx) })
	}
	wg.Wait()
	s.making.Wait()
	return ctx.Err()
}

// mine returns the disk of pv if it is a volume of this node, else nil.
func (s *Storage) mine(pv *corev1.PersistentVolume) *corev1.CSIPersistentVolumeSource {
	csi := pv.Spec.CSI
	if csi == nil || csi.Driver != contract.VolumeDriver || csi.VolumeAttributes[attributeNode] != s.Node {
		return nil
	}
	return csi
}

// attributeNode is the attribute of a PersistentVolume that names the node that has the volume.
const attributeNode = "node"

// behalf returns a context for calls on behalf of namespace.
func behalf(ctx context.Context, namespace string) context.Context {
	return vm.OnBehalf(ctx, vm.Owner{Namespace: namespace})
}

// ours reports whether class has its volumes from nodes of ours.
func ours(class *storagev1.StorageClass) bool { return class.Provisioner == contract.VolumeDriver }
