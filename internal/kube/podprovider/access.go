package podprovider

import (
	"context"
	"net"
	"slices"
	"strconv"
	"time"

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
	spec, rec, _ := w.look()
	if w.static {
		return 0, unserved(spec, "exec")
	}
	if !up(rec) || len(rec.Containers) > 0 && rec.Container(container).Status.State != vm.ContainerRunning {
		return 0, errdefs.Preconditionf("container %q in pod %q is not running", container, pod)
	}
	if len(rec.Containers) > 0 {
		e.Container = container
	}
	return p.Runtime.Exec(ctx, string(rec.ID), e, s)
}

// Logs streams the output of the pod's main process. Errors as for Exec; without a VM yet: FailedPrecondition.
func (p *Provider) Logs(ctx context.Context, namespace, pod, container string, o guest.LogOptions, fn func(guest.LogEntry) error) error {
	w, err := p.locate(namespace, pod, container)
	if err != nil {
		return err
	}
	spec, rec, _ := w.look()
	switch {
	case w.static:
		return unserved(spec, "log")
	case rec == nil || rec.StartedAt.IsZero() || len(rec.Containers) > 0 && rec.Container(container).Status.StartedAt.IsZero():
		return errdefs.Preconditionf("container %q in pod %q is waiting to start: %s", container, pod, w.whyWaiting())
	case o.Previous && restartsOf(rec, container) == 0:
		return errdefs.Preconditionf("previous terminated container %q in pod %q not found", container, pod)
	}
	if len(rec.Containers) > 0 {
		o.Container = container
	}
	o.Serial = rec.ImageType == vm.ImageDisk
	return p.Runtime.Logs(ctx, string(rec.ID), o, fn)
}

// Dial connects to a TCP port of the pod's guest, at its address: what listens on the guest's loopback alone is not reached.
// Errors: NotFound, FailedPrecondition while there is no address, Unavailable.
func (p *Provider) Dial(ctx context.Context, namespace, pod string, port int) (net.Conn, error) {
	w := p.find(namespace, pod)
	if w == nil {
		return nil, errdefs.NotFoundf("pod %q not found on this node", pod)
	}
	ip, _ := w.target()
	if ip == "" {
		return nil, errdefs.Preconditionf("pod %q has no address yet", pod)
	}
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(ip, strconv.Itoa(port)))
	if err != nil {
		return nil, errdefs.Unavailablef("connect to port %d of pod %q: %w; it must listen on the guest's address, not on its loopback alone", port, pod, err)
	}
	return c, nil
}

// dialLimit is how long a guest may take to accept a forwarded connection.
const dialLimit = 10 * time.Second

func (p *Provider) locate(namespace, pod, container string) (*worker, error) {
	w := p.find(namespace, pod)
	if w == nil {
		return nil, errdefs.NotFoundf("pod %q not found on this node", pod)
	}
	spec, rec, _ := w.look()
	if !hasContainer(spec, container) || rec != nil && len(rec.Containers) > 0 && rec.Container(container) == nil {
		return nil, errdefs.NotFoundf("container %q not found in pod %q", container, pod)
	}
	return w, nil
}

func hasContainer(pod *corev1.Pod, name string) bool {
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		if c.Name == name {
			return true
		}
	}
	return false
}

// restartsOf is how often a container was started again.
func restartsOf(rec *vm.Record, container string) int {
	if c := rec.Container(container); c != nil {
		return c.Status.Restarts
	}
	return rec.Restarts
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
