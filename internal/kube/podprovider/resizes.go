package podprovider

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// resizes gives the containers of the pod's running VM the resources of the pod, when somebody has resized it. Until that is done,
// the status shows the resources that they have.
type resizes struct {
	base
	retry  retryTask
	given  given
	tried  int64  // the generation of the pod that retry counts for
	refuse string // the announced reason why the VM cannot be resized
}

// given is what the guest was told last.
type given struct {
	vm         vm.ID
	generation int64          // of the pod
	restarts   map[string]int // the runs of containers that the new resources do not apply to, by container
}

// due reports whether the worker has something to do for a resize, and when.
func (z *resizes) due(f facts) (some bool, left time.Duration) {
	resizing := podstatus.Resizing(f.pod, f.status)
	never := ""
	if len(resizing) > 0 {
		never = podstatus.Infeasible(f.pod, f.rec)
	}
	if never != z.refuse {
		if z.refuse = never; never != "" {
			z.event(corev1.EventTypeWarning, eventResizeInfeasible, "Pod resize is infeasible: %s", never)
		}
	}
	if len(resizing) == 0 || never != "" || z.tried != f.pod.Generation {
		z.resize.Later, z.resize.Failed, z.resize.Never, z.retry, z.tried = "", "", "", retryTask{}, f.pod.Generation
	}
	if len(resizing) == 0 || never != "" {
		return false, 0
	}
	if !z.gave(f.pod, f.rec) {
		return true, z.retry.left()
	}
	return !z.restarting(f.rec), 0
}

func (z *resizes) gave(pod *corev1.Pod, rec *vm.Record) bool {
	return z.given.vm == rec.ID && z.given.generation == pod.Generation
}

// restarting reports whether a container still runs that must be started again to have its new resources.
func (z *resizes) restarting(rec *vm.Record) bool {
	for name, run := range z.given.restarts {
		c := rec.Container(name)
		if c != nil && (c.Status.Run() <= run || c.Status.State == vm.ContainerWaiting) && c.Status.State != vm.ContainerTerminated {
			return true
		}
	}
	return false
}

// act gives the guest the resources, lets those containers be started again that need it, and says when all is done.
func (z *resizes) act(ctx context.Context, pod *corev1.Pod, rec *vm.Record) turn {
	if !z.gave(pod, rec) {
		return z.give(ctx, pod, rec)
	}
	names := podstatus.Resizing(pod, z.look().status)
	z.resize.Done, z.resize.Later, z.resize.Failed, z.resize.Never = true, "", "", ""
	z.publish(0)
	z.resize.Done, z.resize.Made, z.retry = false, nil, retryTask{}
	z.event(corev1.EventTypeNormal, eventResizeCompleted, "Pod resize completed for containers: %s", strings.Join(names, ", "))
	return atOnce
}

func (z *resizes) give(ctx context.Context, pod *corev1.Pod, rec *vm.Record) turn {
	if rec.ImageType == vm.ImageDisk {
		return z.grow(ctx, pod, rec)
	}
	status := z.look().status
	names := podstatus.Resizing(pod, status)
	want := convert.Resized(pod, z.cfg.Node)
	maps.DeleteFunc(want, func(name string, _ vm.Resources) bool { return !slices.Contains(names, name) })
	got, err := z.containers.ResizeContainers(ctx, string(rec.ID), want)
	if ctx.Err() != nil {
		return atOnce
	}
	z.Metrics.done("resize", err)
	if err != nil {
		z.failed(err)
		return atOnce
	}
	z.given = given{rec.ID, pod.Generation, map[string]int{}}
	z.resize.Failed, z.resize.Never = "", ""
	rec = z.take(got)
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		if r := rec.Container(c.Name); r == nil || r.Status.State != vm.ContainerRunning || !podstatus.RestartsToResize(&c, status) {
			continue
		} else if z.health.Restart(c.Name, "Container "+c.Name+" resize requires restart") {
			z.given.restarts[c.Name] = r.Status.Run()
		}
	}
	return atOnce
}

// grow gives the VM of a guest that boots itself the size of the pod, if the node has room for it.
func (z *resizes) grow(ctx context.Context, pod *corev1.Pod, rec *vm.Record) turn {
	to := convert.Size(pod)
	if why := z.full(to.Memory - rec.Spec.Memory); why != "" {
		told := z.resize.Later != ""
		z.resize.Later, z.resize.Failed = why, ""
		z.retry.failed(errdefs.Exhaustedf("%s", why))
		if !told {
			z.event(corev1.EventTypeWarning, eventResizeDeferred, "Pod resize is deferred: %s", why)
		}
		z.publish(0)
		return atOnce
	}
	got, err := z.vms.Resize(ctx, string(rec.ID), to)
	if ctx.Err() != nil {
		return atOnce
	}
	z.Metrics.done("resize", err)
	if err != nil {
		z.resize.Later = ""
		z.failed(err)
		return atOnce
	}
	z.given = given{vm: rec.ID, generation: pod.Generation}
	z.take(got)
	return atOnce
}

// full returns why the node has no room for that much more memory; "": it has.
func (z *resizes) full(more int64) string {
	if more <= 0 || z.cfg.Node.Memory == 0 {
		return ""
	}
	used := int64(0)
	for _, s := range z.index.all() {
		if f := s.look(); f.rec != nil && f.rec.State == vm.StateRunning {
			used += f.rec.Spec.Memory
		}
	}
	if used+more > z.cfg.Node.Memory {
		return fmt.Sprintf("its VMs have %d bytes of memory, and the node has %d, so there is no room for %d more; remove another VM, or move one to another node", used, z.cfg.Node.Memory, more)
	}
	return ""
}

// failed shows why the guest does not have the resources yet.
func (z *resizes) failed(err error) {
	z.resize.Failed, z.resize.Never = err.Error(), ""
	reason := eventResizeError
	if errdefs.Is(err, errdefs.Unsupported) || errdefs.IsInvalid(err) {
		z.resize.Failed, z.resize.Never = "", err.Error()
		reason = eventResizeInfeasible
	}
	if z.retry.failed(err) {
		z.log.Warn("containers not resized", "err", err)
		z.event(corev1.EventTypeWarning, reason, "Error resizing pod: %s", err)
	}
	z.publish(0)
}
