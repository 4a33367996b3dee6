package vkcocoon

import (
	"context"
	"log/slog"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// services are the Services of the cluster that guests are told about.
type services struct {
	factory informers.SharedInformerFactory
	synced  cache.InformerSynced
	lister  listers.ServiceLister
	log     *slog.Logger

	once   sync.Once
	denied chan struct{} // closed when this node has no right to list them
}

func newServices(client kubernetes.Interface, log *slog.Logger) (*services, error) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(slimService))
	informer := factory.Core().V1().Services()
	s := &services{factory: factory, lister: informer.Lister(), synced: informer.Informer().HasSynced, log: log, denied: make(chan struct{})}
	return s, informer.Informer().SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		if apierrors.IsForbidden(err) {
			s.once.Do(func() {
				log.Warn("guests get no environment variables of Services because the node may not list Services; give its user the rights of a node", "err", err)
				close(s.denied)
			})
		}
		cache.DefaultWatchErrorHandler(ctx, r, err)
	})
}

// run watches the Services until ctx ends.
func (s *services) run(ctx context.Context) error {
	s.factory.Start(ctx.Done())
	<-ctx.Done()
	s.factory.Shutdown()
	return nil
}

// wait returns when they are known, or when this node may not list them.
func (s *services) wait(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // ends with the wait
		select {
		case <-s.denied:
			cancel()
		case <-ctx.Done():
		}
	}()
	if cache.WaitForCacheSync(ctx.Done(), s.synced) {
		return nil
	}
	select {
	case <-s.denied:
		return nil
	default:
		return ctx.Err()
	}
}

// list implements podprovider.ServiceLister.
func (s *services) list(namespace string) ([]*corev1.Service, error) {
	select {
	case <-s.denied: // there are none until the right is granted
	default:
		if !s.synced() {
			return nil, errdefs.Unavailablef("the Services of the cluster are not loaded yet")
		}
	}
	return s.lister.Services(namespace).List(labels.Everything())
}

// slimService keeps the fields of a Service that guests are told.
func slimService(obj any) (any, error) {
	if s, ok := obj.(*corev1.Service); ok {
		s.ManagedFields, s.Annotations, s.Labels, s.Spec.Selector = nil, nil, nil, nil
	}
	return obj, nil
}
