package podprovider

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/placement"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
	"cocoonstack.io/cocoon/internal/vm"
)

// createAndStart creates and starts the pod's VM. If that fails, it shows the reason in the pod's status.
func (c *creation) createAndStart(ctx context.Context, pod *corev1.Pod) turn {
	if !c.supported(pod) {
		return whenWoken
	}
	if c.remote() && (contract.AsksSnapshot(pod.Annotations) || contract.ComesBack(pod.Annotations)) && !contract.Pushable(c.vmName) {
		return c.refuse(reasonNotSupported, "the VM name "+c.vmName+" is not a valid repository name, and the state of the VM is stored under that name; use lower-case letters and digits, with single . _ - between them")
	}
	if c.states == nil && contract.HibernatesOnDelete(pod.Annotations) {
		return c.refuse(reasonNotSupported, "the VM cannot hibernate when its pod is deleted ("+contract.KeyDeletionPolicy+"), because this node does not store snapshots")
	}
	if c.prior != nil {
		if c.prior.look().removal != nil {
			c.publish(c.cfg.Settle)
			select {
			case <-c.prior.freed:
			case <-ctx.Done():
				return atOnce
			}
		}
		c.prior = nil
	}
	if again, ok := c.claim(ctx, pod); !ok {
		return again
	}
	at, sleeps, err := c.asleep.elsewhere(ctx, pod)
	switch {
	case err != nil:
		return c.retry(ctx, waiting(err), err, retryTaskFirst, retryTaskMost)
	case sleeps:
		if contract.Hibernate(pod.Annotations) {
			if _, err := c.named(ctx, c.vmName); err != nil {
				return c.asleep.recordHibernated("")
			}
		}
		return c.wakeRemote(ctx, pod, at)
	}
	if origin := convert.OriginOf(pod); !origin.Boots() {
		return c.cloneUp(ctx, pod, origin)
	}
	return c.boot(ctx, pod)
}

// claim claims this node for a VM that must stay on the node that holds its state. It must be called before anything of the VM
// is created. If the claim fails, it returns false and when to retry.
func (c *creation) claim(ctx context.Context, pod *corev1.Pod) (turn, bool) {
	ask, _ := contract.ParseSticky(pod.Annotations)
	switch {
	case !ask.Asked || c.claimed:
		return whenWoken, true
	case c.Placements == nil:
		return c.refuse(reasonNotSupported, "the VM must stay on its node ("+contract.KeySticky+"), but this node cannot create VMPlacements"), false
	}
	if why := placement.Check(pod); why != "" {
		return c.refuse(reasonNotSupported, why), false
	}
	if err := c.Placements.Hold(ctx, pod); err != nil {
		reason := reasonUnclaimed
		if errdefs.IsFailedPrecondition(err) {
			reason = reasonElsewhere
		}
		return c.retry(ctx, reason, err, time.Second, 30*time.Second), false
	}
	c.claimed = true
	c.succeeded()
	return whenWoken, true
}

// claimLate claims this node for a running VM that hibernates when its pod is deleted, because the annotation may be newer than
// the VM. It returns when to retry.
func (c *creation) claimLate(ctx context.Context, pod *corev1.Pod) turn {
	if !contract.HibernatesOnDelete(pod.Annotations) || c.claimed || c.states == nil || c.Placements == nil || len(convert.Check(pod)) > 0 {
		return whenWoken
	}
	if left := c.claiming.left(); left > 0 {
		return after(left)
	}
	if err := c.Placements.Hold(ctx, pod); err != nil {
		if ctx.Err() == nil && c.claiming.failed(err) {
			c.log.Warn("node not claimed for vm that hibernates when its pod is deleted", "err", err)
		}
		return after(c.claiming.left())
	}
	c.claimed, c.claiming = true, retryTask{}
	return whenWoken
}

// boot creates the pod's VM from its image.
func (c *creation) boot(ctx context.Context, pod *corev1.Pod) turn {
	spec, reason, err := c.resolve(ctx, pod)
	if err != nil {
		return c.retry(ctx, reason, err, time.Second, 30*time.Second)
	}
	c.publish(c.cfg.Settle)
	if again, ok := c.pulls.pull(ctx, pod); !ok {
		return again
	}
	if err := convert.CheckUsers(pod, c.users()); err != nil {
		return c.retry(ctx, reasonConfigError, err, c.cfg.BackoffBase, c.cfg.BackoffMax)
	}
	if err := convert.CheckProfiles(pod); err != nil {
		return c.retry(ctx, reasonCreateError, err, c.cfg.BackoffBase, c.cfg.BackoffMax)
	}
	c.resize.Made = pod
	rec, err := c.once(ctx, func() (vm.Record, error) {
		rec, err := c.vms.Launch(ctx, spec)
		if err == nil {
			c.volumes.Launched(spec.Volumes)
		}
		return rec, err
	})
	if errdefs.IsFailedPrecondition(err) && len(spec.DiskVolumes()) > 0 { // as with the kubelet, a pod whose volume another one uses is shown as being created
		return c.retry(ctx, podstatus.ReasonCreating, err, time.Second, 30*time.Second)
	}
	if errdefs.IsFailedPrecondition(err) && len(spec.Dirs()) > 0 { // a folder that the node's operator does not allow, or that is missing
		return c.retry(ctx, reasonConfigError, err, c.cfg.BackoffBase, c.cfg.BackoffMax)
	}
	return c.created(ctx, rec, err, modeRun, c.cfg.BackoffBase, c.cfg.BackoffMax)
}

// users returns the users of the pod's container images, which have been pulled.
func (c *creation) users() map[string]string {
	out := map[string]string{}
	for name, img := range c.images {
		if !img.boots {
			out[name] = img.user
		}
	}
	return out
}

// resolve returns the spec of pod's VM, with the content of the cluster objects that the pod refers to. It reads the volumes
// in parallel with the rest. If an object is missing, reason is the reason for the status. As with the kubelet, a pod whose
// volumes are missing is shown as being created.
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

// wanted returns the spec of the VM that pod asks for, with its environment and cloud-init from the cluster, but without
// volumes.
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
	policed, err := c.policed()
	if err != nil {
		return vm.Spec{}, err
	}
	for i := range spec.NICs {
		spec.NICs[i].Policed = policed
	}
	spec.CloudInit, err = convert.CloudInit(ctx, pod, from)
	return spec, err
}

// lacks sends an Event for each missing reference of the pod's environment, once.
func (c *creation) lacks(a convert.Absent) {
	if !slices.Contains(c.lacking, a) {
		c.lacking = append(c.lacking, a)
		c.event(corev1.EventTypeWarning, a.Reason(), "%s", a)
	}
}

// services returns the Services of namespace and, for the API server, of namespace default.
func (c *common) services(namespace string) ([]*corev1.Service, error) {
	if c.Services == nil {
		return nil, nil
	}
	all, err := c.Services(namespace)
	if err != nil || namespace == metav1.NamespaceDefault {
		return all, err
	}
	more, err := c.Services(metav1.NamespaceDefault) // has the Service of the API server
	return append(slices.Clone(all), more...), err
}
