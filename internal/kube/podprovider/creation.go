package podprovider

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// The modes of the boot histogram.
const (
	modeRun   = "run"
	modeClone = "clone"
)

// creation creates the pod's VM from an image or from a snapshot, or resumes it from elsewhere.
type creation struct {
	base
	asleep *hibernation
	pulls  pulls

	prior    *podState        // the earlier pod with the same VM name; nil: none
	claiming retryTask        // see claimLate
	launched time.Time        // when this process requested the VM; zero when adopted
	mode     string           // how this process created the VM
	lacking  []convert.Absent // missing references that were already reported
}

// errFreed means that a leftover VM was removed and its state kept. The caller decides anew how to create the pod's VM, which may
// resume that state.
var errFreed = errors.New("the leftover VM is removed")

// once calls create unless a VM of our name exists: the pod's own, or one that the operator offers.
func (c *creation) once(ctx context.Context, create func() (vm.Record, error)) (vm.Record, error) {
	if c.launched.IsZero() {
		c.launched = time.Now()
	}
	switch _, err := c.named(ctx, c.vmName); {
	case err == nil:
		return c.occupied(ctx, create)
	case !errdefs.IsNotFound(err):
		return vm.Record{}, err
	}
	rec, err := create()
	if errdefs.IsAlreadyExists(err) {
		return c.occupied(ctx, create)
	}
	return rec, err
}

// created handles the outcome of a creation. A failure that may pass is retried after first, then after growing pauses.
func (c *creation) created(ctx context.Context, rec vm.Record, err error, mode string, first, most time.Duration) turn {
	if ctx.Err() != nil {
		return atOnce // removal requested, or the node stops; a VM that was created is found by its label
	}
	if errors.Is(err, errFreed) {
		return atOnce
	}
	c.Metrics.done("create", err)
	if err != nil {
		if errdefs.IsInvalid(err) || errdefs.Is(err, errdefs.Unsupported) {
			c.refuse(reasonVMRejected, err.Error())
			return after(most) // the operator may change the node
		}
		return c.retry(ctx, waiting(err), err, first, most)
	}
	c.succeeded()
	c.mode = mode
	c.take(rec)
	if mode == modeClone {
		c.log.Info("vm cloned", "vm", rec.ID, "snapshot", rec.Snapshot)
	} else {
		c.log.Info("vm launched", "vm", rec.ID)
	}
	return atOnce
}

// occupied handles a VM that already has the name of the pod's VM: an earlier VM of this pod, the VM of a deleted pod, a VM
// that the operator created for this pod, or the VM of another pod of the namespace.
func (c *creation) occupied(ctx context.Context, anew func() (vm.Record, error)) (vm.Record, error) {
	rec, err := c.vms.Inspect(ctx, c.vmName)
	if err != nil {
		return vm.Record{}, errdefs.Unavailablef("VM %s: the name is taken, but no VM of that name is found: %v", c.vmName, err)
	}
	label := rec.Spec.Labels
	switch uid := label[contract.VMLabelPodUID]; {
	case uid == string(c.uid) && (rec.State != vm.StateError || !rec.StartedAt.IsZero()):
		return rec, nil
	case uid == string(c.uid): // this pod's VM, which never started
	case uid == "" && c.may(rec):
		if other := c.index.reserve(c.podState, rec.ID); other != nil {
			return vm.Record{}, errdefs.Unavailablef("the VM name %s is taken by pod %s", c.vmName, other.key)
		}
		c.event(corev1.EventTypeNormal, eventAdopted, "Adopted the existing VM %s", c.vmName)
		if rec.State == vm.StateStopped || rec.State == vm.StateCreated {
			return c.startVM(ctx, &rec)
		}
		return rec, nil
	case uid == "" || label[contract.VMLabelNode] != c.cfg.Node.Name || c.index.withUID(types.UID(uid)) != nil:
		return vm.Record{}, errdefs.Unavailablef("the VM name %s is taken by pod %s/%s", c.vmName, label[contract.VMLabelPodNamespace], label[contract.VMLabelPodName])
	case keepsState(rec): // nothing of it is lost, and this pod may resume its state
		if err := c.removeOrphan(ctx, rec); err != nil {
			return vm.Record{}, err
		}
		c.log.Info("leftover vm removed, its state is kept", "vm", rec.ID, "pod", label[contract.VMLabelPodNamespace]+"/"+label[contract.VMLabelPodName])
		return vm.Record{}, errFreed
	case c.cfg.Orphans != OrphanDestroy && !rec.StartedAt.IsZero(): // the VM's content may still be needed
		return vm.Record{}, leftover{errdefs.Unavailablef("VM %s (%s) of the deleted pod %s/%s is still on node %s, and the orphan policy %q does not remove it; "+
			"if you need it, save it there with `cocoon snapshot save --name NAME %[2]s`; then remove it with `cocoon vm rm --force %[2]s`, or set VK_ORPHAN_POLICY=destroy",
			c.vmName, rec.ID, label[contract.VMLabelPodNamespace], label[contract.VMLabelPodName], c.cfg.Node.Name, c.cfg.Orphans)}
	}
	c.log.Info("removing leftover vm", "vm", rec.ID)
	if err := c.removeOrphan(ctx, rec); err != nil {
		return vm.Record{}, err
	}
	return anew()
}

// start starts a VM that was created but never ran.
func (c *creation) start(ctx context.Context, rec *vm.Record) turn {
	got, err := c.startVM(ctx, rec)
	if err != nil {
		return c.retry(ctx, reasonRunError, err, c.cfg.BackoffBase, c.cfg.BackoffMax)
	}
	c.take(got)
	return atOnce
}

// announce sends an Event, once per run, that the guest is up.
func (c *creation) announce(rec *vm.Record) {
	if c.told.Equal(rec.StartedAt) {
		return
	}
	c.told = rec.StartedAt
	pod := c.look().pod
	if len(pod.Spec.Containers) > 0 {
		kind := "image"
		if c.images[convert.Image(pod)].local {
			kind = "local image"
		}
		what := "container " + pod.Spec.Containers[0].Name
		if n := len(rec.Containers); n > 0 && !rec.RootContainer() {
			what = fmt.Sprintf("%d containers", n)
		}
		c.event(corev1.EventTypeNormal, eventStarted, "Created and started %s as VM %s from %s %s", what, rec.Spec.Name, kind, rec.Spec.Image)
	}
	if want := pod.Annotations[contract.KeyBackend]; want != "" && want != rec.Driver && rec.Restarts == 0 {
		c.event(corev1.EventTypeNormal, eventStandIn, "VM %s runs in %s, which stands in for %s", rec.Spec.Name, rec.Driver, want)
	}
	left := convert.Ignored(pod)
	if rec.ImageType == vm.ImageOCI && rec.Spec.Firmware != "" {
		left = append(left, contract.KeyFirmware+" (the kernel of a container image is loaded without firmware)")
	}
	if rec.ImageType == vm.ImageOCI && rec.Spec.Graphics {
		left = append(left, contract.KeyGraphics+" (the kernel of a container image shows nothing on a screen)")
	}
	if rec.ImageType == vm.ImageOCI && rec.Spec.Hardware != nil {
		left = append(left, contract.KeyHardware+" (the kernel of a container image knows one machine)")
	}
	if len(left) > 0 && rec.Restarts == 0 {
		c.event(corev1.EventTypeWarning, podstatus.ReasonUnserved, "These settings have no effect in this VM: %s", strings.Join(left, ", "))
	}
	if empty := emptyVolumes(rec); rec.ImageType == vm.ImageDisk && len(empty) > 0 && rec.Restarts == 0 {
		c.event(corev1.EventTypeWarning, podstatus.ReasonUnserved, "emptyDir %s not mounted, because the image of this VM boots its own system; use the disk of the VM", strings.Join(empty, ", "))
	}
	if !c.launched.IsZero() {
		c.Metrics.booted(c.mode, rec.Driver, time.Since(c.launched))
		c.launched = time.Time{}
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
