package podprovider

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ServiceLister returns the Services of a namespace from a cache. Errors: Unavailable while it is not filled.
type ServiceLister func(namespace string) ([]*corev1.Service, error)

// services returns the Services that a pod of namespace may know.
func (c *common) services(namespace string) ([]*corev1.Service, error) {
	if c.Services == nil {
		return nil, nil
	}
	all, err := c.Services(namespace)
	if err != nil || namespace == metav1.NamespaceDefault {
		return all, err
	}
	more, err := c.Services(metav1.NamespaceDefault) // the API server's Service is there
	return append(slices.Clone(all), more...), err
}
