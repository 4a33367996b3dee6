// Package imagemapping syncs the VirtletImageMapping objects of a cluster to the image store of the node. It watches the
// objects in kube-system, passes their specs on unchanged, and writes the errors in the specs to the objects' status.
//
// It does not parse or validate rules itself, and it stores nothing. A receiver that has lost the mappings gets them again.
package imagemapping

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

// Source is the name under which the receiver keeps these mappings.
const Source = "kubernetes"

// Namespace is the only namespace whose objects are read.
const Namespace = "kube-system"

// Resource is the watched resource.
var Resource = schema.GroupVersionResource{Group: "virtlet.k8s", Version: "v1", Resource: "virtletimagemappings"}

const (
	defaultResync = 30 * time.Second // the longest time without mappings after a restart of the receiver
	firstRetry    = time.Second      // after a failure; doubles up to the resync interval
)

// Syncer receives the mappings; image.Puller is one.
type Syncer interface {
	SyncMappings(ctx context.Context, source string, mappings []image.Mapping) ([]image.MappingProblem, error)
}

// Config configures a Watcher. Resync may be zero.
type Config struct {
	Client dynamic.Interface
	Syncer Syncer
	Log    *slog.Logger
	Resync time.Duration // interval after which the mappings are synced again
}

// Watcher keeps the node's mappings in sync with the cluster's objects.
type Watcher struct {
	cfg   Config
	dirty chan struct{}

	settled chan struct{}
	once    sync.Once

	reported map[string]string // by object name: the last result that was written to the status
	logged   string            // the failure that was logged last; "" after a success
}

// New returns a watcher that does nothing before Run.
func New(cfg Config) (*Watcher, error) {
	if cfg.Client == nil || cfg.Syncer == nil || cfg.Log == nil {
		return nil, errdefs.Invalidf("the watcher of image mappings needs a client, a syncer and a logger")
	}
	cfg.Resync = cmp.Or(cfg.Resync, defaultResync)
	return &Watcher{cfg: cfg, dirty: make(chan struct{}, 1), settled: make(chan struct{}), reported: map[string]string{}}, nil
}

// Settled returns a channel that is closed after the first sync of the mappings, or when the cluster has no mappings to read.
// Before that, image names may resolve differently.
func (w *Watcher) Settled() <-chan struct{} { return w.settled }

// Poke triggers a sync now, for a receiver that may have lost the mappings. It does not block.
func (w *Watcher) Poke() {
	select {
	case w.dirty <- struct{}{}:
	default:
	}
}

// Run watches until ctx ends. It retries if the cluster lacks the resource, forbids access to it, or is unreachable. It
// returns the error of ctx.
func (w *Watcher) Run(ctx context.Context) error {
	if err := w.await(ctx); err != nil {
		return err
	}
	informer := dynamicinformer.NewFilteredDynamicInformer(w.cfg.Client, Resource, Namespace, 0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}, nil)
	// Without a handler, client-go logs every failure of the watch, which is too much for a missing resource or server.
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
	return w.syncLoop(ctx, informer.Informer().GetStore())
}

// await returns when the resource can be listed.
func (w *Watcher) await(ctx context.Context) error {
	return w.pauses().DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		_, err := w.cfg.Client.Resource(Resource).Namespace(Namespace).List(ctx, metav1.ListOptions{Limit: 1})
		if err == nil {
			return true, nil
		}
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
			w.settle()
		}
		if !apierrors.IsNotFound(err) {
			w.logFailure(ctx, fmt.Errorf("list image mappings: %w", err))
		}
		return false, nil
	})
}

// pauses returns the back-off after failures.
func (w *Watcher) pauses() *wait.Backoff {
	return &wait.Backoff{Duration: min(firstRetry, w.cfg.Resync), Factor: 2, Jitter: 0.1, Steps: math.MaxInt, Cap: w.cfg.Resync}
}

// syncLoop syncs the content of store on every change, and after each resync interval.
func (w *Watcher) syncLoop(ctx context.Context, store cache.Store) error {
	retry := w.pauses()
	for {
		next := w.cfg.Resync
		objects, problems, err := w.sync(ctx, store)
		if err != nil {
			next = retry.Step()
			w.logFailure(ctx, fmt.Errorf("send image mappings to cocoond: %w", err))
		} else {
			retry = w.pauses()
			w.settle()
			if err := w.reportAll(ctx, objects, problems); err != nil {
				w.logFailure(ctx, err)
			} else {
				w.logged = ""
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.dirty:
		case <-time.After(next):
		}
	}
}

// sync passes all objects to the receiver and returns the problems in them.
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

// reportAll writes the problems of each object to its status.
func (w *Watcher) reportAll(ctx context.Context, objects []*unstructured.Unstructured, problems []image.MappingProblem) error {
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

// logFailure logs a failure once while it lasts.
func (w *Watcher) logFailure(ctx context.Context, err error) {
	if w.logged != err.Error() && ctx.Err() == nil {
		w.logged = err.Error()
		w.cfg.Log.WarnContext(ctx, "image mappings of the cluster not applied, trying again", "err", err)
	}
}

func generation(obj any) int64 {
	if o, ok := obj.(*unstructured.Unstructured); ok {
		return o.GetGeneration()
	}
	return -1
}
