package podvolumes

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Resolver reads ConfigMaps and Secrets from the API server, one by one when a pod needs them. A node should not list all
// of them and need not keep them.
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
	return errdefs.As(errdefs.Unavailable, fmt.Errorf("ask the API server: %w", err))
}
