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
func (c *creation) resolve(ctx context.Context, pod *corev1.Pod) (spec vm.Spec, reason string, err error) {
	filled := make(chan error, 1)
	volumes := convert.Spec(pod, c.cfg.Node, nil).Volumes
	go func() { filled <- c.volumes.Fill(ctx, pod, volumes) }()
	spec, err = c.wanted(ctx, pod)
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
func (c *creation) wanted(ctx context.Context, pod *corev1.Pod) (vm.Spec, error) {
	from := podvolumes.Resolver{Client: c.Client}
	services, err := c.services(pod.Namespace)
	if err != nil {
		return vm.Spec{}, err
	}
	env, err := convert.Env(ctx, pod, c.cfg.Node, from, services, c.lacks)
	if err == nil {
		err = convert.CheckMounts(pod, env)
	}
	if err != nil {
		return vm.Spec{}, err
	}
	spec := convert.Spec(pod, c.cfg.Node, env)
	spec.CloudInit, err = convert.CloudInit(ctx, pod, from)
	return spec, err
}

// lacks reports each missing reference of the pod's environment once.
func (c *creation) lacks(a convert.Absent) {
	if !slices.Contains(c.lacking, a) {
		c.lacking = append(c.lacking, a)
		c.event(corev1.EventTypeWarning, a.Reason(), "%s", a)
	}
}

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
