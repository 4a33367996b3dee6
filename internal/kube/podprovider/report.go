package podprovider

import (
	"math"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podhealth"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
)

// report is what a worker tells about its pod: by the status, the annotations and Events.
type report struct {
	*common
	*podState
	health *podhealth.Health // has its own lock

	verdict *podstatus.Verdict
	pause   podstatus.Pause
	tries   wait.Backoff                     // after failed attempts at what is tried now
	last    *corev1.ContainerStateTerminated // the end of the run before this one
	again   bool                             // another run follows
	killed  time.Time                        // start of the run that we ended and that another run follows
	images  map[string]pulled                // by the name that the pod asks for
	lifecycle
	announced
}

// announced is what was reported already.
type announced struct {
	begun    bool      // a status
	told     time.Time // start of a run
	diskTold string    // disk fault
	hinted   string    // hint for a clone
}

// newReport returns the report for s. It takes from the pod's status what an earlier process knew.
func newReport(c *common, s *podState) *report {
	r := &report{common: c, podState: s, health: c.newHealth(s), images: map[string]pulled{}}
	f := s.look()
	r.life, _ = contract.ParseLifecycle(f.pod.Annotations)
	status := f.status.ContainerStatuses
	if len(status) > 0 {
		r.last = status[0].LastTerminationState.Terminated.DeepCopy()
		r.begun = true
	}
	if f.rec != nil {
		r.health.Resume(&f.status, f.rec)
		r.told = f.rec.StartedAt
		if len(status) > 0 && status[0].ContainerID == contract.ContainerIDScheme+string(f.rec.ID) {
			r.images[convert.Image(f.pod)] = pulled{name: status[0].Image, id: f.rec.ImageDigest, ref: status[0].ImageID}
		}
	}
	if f.status.Phase == corev1.PodFailed && f.status.Reason != "" {
		r.verdict = &podstatus.Verdict{Reason: f.status.Reason, Message: f.status.Message}
	}
	return r
}

// late returns how much of the active deadline of f's pod is left; a very long time when it has none.
func (r *report) late(f facts) time.Duration {
	limit := f.pod.Spec.ActiveDeadlineSeconds
	if limit == nil || f.status.StartTime == nil || podstatus.Over(f.rec) && !r.again {
		return math.MaxInt64
	}
	return time.Until(f.status.StartTime.Add(time.Duration(*limit) * time.Second))
}

// lifecycle is the state of the VM that its annotations show.
type lifecycle struct {
	life contract.Lifecycle
	tidy bool // no hibernated state is left in the registry
}

// pulled is an image of the pod's VM as far as this process knows it.
type pulled struct {
	name  string // in the store
	id    string // as in the VM's record
	ref   string // what the pod's status shows: the ID, or repository@digest for a registry's manifest
	local bool   // imported by hand, so there is no source to ask for a newer one
}

// shown returns what the status shows of a container whose image has that digest.
func (p pulled) shown(digest string) podstatus.Image {
	if digest != p.id || p.ref == "" { // the VM was created from another image than the last one pulled
		return podstatus.Image{ID: digest}
	}
	return podstatus.Image{Name: p.name, ID: p.ref}
}
