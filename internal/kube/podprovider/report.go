package podprovider

import (
	"context"
	"math"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podhealth"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// report is the state from which a worker computes the pod's status, annotations and Events.
type report struct {
	*common
	*podState
	health *podhealth.Health // has its own lock

	verdict *podstatus.Verdict
	pause   podstatus.Pause
	debug   map[string]podstatus.Pause       // of the ephemeral containers that the VM does not have
	tries   wait.Backoff                     // back-off of the current attempts; see retry
	last    *corev1.ContainerStateTerminated // the end of the run before this one
	again   bool                             // another run follows
	killed  time.Time                        // start of the run that was stopped for a probe or hook
	images  map[string]pulled                // by the name in the pod
	resize  podstatus.Resize
	lifecycle
	announced
}

// announced records what was already reported.
type announced struct {
	begun     bool           // a status was published
	told      time.Time      // start of the run that was announced
	faultTold string         // the announced fault; see podstatus.Fault
	hinted    string         // the announced hint for a clone
	heldBack  map[string]int // the last run of a container, by name, after which the guest waited

	lacks map[string]string // what a container, by name, was announced to lack
}

// newReport returns the report for s. It restores the state of an earlier process from the pod's status.
func newReport(c *common, s *podState) *report {
	r := &report{common: c, podState: s, health: c.newHealth(s), debug: map[string]podstatus.Pause{}, images: map[string]pulled{}, announced: announced{heldBack: map[string]int{}, lacks: map[string]string{}}}
	f := s.look()
	r.life, _ = contract.ParseLifecycle(f.pod.Annotations)
	r.plugged = contract.ParsePlugged(f.pod.Annotations)
	status := f.status.ContainerStatuses
	if len(status) > 0 {
		r.last = status[0].LastTerminationState.Terminated.DeepCopy()
		r.begun = true
	}
	if f.rec != nil {
		r.health.Resume(&f.status, f.rec)
		r.told = f.rec.StartedAt
		if len(status) > 0 && !convert.Several(f.pod) && podstatus.VMOf(status[0].ContainerID) == f.rec.ID {
			r.images[convert.Image(f.pod)] = pulled{name: status[0].Image, id: f.rec.ImageDigest, ref: status[0].ImageID}
		}
	}
	if f.status.Phase == corev1.PodFailed && f.status.Reason != "" {
		r.verdict = &podstatus.Verdict{Reason: f.status.Reason, Message: f.status.Message}
	}
	return r
}

// late returns the time until the active deadline of f's pod, or a very long time if the pod has none.
func (r *report) late(f facts) time.Duration {
	limit := f.pod.Spec.ActiveDeadlineSeconds
	if limit == nil || f.status.StartTime == nil || podstatus.Over(f.rec) && !r.again {
		return math.MaxInt64
	}
	return time.Until(f.status.StartTime.Add(time.Duration(*limit) * time.Second))
}

// lifecycle is the VM's lifecycle state in the annotations.
type lifecycle struct {
	life contract.Lifecycle
	tidy bool // no hibernated state is left in the registry

	rebooted contract.Rebooted     // the last request to reboot that this process has done
	dumped   contract.MemoryDumped // the last dump that this process has done
	plugged  []contract.Plugged    // volumes that are plugged, or shall be; see plugger
	network  networkFaults
}

// pulled is an image of the pod's VM, as this process pulled it or read it from the status.
type pulled struct {
	name  string // in the store
	id    string // as in the VM's record
	ref   string // what the pod's status shows: the ID, or repository@digest for a registry's manifest
	user  string // the user of the image's main process
	boots bool   // the image boots its own system
	local bool   // imported by hand, so there is no source to ask for a newer one
}

// shown returns the image in the status of a container whose image has that digest.
func (p pulled) shown(digest string) podstatus.Image {
	if digest != p.id || p.ref == "" { // the VM was created from another image than the one that was pulled last
		return podstatus.Image{ID: digest}
	}
	return podstatus.Image{Name: p.name, ID: p.ref}
}

// base is the common state of the parts of a worker. A part uses neither the worker nor another part, except that creation
// uses pulls and hibernation. Only the worker's goroutine uses report and the parts, unless a part has a lock.
type base struct {
	*report
	states *podsnapshots.States // saved states of the pod's VM; has its own lock; nil: the node keeps no snapshots
}

// findVM returns the pod's VM, also a VM that an interrupted Launch left, or nil if there is none.
func (b base) findVM(ctx context.Context) (*vm.Record, error) {
	rec := b.look().rec
	ref := b.vmName
	if rec != nil {
		ref = string(rec.ID)
	}
	got, err := b.vms.Inspect(ctx, ref)
	switch {
	case errdefs.IsNotFound(err) || errdefs.IsInvalid(err): // no VM can have an invalid name
		return nil, nil
	case err != nil:
		return nil, err
	case rec == nil && got.Spec.Labels[contract.VMLabelPodUID] != string(b.uid):
		return nil, nil
	}
	return b.take(got), nil
}

// startVM starts the pod's VM, whose volumes the machine may have lost since it started.
func (b base) startVM(ctx context.Context, rec *vm.Record) (vm.Record, error) {
	if err := b.volumes.Renew(ctx, b.look().pod); err != nil {
		return vm.Record{}, err
	}
	return b.vms.Start(ctx, string(rec.ID))
}

// newStates returns the saved states of the VM of s, or nil if the node keeps no snapshots.
func (c *common) newStates(s *podState) *podsnapshots.States {
	return c.node.snapshots.States(podsnapshots.Owner{
		Owner: s.owner, Pod: s.look().pod.Name, VM: s.vmName, Log: s.log,
		Find:     s.known,
		Forkable: func(rec vm.Record) bool { return podstatus.Up(&rec) && hasIdentity(&rec, false) },
		// The Events are the same as for an image.
		Pulling: func(from string) func(snapshot.Snapshot) {
			began := time.Now()
			s.event(corev1.EventTypeNormal, eventPulling, "Pulling snapshot %q", from)
			return func(got snapshot.Snapshot) {
				took := time.Since(began).Round(time.Millisecond)
				if got.Arriving {
					s.event(corev1.EventTypeNormal, eventPulled, "Successfully pulled the disks of snapshot %q in %s. Its memory follows while the VM runs.", from, took)
					return
				}
				s.event(corev1.EventTypeNormal, eventPulled, "Successfully pulled snapshot %q in %s. Snapshot size: %d bytes.", from, took, got.Size)
			}
		},
	})
}
