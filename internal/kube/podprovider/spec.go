package podprovider

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
	"cocoonstack.io/cocoon/internal/vm"
)

// resolve reads what the VM of pod is created from; it reads the volumes in parallel with all else. reason is for what is
// missing: a pod whose volumes are missing is shown as being created, as with the kubelet.
func (b *bringUp) resolve(ctx context.Context, pod *corev1.Pod) (spec vm.Spec, reason string, err error) {
	filled := make(chan error, 1)
	volumes := convert.Spec(pod, b.cfg.Node, nil).Volumes
	go func() { filled <- b.volumes.Fill(ctx, pod, volumes) }()
	spec, err = b.wanted(ctx, pod)
	missing := <-filled
	switch {
	case missing != nil:
		return vm.Spec{}, podstatus.ReasonCreating, missing
	case err != nil:
		return vm.Spec{}, reasonConfigError, err
	}
	spec.Volumes = volumes
	return spec, "", nil
}

// wanted returns the spec of the VM that pod asks for, with what the pod refers to in the cluster.
func (b *bringUp) wanted(ctx context.Context, pod *corev1.Pod) (vm.Spec, error) {
	from := podvolumes.Resolver{Client: b.Client}
	services, err := b.services(pod.Namespace)
	if err != nil {
		return vm.Spec{}, err
	}
	env, err := convert.Env(ctx, pod, b.cfg.Node, from, services, b.lacks)
	if err == nil {
		err = convert.CheckMounts(pod, env)
	}
	if err != nil {
		return vm.Spec{}, err
	}
	spec := convert.Spec(pod, b.cfg.Node, env)
	spec.CloudInit, err = convert.CloudInit(ctx, pod, from)
	return spec, err
}

// lacks reports each missing reference of the pod's environment once.
func (b *bringUp) lacks(a convert.Absent) {
	if !slices.Contains(b.lacking, a) {
		b.lacking = append(b.lacking, a)
		b.event(corev1.EventTypeWarning, a.Reason(), "%s", a)
	}
}

// emptyVolumes returns the names of rec's volumes that start empty.
func emptyVolumes(rec *vm.Record) (names []string) {
	for _, v := range rec.Spec.Volumes {
		if v.Kind == vm.VolumeEmpty {
			names = append(names, v.Name)
		}
	}
	return names
}

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
