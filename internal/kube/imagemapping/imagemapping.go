// Package imagemapping brings the VirtletImageMapping objects of a cluster to the node's image names: it watches those
// in kube-system, hands their specs over as they are, and writes into their status what is wrong with them.
//
// It does not read or judge rules itself, and it keeps nothing: whoever it hands them to may forget, and is told again.
package imagemapping

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

// Source is what the mappings are said to come from.
const Source = "kubernetes"

// Namespace is where objects count.
const Namespace = "kube-system"

// Resource is what is watched.
var Resource = schema.GroupVersionResource{Group: "virtlet.k8s", Version: "v1", Resource: "virtletimagemappings"}

const (
	defaultResync = 30 * time.Second // how long a node that forgot, by a restart, stays without mappings at most
	firstRetry    = time.Second      // after a failure, doubling up to the resync
)

// Syncer takes the mappings; image.Puller is one.
type Syncer interface {
	SyncMappings(ctx context.Context, source string, mappings []image.Mapping) ([]image.MappingProblem, error)
}

// Config is what a Watcher works with. Resync may be zero.
type Config struct {
	Client dynamic.Interface
	Syncer Syncer
	Log    *slog.Logger
	Resync time.Duration // mappings are handed over again after that long
}

// Watcher keeps the node's mappings what the cluster's objects say.
type Watcher struct {
	cfg   Config
	dirty chan struct{}

	settled chan struct{}
	once    sync.Once

	said map[string]string // verdict of ours last seen to, by name
	told string            // failure that was logged and still lasts
}

// New returns a watcher that does nothing before Run.
func New(cfg Config) (*Watcher, error) {
	if cfg.Client == nil || cfg.Syncer == nil || cfg.Log == nil {
		return nil, errdefs.Invalidf("the watcher of image mappings needs a client, a syncer and a logger")
	}
	cfg.Resync = cmp.Or(cfg.Resync, defaultResync)
	return &Watcher{cfg: cfg, dirty: make(chan struct{}, 1), settled: make(chan struct{}), said: map[string]string{}}, nil
}

// Settled is closed once the mappings were handed over for the first time, or the cluster turned out to have none to
// give. Before that, names may mean something else than they will.
func (w *Watcher) Settled() <-chan struct{} { return w.settled }

// Poke has the mappings handed over now, for when the one who takes them may have forgotten. It does not block.
func (w *Watcher) Poke() {
	select {
	case w.dirty <- struct{}{}:
	default:
	}
}

// Run watches until ctx ends. A cluster without the resource, or that does not let us see it, is asked again; so is one
// that is away. It returns the error of ctx.
func (w *Watcher) Run(ctx context.Context) error {
	if err := w.await(ctx); err != nil {
		return err
	}
	informer := dynamicinformer.NewFilteredDynamicInformer(w.cfg.Client, Resource, Namespace, 0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}, nil)
	// client-go logs every failure of a watch in its own words; losing the resource or the server is not worth that.
	if err := informer.Informer().SetWatchErrorHandlerWithContext(func(ctx context.Context, _ *cache.Reflector, err error) {
		w.cfg.Log.DebugContext(ctx, "watch of image mappings failed, trying again", "err", err)
	}); err != nil {
		return fmt.Errorf("watch image mappings: %w", err)
	}
	if _, err := informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { w.Poke() },
		UpdateFunc: func(before, now any) {
			if generation(before) != generation(now) {
				w.Poke()
			}
		},
		DeleteFunc: func(any) { w.Poke() },
	}); err != nil {
		return fmt.Errorf("watch image mappings: %w", err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { informer.Informer().RunWithContext(ctx) })
	defer wg.Wait()
	if !cache.WaitForCacheSync(ctx.Done(), informer.Informer().HasSynced) {
		return ctx.Err()
	}
	return w.keep(ctx, informer.Informer().GetStore())
}

// await returns when the resource can be listed.
func (w *Watcher) await(ctx context.Context) error {
	wait := firstRetry
	for {
		_, err := w.cfg.Client.Resource(Resource).Namespace(Namespace).List(ctx, metav1.ListOptions{Limit: 1})
		if err == nil {
			return nil
		}
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
			w.settle()
		}
		if !apierrors.IsNotFound(err) {
			w.tell(ctx, fmt.Errorf("list them: %w", err))
		}
		if err := pause(ctx, wait, nil); err != nil {
			return err
		}
		wait = min(2*wait, w.cfg.Resync)
	}
}

// keep hands over what store holds whenever it changed, and now and then.
func (w *Watcher) keep(ctx context.Context, store cache.Store) error {
	retry := firstRetry
	for {
		next := w.cfg.Resync
		objects, problems, err := w.sync(ctx, store)
		if err != nil {
			next, retry = retry, min(2*retry, w.cfg.Resync)
			w.tell(ctx, fmt.Errorf("hand them over: %w", err))
		} else {
			retry = firstRetry
			w.settle()
			if err := w.judge(ctx, objects, problems); err != nil {
				w.tell(ctx, err)
			} else {
				w.told = ""
			}
		}
		if err := pause(ctx, next, w.dirty); err != nil {
			return err
		}
	}
}

// sync hands over all objects and returns what is wrong with them.
func (w *Watcher) sync(ctx context.Context, store cache.Store) ([]*unstructured.Unstructured, []image.MappingProblem, error) {
	var objects []*unstructured.Unstructured
	for _, item := range store.List() {
		if object, ok := item.(*unstructured.Unstructured); ok && object.GetDeletionTimestamp() == nil {
			objects = append(objects, object)
		}
	}
	slices.SortFunc(objects, func(a, b *unstructured.Unstructured) int { return cmp.Compare(a.GetName(), b.GetName()) })
	mappings := make([]image.Mapping, 0, len(objects))
	for _, object := range objects {
		spec := object.Object["spec"]
		if spec == nil {
			spec = map[string]any{}
		}
		text, err := yaml.Marshal(spec)
		if err != nil {
			return nil, nil, fmt.Errorf("read image mapping %s: %w", object.GetName(), err)
		}
		mappings = append(mappings, image.Mapping{Name: object.GetName(), YAML: text})
	}
	problems, err := w.cfg.Syncer.SyncMappings(ctx, Source, mappings)
	return objects, problems, err
}

// judge writes into each object's status what is wrong with it.
func (w *Watcher) judge(ctx context.Context, objects []*unstructured.Unstructured, problems []image.MappingProblem) error {
	byName := map[string][]image.MappingProblem{}
	for _, p := range problems {
		byName[p.Mapping] = append(byName[p.Mapping], p)
	}
	var errs []error
	for _, object := range objects {
		errs = append(errs, w.report(ctx, object, byName[object.GetName()]))
	}
	w.forget(objects)
	return errors.Join(errs...)
}

func (w *Watcher) settle() { w.once.Do(func() { close(w.settled) }) }

// tell logs a failure once for as long as it lasts.
func (w *Watcher) tell(ctx context.Context, err error) {
	if w.told != err.Error() && ctx.Err() == nil {
		w.told = err.Error()
		w.cfg.Log.WarnContext(ctx, "image mappings of the cluster are behind, trying again", "err", err)
	}
}

// pause waits until d is over or wake says so. It returns the error of ctx when that ends before.
func pause(ctx context.Context, d time.Duration, wake <-chan struct{}) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-wake:
	case <-timer.C:
	}
	return nil
}

func generation(obj any) int64 {
	if o, ok := obj.(*unstructured.Unstructured); ok {
		return o.GetGeneration()
	}
	return -1
}
