package podprovider

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
	"cocoonstack.io/cocoon/internal/vm"
)

// additions adds the pod's ephemeral containers to its running VM. Each is added by a goroutine of its own, because a pull may
// take long, and the worker serves the VM meanwhile.
type additions struct {
	base
	pulls pulls
	tasks map[string]*addition // by container
}

// addition is the task of adding one container.
type addition struct {
	result chan added // has room for the result; nil: no attempt goes on
	cancel context.CancelFunc
	tries  wait.Backoff
	next   time.Time // time of the next attempt
	cause  string    // of the last failure
}

// added is the result of an attempt.
type added struct {
	image  image.Image // zero until it is pulled
	rec    vm.Record
	reason string // of the failure, for the status
	err    error
}

func newAdditions(b base) *additions {
	return &additions{base: b, pulls: pulls{base: b}, tasks: map[string]*addition{}}
}

// stop ends all attempts.
func (a *additions) stop() {
	for _, t := range a.tasks {
		if t.result != nil {
			t.cancel()
		}
	}
}

// lacking returns the ephemeral containers of f's pod that its VM lacks and that are not refused.
func (a *additions) lacking(f facts) (list []*corev1.EphemeralContainer) {
	if f.rec == nil || !podstatus.TakesEphemeral(f.pod, f.rec) {
		return nil
	}
	for i := range f.pod.Spec.EphemeralContainers {
		c := &f.pod.Spec.EphemeralContainers[i]
		if podstatus.EphemeralOf(f.rec, c.Name) == nil && a.debug[c.Name].Refused == "" {
			list = append(list, c)
		}
	}
	return list
}

// due reports whether the worker has something to do for a container, and when.
func (a *additions) due(f facts) (some bool, left time.Duration) {
	left = math.MaxInt64
	for _, t := range a.tasks {
		if len(t.result) > 0 {
			return true, 0
		}
	}
	for _, c := range a.lacking(f) {
		switch t := a.tasks[c.Name]; {
		case t == nil:
			return true, 0
		case t.result == nil:
			some, left = true, min(left, time.Until(t.next))
		}
	}
	return some, left
}

// add handles the results of the attempts that have ended, and begins those that are due.
func (a *additions) add(pod *corev1.Pod, rec *vm.Record) turn {
	for i := range pod.Spec.EphemeralContainers {
		c := &pod.Spec.EphemeralContainers[i]
		t := a.tasks[c.Name]
		if t == nil || len(t.result) == 0 {
			continue
		}
		r := <-t.result
		t.cancel()
		t.result = nil
		a.ended(c, t, r)
	}
	for _, c := range a.lacking(a.look()) {
		t := a.tasks[c.Name]
		if t == nil {
			t = &addition{}
			a.tasks[c.Name] = t
		}
		if t.result == nil && time.Until(t.next) <= 0 {
			a.begin(pod, rec.ID, c, t)
		}
	}
	a.publish(0)
	return atOnce
}

// begin begins an attempt, unless the container is refused.
func (a *additions) begin(pod *corev1.Pod, id vm.ID, c *corev1.EphemeralContainer, t *addition) {
	if errs := convert.CheckEphemeral(pod, c); len(errs) > 0 {
		a.refuseAddition(c, errs.ToAggregate().Error())
		return
	}
	result := make(chan added, 1)
	t.result = result
	t.cancel = a.background(func(ctx context.Context) {
		result <- a.attempt(ctx, pod, id, c)
		a.poke()
	})
}

// attempt pulls the image of a container and adds the container to the VM.
func (a *additions) attempt(ctx context.Context, pod *corev1.Pod, id vm.ID, c *corev1.EphemeralContainer) (out added) {
	services, err := a.services(pod.Namespace)
	if err != nil {
		return added{reason: reasonConfigError, err: err}
	}
	want, err := convert.Ephemeral(ctx, pod, c, a.cfg.Node, podvolumes.Resolver{Client: a.Client}, services, nil)
	if err != nil {
		return added{reason: reasonConfigError, err: err}
	}
	r := convert.EphemeralPull(c)
	out.image, _, err = a.pulls.fetch(ctx, pod, r)
	a.Metrics.done("pull", err)
	switch {
	case errdefs.IsInvalid(err):
		return added{reason: reasonInvalidImage, err: err}
	case r.Policy == image.PullNever && errdefs.IsNotFound(err):
		return added{reason: reasonImageMissing, err: err}
	case err != nil:
		return added{reason: reasonErrPull, err: err}
	}
	if err := convert.CheckEphemeralUser(pod, c, out.image.Config.User); err != nil {
		return added{reason: reasonConfigError, err: err}
	}
	if out.rec, out.err = a.containers.AddContainer(ctx, string(id), want); out.err != nil {
		out.reason = reasonRunError
	}
	return out
}

// ended handles the result of an attempt.
func (a *additions) ended(c *corev1.EphemeralContainer, t *addition, r added) {
	if r.image.ID != "" {
		a.images[c.Image] = pulled{name: r.image.Name, id: r.image.ID, ref: imageRef(r.image), user: r.image.Config.User}
	}
	switch {
	case r.err == nil:
		delete(a.tasks, c.Name)
		delete(a.debug, c.Name)
		a.take(r.rec)
		a.event(corev1.EventTypeNormal, eventStarted, "Created and started container %s in VM %s from image %s", c.Name, a.vmName, c.Image)
		return
	case errors.Is(r.err, context.Canceled): // the node stops
		t.next = time.Now()
		return
	case r.reason == reasonRunError && (errdefs.Is(r.err, errdefs.Unsupported) || errdefs.IsInvalid(r.err)):
		a.refuseAddition(c, r.err.Error())
		return
	}
	pause := podstatus.Pause{Reason: r.reason, Message: r.err.Error()}
	if t.cause != r.err.Error() {
		a.event(corev1.EventTypeWarning, eventFailed, "Error: container %s: %s: %s", c.Name, r.reason, r.err)
		a.log.Warn("ephemeral container not added", "op", r.reason, "err", r.err)
	} else if r.reason == reasonErrPull { // it failed before
		pause = podstatus.Pause{Reason: reasonPullBackOff, Message: fmt.Sprintf("Back-off pulling image %q: %s: %s", c.Image, reasonErrPull, r.err)}
	}
	t.cause = r.err.Error()
	t.next = time.Now().Add(step(&t.tries, a.cfg.BackoffBase, a.cfg.BackoffMax))
	a.debug[c.Name] = pause
}

// refuseAddition shows that a container never runs.
func (a *additions) refuseAddition(c *corev1.EphemeralContainer, message string) {
	a.debug[c.Name] = podstatus.Pause{Refused: podstatus.ReasonUnserved, Message: message}
	a.event(corev1.EventTypeWarning, podstatus.ReasonUnserved, "container %s: %s", c.Name, message)
}
