package podprovider

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file is what the kubelet's HTTP API needs of a pod.

// Exec runs a command in the pod's guest. Errors: NotFound (no such pod or container), FailedPrecondition (not running).
func (p *Provider) Exec(ctx context.Context, namespace, pod, container string, e guest.Exec, s guest.Streams) (int, error) {
	w, err := p.locate(namespace, pod, container)
	if err != nil {
		return 0, err
	}
	_, rec, _ := w.look()
	if !up(rec) {
		return 0, errdefs.Preconditionf("container %q in pod %q is not running", container, pod)
	}
	return p.Runtime.Exec(ctx, string(rec.ID), e, s)
}

// Logs streams the output of the pod's main process. Errors as for Exec; without a VM yet: FailedPrecondition.
func (p *Provider) Logs(ctx context.Context, namespace, pod, container string, o guest.LogOptions, fn func(guest.LogEntry) error) error {
	w, err := p.locate(namespace, pod, container)
	if err != nil {
		return err
	}
	_, rec, _ := w.look()
	switch {
	case rec == nil || rec.StartedAt.IsZero():
		return errdefs.Preconditionf("container %q in pod %q is waiting to start: %s", container, pod, w.whyWaiting())
	case o.Previous && rec.Restarts == 0:
		return errdefs.Preconditionf("previous terminated container %q in pod %q not found", container, pod)
	}
	o.Serial = rec.ImageType == vm.ImageDisk
	return p.Runtime.Logs(ctx, string(rec.ID), o, fn)
}

func (p *Provider) locate(namespace, pod, container string) (*worker, error) {
	w := p.find(namespace, pod)
	if w == nil {
		return nil, errdefs.NotFoundf("pod %q not found on this node", pod)
	}
	spec, _, _ := w.look()
	if !hasContainer(spec, container) {
		return nil, errdefs.NotFoundf("container %q not found in pod %q", container, pod)
	}
	return w, nil
}

func hasContainer(pod *corev1.Pod, name string) bool {
	for _, c := range pod.Spec.Containers {
		if c.Name == name {
			return true
		}
	}
	return false
}

func (w *worker) whyWaiting() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.status.Reason != "" {
		return w.status.Reason
	}
	for _, c := range w.status.ContainerStatuses {
		if c.State.Waiting != nil {
			return c.State.Waiting.Reason
		}
	}
	return reasonCreating
}
