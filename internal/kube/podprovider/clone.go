package podprovider

import (
	"context"
	"errors"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// cloneUp creates the pod's VM from origin. If that fails, it shows the reason in the pod's status.
func (c *creation) cloneUp(ctx context.Context, pod *corev1.Pod, origin convert.Origin) turn {
	c.publish(c.cfg.Settle)
	rec, err := c.cloneOnce(ctx, pod, func() (vm.CloneSpec, error) {
		spec := convert.Clone(pod, c.cfg.Node)
		snap, err := c.origin(ctx, pod, origin)
		switch {
		case err != nil:
			return spec, err
		case origin.Dir != "":
			spec.FromDir = origin.Dir
		default:
			spec.Snapshot = snap.ID
			spec.NICs = interfaces(pod, snap.NICs)
		}
		return spec, c.assertBackend(ctx, pod, "snapshot "+snap.Name, snap.Hypervisor, snap.Record.Spec.Driver)
	})
	if origin.Dir != "" && ctx.Err() == nil && !errors.Is(err, errFreed) {
		c.Metrics.cloneFromDir.WithLabelValues(result(err)).Inc()
	}
	if left := convert.Inherited(pod); err == nil && len(left) > 0 {
		c.event(corev1.EventTypeNormal, podstatus.ReasonUnserved, "These settings have no effect in a clone, which keeps those of its snapshot: %s", strings.Join(left, ", "))
	}
	return c.created(ctx, rec, err, modeClone, retryTaskFirst, retryTaskMost)
}

// fits rejects a clone that does not match the pod. Only the record of the VM, after its creation, shows this.
func (c *creation) fits(ctx context.Context, pod *corev1.Pod, of vm.CloneSpec, rec vm.Record) error {
	if !convert.SameContainers(pod, rec) {
		return errdefs.Invalidf("the containers of the pod do not match those of its snapshot, which are %s; give the pod's containers the same names in the same order", names(rec))
	}
	if of.FromDir != "" {
		return c.assertBackend(ctx, pod, "the snapshot in "+of.FromDir, rec.Driver, rec.Spec.Driver)
	}
	return nil
}

// names lists the containers of rec for a message.
func names(rec vm.Record) string {
	var out []string
	for _, c := range rec.Containers {
		out = append(out, c.Name)
	}
	if len(out) == 0 {
		return "one container of any name, without init containers"
	}
	return strings.Join(out, ", ")
}

// cloneOnce creates a VM from spec unless a VM of that name exists. It calls spec only if none exists.
func (c *creation) cloneOnce(ctx context.Context, pod *corev1.Pod, spec func() (vm.CloneSpec, error)) (vm.Record, error) {
	if c.states == nil {
		return vm.Record{}, errdefs.Unsupportedf("this node does not store snapshots")
	}
	return c.once(ctx, func() (vm.Record, error) {
		s, err := spec()
		if err == nil {
			s.Policed, err = c.policed()
		}
		if err != nil {
			return vm.Record{}, err
		}
		var auth []image.RegistryAuth
		if len(pod.Spec.ImagePullSecrets) > 0 {
			auth, _ = convert.PullAuth(ctx, pod, podvolumes.Resolver{Client: c.Client})
		}
		rec, err := c.states.Clone(ctx, s, auth)
		if err != nil {
			return rec, err
		}
		if err = c.fits(ctx, pod, s, rec); err != nil {
			if err := c.vms.Remove(ctx, string(rec.ID), true); err != nil && !errdefs.IsNotFound(err) {
				c.log.Warn("clone that does not match its pod not removed", "vm", rec.ID, "err", err)
			}
		}
		return rec, err
	})
}

// interfaces returns the NICs that pod asks for, if it names several networks. Else it returns as many NICs as the snapshot has, on the
// network that pod names and with its ports of the host. nil means the NICs of the snapshot.
func interfaces(pod *corev1.Pod, n int) []vm.NICSpec {
	asked := convert.NICs(pod)
	if len(asked) > 1 {
		return asked
	}
	first := asked[0]
	if first.Network == "" && first.Ports == nil && first.MAC == "" && !first.Masquerade.Asked() && !first.LinkDown || n <= 0 {
		return nil
	}
	nics := slices.Repeat([]vm.NICSpec{{Network: first.Network}}, n)
	nics[0] = first
	return nics
}

// assertBackend rejects a snapshot of another hypervisor than the one that the pod names, because a hypervisor can only resume
// its own snapshots. It accepts one of a stand-in: taken by the node's default hypervisor, or of a VM that asked for what the pod names.
func (c *creation) assertBackend(ctx context.Context, pod *corev1.Pod, snap, taken, asked string) error {
	want := pod.Annotations[contract.KeyBackend]
	if want == "" || taken == "" || taken == want || asked == want {
		return nil
	}
	if c.StandIn == nil { // the runtime does not tell
		if taken == string(contract.BackendQEMU) {
			return nil
		}
	} else if name, err := c.StandIn(ctx); err != nil || name == taken {
		return err
	}
	return errdefs.Invalidf("%s was taken by %s and cannot resume in %s; change %s", snap, taken, want, contract.KeyBackend)
}

// origin finds or fetches the snapshot from which the VM resumes. A snapshot in a folder is in no store, and is not checked
// before the clone.
func (c *creation) origin(ctx context.Context, pod *corev1.Pod, o convert.Origin) (snapshot.Snapshot, error) {
	switch {
	case o.Dir != "":
		return snapshot.Snapshot{}, nil
	case o.Fork != "":
		return c.states.ForkOf(ctx, pod, o.Fork)
	}
	return c.states.Stored(ctx, pod, o.Snapshot)
}

// wakeRemote resumes a VM that is hibernated elsewhere. The VM keeps its name, and so its addresses.
func (c *creation) wakeRemote(ctx context.Context, pod *corev1.Pod, at podsnapshots.Place) turn {
	c.publish(c.cfg.Settle)
	rec, err := c.cloneOnce(ctx, pod, func() (vm.CloneSpec, error) {
		spec := convert.Clone(pod, c.cfg.Node)
		snap, err := c.states.Import(ctx, at)
		spec.Snapshot = snap.ID
		return spec, err
	})
	if err == nil {
		c.asleep.restored = true
		c.health.Keep(pod, &rec) // the guest has not restarted
		c.event(corev1.EventTypeNormal, eventWoken, "VM %s is awake", c.vmName)
	}
	return c.created(ctx, rec, err, modeClone, retryTaskFirst, retryTaskMost)
}
