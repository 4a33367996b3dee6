package podvolumes

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	certv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/csi"
	"cocoonstack.io/cocoon/internal/kube/pauses"
)

// watchMost is the longest pause before a watch that ended is restarted.
const watchMost = 30 * time.Second

func watchPauses() wait.Backoff { return pauses.Growing(time.Second, watchMost, pauses.Many) }

// Objects watches the ConfigMaps, Secrets and ClusterTrustBundles that the volumes of running pods use. As in the kubelet, each
// object has one watch by name, because a node may not list all objects; the ClusterTrustBundles of a signer share one. All pods
// that refer to the object share the watch, which ends with the last of them. Watched ConfigMaps and Secrets are read from here, all
// others from the API server.
type Objects struct {
	api   Resolver
	log   *slog.Logger
	spawn Spawn // runs the watches until the virtual node ends

	Plugins Plugins // volumes of CSI drivers; nil: the node has none

	mu  sync.Mutex
	all map[objectKey]*object // the lock also guards the fields of each object
}

// Plugins publish volumes of CSI drivers for pods; csi.Plugins implements it.
type Plugins interface {
	Persistent(ctx context.Context, pod *corev1.Pod, volume string, pv *corev1.PersistentVolume, readOnly bool, ask csi.Ask) (convert.Disk, error)
	Inline(ctx context.Context, pod *corev1.Pod, v *corev1.Volume, ask csi.Ask) (convert.Disk, error)
	// Stale reports whether a volume of pod must be published again, because the machine has started since.
	Stale(ctx context.Context, pod *corev1.Pod) (bool, error)
	// Release unpublishes all volumes of pod. Its VM must be gone.
	Release(ctx context.Context, pod *corev1.Pod) error
	// Usage asks the driver of a volume of pod how full it is. Errors: Unsupported if it does not know.
	Usage(ctx context.Context, pod *corev1.Pod, volume string) (csinode.Usage, error)
}

type objectKey struct {
	namespace string // "" if the object has none
	convert.Object
}

// keyOf is the key of what a volume of a pod in namespace uses.
func keyOf(namespace string, ref convert.Object) objectKey {
	if ref.Kind == convert.KindTrustBundle || ref.Kind == convert.KindSignersTrustBundles {
		namespace = ""
	}
	return objectKey{namespace, ref}
}

// object is one watched object.
type object struct {
	cancel    context.CancelFunc
	followers map[*keeper]bool
	last      metav1.Object // the ConfigMap or Secret of the last event; nil: no event yet, or deleted
	gone      bool          // the last event says that the object was deleted
}

// NewObjects returns Objects that watch nothing yet. Precondition of follow: Start was called.
func NewObjects(client kubernetes.Interface, log *slog.Logger) *Objects {
	return &Objects{api: Resolver{client}, log: log, all: map[objectKey]*object{}}
}

// Start sets the function that runs the watches.
func (o *Objects) Start(spawn Spawn) { o.spawn = spawn }

// follow pokes k after each change of the listed objects in namespace, until unfollow.
func (o *Objects) follow(k *keeper, namespace string, list []convert.Object) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, ref := range list {
		key := keyOf(namespace, ref)
		if w := o.all[key]; w != nil {
			w.followers[k] = true
			continue
		}
		w := &object{followers: map[*keeper]bool{k: true}}
		o.all[key] = w
		w.cancel = o.spawn(func(ctx context.Context) { o.watch(ctx, key, w) })
	}
}

// unfollow ends what follow began.
func (o *Objects) unfollow(k *keeper, namespace string, list []convert.Object) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, ref := range list {
		key := keyOf(namespace, ref)
		w := o.all[key]
		if w == nil {
			continue
		}
		delete(w.followers, k)
		if len(w.followers) == 0 {
			delete(o.all, key)
			w.cancel()
		}
	}
}

// ConfigMap implements convert.Resolver.
func (o *Objects) ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	last, err := o.look(objectKey{namespace, convert.Object{Kind: convert.KindConfigMap, Name: name}})
	if cm, ok := last.(*corev1.ConfigMap); ok || err != nil {
		return cm, err
	}
	return o.api.ConfigMap(ctx, namespace, name)
}

// Secret implements convert.Resolver.
func (o *Objects) Secret(ctx context.Context, namespace, name string) (*corev1.Secret, error) {
	last, err := o.look(objectKey{namespace, convert.Object{Kind: convert.KindSecret, Name: name}})
	if s, ok := last.(*corev1.Secret); ok || err != nil {
		return s, err
	}
	return o.api.Secret(ctx, namespace, name)
}

// TrustBundle implements convert.Source.
func (o *Objects) TrustBundle(ctx context.Context, name string) (*certv1.ClusterTrustBundle, error) {
	b, err := o.api.Client.CertificatesV1().ClusterTrustBundles().Get(ctx, name, metav1.GetOptions{})
	return b, classify(err)
}

// TrustBundles implements convert.Source.
func (o *Objects) TrustBundles(ctx context.Context, signer string, match labels.Selector) ([]certv1.ClusterTrustBundle, error) {
	if _, selectable := match.Requirements(); !selectable {
		return nil, nil // as text, a selector that matches nothing is one that matches everything
	}
	list, err := o.api.Client.CertificatesV1().ClusterTrustBundles().List(ctx, metav1.ListOptions{FieldSelector: ofSigner(signer), LabelSelector: match.String()})
	if err != nil {
		return nil, classify(err)
	}
	return list.Items, nil
}

func ofSigner(signer string) string {
	return fields.OneTermEqualSelector("spec.signerName", signer).String()
}

// look returns the object of the last event, or nil if there was no event yet. Errors: NotFound if the object was deleted.
func (o *Objects) look(key objectKey) (metav1.Object, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch w := o.all[key]; {
	case w == nil:
		return nil, nil
	case w.gone:
		return nil, errdefs.NotFoundf("%s %s/%s was deleted", key.Kind, key.namespace, key.Name)
	default:
		return w.last, nil
	}
}

// watch keeps w up to date until ctx ends or the object is immutable.
func (o *Objects) watch(ctx context.Context, key objectKey, w *object) {
	retries := watchPauses()
	for {
		began := time.Now()
		final, err := o.stream(ctx, key, w)
		if final || ctx.Err() != nil {
			return
		}
		if err != nil {
			o.log.Debug("watch of an object ended", "pod", key.namespace+"/"+key.Name, "err", err)
		}
		if time.Since(began) > watchMost {
			retries = watchPauses()
		}
		if !pauses.Sleep(ctx, nil, retries.Step(), false) {
			return
		}
	}
}

// stream runs one watch. It gives no resource version, so the server begins with the current object, and no change between two
// watches is missed. It returns true if the object is immutable.
func (o *Objects) stream(ctx context.Context, key objectKey, w *object) (final bool, err error) {
	opts := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", key.Name).String()}
	var stream watch.Interface
	switch key.Kind {
	case convert.KindSecret:
		stream, err = o.api.Client.CoreV1().Secrets(key.namespace).Watch(ctx, opts)
	case convert.KindConfigMap:
		stream, err = o.api.Client.CoreV1().ConfigMaps(key.namespace).Watch(ctx, opts)
	case convert.KindTrustBundle:
		stream, err = o.api.Client.CertificatesV1().ClusterTrustBundles().Watch(ctx, opts)
	case convert.KindSignersTrustBundles:
		stream, err = o.api.Client.CertificatesV1().ClusterTrustBundles().Watch(ctx, metav1.ListOptions{FieldSelector: ofSigner(key.Name)})
	}
	if err != nil {
		return false, err
	}
	defer stream.Stop()
	for {
		select {
		case e, ok := <-stream.ResultChan():
			switch {
			case !ok:
				return false, nil
			case e.Type == watch.Error:
				return false, apierrors.FromObject(e.Object)
			}
			obj, ok := e.Object.(metav1.Object)
			if ok && (obj.GetName() == key.Name || key.Kind == convert.KindSignersTrustBundles) && o.record(w, e.Type, obj) {
				return true, nil
			}
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
}

// record records an event and pokes the followers. It returns true if the object is immutable, so no other event will come.
func (o *Objects) record(w *object, kind watch.EventType, obj metav1.Object) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w.last, w.gone = obj, false; kind == watch.Deleted {
		w.last, w.gone = nil, true
	}
	for k := range w.followers {
		k.poke()
	}
	if w.gone {
		return false
	}
	var immutable *bool
	switch obj := obj.(type) {
	case *corev1.ConfigMap:
		immutable = obj.Immutable
	case *corev1.Secret:
		immutable = obj.Immutable
	}
	return immutable != nil && *immutable
}

// Resolver reads a ConfigMap or Secret from the API server when a pod needs it. A node may not list all of them.
type Resolver struct{ Client kubernetes.Interface }

// ConfigMap implements convert.Resolver.
func (r Resolver) ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	cm, err := r.Client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
	return cm, classify(err)
}

// Secret implements convert.Resolver.
func (r Resolver) Secret(ctx context.Context, namespace, name string) (*corev1.Secret, error) {
	s, err := r.Client.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
	return s, classify(err)
}

func classify(err error) error {
	switch {
	case err == nil:
		return nil
	case apierrors.IsNotFound(err):
		return errdefs.As(errdefs.NotFound, err)
	}
	return errdefs.As(errdefs.Unavailable, fmt.Errorf("read from the API server: %w", err))
}
