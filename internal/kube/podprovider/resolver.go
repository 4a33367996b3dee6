package podprovider

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// apiResolver reads ConfigMaps and Secrets from the API server, one by one when a pod needs them. A node should not list
// all of them and need not keep them.
type apiResolver struct{ client kubernetes.Interface }

func (r apiResolver) ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	cm, err := r.client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
	return cm, classify(err)
}

func (r apiResolver) Secret(ctx context.Context, namespace, name string) (*corev1.Secret, error) {
	s, err := r.client.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
	return s, classify(err)
}

// ServiceLister returns the Services of a namespace from a cache. Errors: Unavailable while it is not filled.
type ServiceLister func(namespace string) ([]*corev1.Service, error)

// services returns the Services that a pod of namespace may know.
func (p *Provider) services(namespace string) ([]*corev1.Service, error) {
	if p.Services == nil {
		return nil, nil
	}
	all, err := p.Services(namespace)
	if err != nil || namespace == metav1.NamespaceDefault {
		return all, err
	}
	more, err := p.Services(metav1.NamespaceDefault) // the API server's Service is there
	return append(slices.Clone(all), more...), err
}

func classify(err error) error {
	switch {
	case err == nil:
		return nil
	case apierrors.IsNotFound(err):
		return errdefs.As(errdefs.NotFound, err)
	}
	return errdefs.As(errdefs.Unavailable, fmt.Errorf("ask the API server: %w", err))
}
