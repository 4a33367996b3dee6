package reconcile

import (
	"cmp"
	"fmt"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/workload"
)

// The delays between starts.
const (
	firstDelay = time.Second
	mostDelay  = 5 * time.Minute
	longRun    = 10 * time.Minute // a run of this length begins the delays anew
)

// seen is what is known of a workload at one moment.
type seen struct {
	instance *Instance // nil: none
	boot     string    // id of this boot of the machine
	now      time.Time
	waits    string // for which workload it waits; "": none
	unwell   string // why its instance must be replaced, such as a failed probe; "": it is well
	ready    bool   // its probes say so
}

// action is what is to be done next.
type action int

const (
	rest   action = iota // nothing, until something changes
	start                // make an instance
	stop                 // end the instance
	settle               // store how the instance has ended
	remove               // remove the instance
	forget               // remove the row
)

// decide returns what is to be done for r. It is a pure function.
func decide(r workload.Row, s seen) action {
	i := s.instance
	switch {
	case i == nil && r.Desired() == capsulev1.DesiredState_DESIRED_STATE_DELETING:
		return forget
	case i == nil:
		if r.Runs() && r.Done != r.Hash() && !early(r, s.now) && s.waits == "" {
			return start
		}
		return rest
	case i.State == Ended && i.ID != r.Instance:
		return settle
	case i.State == Ended:
		return remove
	case !r.Runs() || i.Hash != r.Hash() || s.unwell != "" || r.Unwell == i.ID:
		return stop
	}
	return rest
}

// early reports whether r waits for its next start. A time that is further away than any delay was stored before the clock was set
// back.
func early(r workload.Row, now time.Time) bool {
	return now.Before(r.Next) && r.Next.Sub(now) <= mostDelay
}

// ended notes in r how its instance has ended, and when it starts again.
func ended(r *workload.Row, s seen) (reason, message string) {
	i, st := s.instance, r.Status()
	st.ExitCode, st.FinishedAtUnix, st.Ready = i.ExitCode, unix(i.EndedAt), false
	defer func() { status(r, seen{now: s.now}) }()
	deliberate := !r.Runs() || i.Hash != r.Hash()
	paused := r.Paused == i.ID
	lost := paused || i.ExitCode == nil && r.Boot != "" && r.Boot != s.boot
	unwell := ""
	if r.Unwell == i.ID {
		unwell = r.Why
	}
	reason, message = how(i, unwell)
	if lost {
		reason, message = "MachineRebooted", "it ended when the machine did"
	}
	r.Instance, r.Unwell, r.Why, r.Paused = i.ID, "", "", ""
	st.Reason, st.Message = reason, message
	switch {
	case deliberate:
		r.Next, r.Delay = time.Time{}, 0
		return "Stopped", message
	case !again(r.Workload.GetRestartPolicy(), i.ExitCode, unwell != "" || paused):
		r.Done = r.Hash()
		return reason, message
	}
	st.RestartCount++
	if lost {
		r.Next = time.Time{}
		return reason, message
	}
	if s.now.Sub(r.Started) >= longRun || s.now.Before(r.Started) {
		r.Delay = 0
	}
	backOff(r, s.now)
	return reason, message
}

// backOff sets when r may be started next.
func backOff(r *workload.Row, now time.Time) {
	r.Delay = min(max(firstDelay, 2*r.Delay), mostDelay)
	r.Next = now.Add(r.Delay)
}

// how says in which way an instance has ended.
func how(i *Instance, unwell string) (reason, message string) {
	switch {
	case unwell != "":
		return "Unhealthy", unwell
	case i.Reason != "":
		return i.Reason, cmp.Or(i.Message, "it has ended")
	case i.ExitCode == nil:
		return "Lost", cmp.Or(i.Message, "it has ended, and nobody knows how")
	case *i.ExitCode == 0:
		return "Completed", "its program has ended with code 0"
	}
	return "Error", fmt.Sprintf("its program has ended with code %d", *i.ExitCode)
}

// again reports whether a workload that has ended with that code, or was ended because it was unwell, starts again.
func again(p capsulev1.RestartPolicy, code *int32, unwell bool) bool {
	switch p {
	case capsulev1.RestartPolicy_RESTART_POLICY_NEVER:
		return false
	case capsulev1.RestartPolicy_RESTART_POLICY_ON_FAILURE:
		return unwell || code == nil || *code != 0
	case capsulev1.RestartPolicy_RESTART_POLICY_UNSPECIFIED, capsulev1.RestartPolicy_RESTART_POLICY_ALWAYS:
	}
	return true
}

// status brings the status of r up to date while nothing is to be done.
func status(r *workload.Row, s seen) {
	st := r.Status()
	st.ObservedGeneration = r.Workload.GetGeneration()
	if i := s.instance; i != nil {
		st.Address, st.StartedAtUnix = i.Address, unix(i.StartedAt)
		st.Ready = i.State == Running && s.ready
		st.Phase, st.Reason, st.Message = capsulev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING, "Running", ""
		if i.State == Preparing {
			st.Phase, st.Reason, st.Message = capsulev1.WorkloadPhase_WORKLOAD_PHASE_PENDING, "Starting", ""
		}
		return
	}
	st.Address, st.Ready = "", false
	failed := st.ExitCode == nil || st.GetExitCode() != 0
	switch {
	case !r.Runs():
		st.Phase, st.Reason, st.Message = capsulev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED, "Stopped", ""
	case r.Done == r.Hash() && failed:
		st.Phase = capsulev1.WorkloadPhase_WORKLOAD_PHASE_FAILED
	case r.Done == r.Hash():
		st.Phase = capsulev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED
	case early(*r, s.now):
		st.Phase = capsulev1.WorkloadPhase_WORKLOAD_PHASE_FAILED
	case s.waits != "":
		st.Phase, st.Reason, st.Message = capsulev1.WorkloadPhase_WORKLOAD_PHASE_PENDING, "Waiting", "it waits until workload "+s.waits+" is ready"
	}
}

func unix(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.Unix()
}
