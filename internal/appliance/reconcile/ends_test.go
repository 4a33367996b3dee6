package reconcile

import (
	"slices"
	"testing"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/workload"
)

// The end of an instance is counted once, whenever the daemon dies, and an instance that runs is found again.
func TestDaemonDies(t *testing.T) {
	bubble(t, func(r *rig) {
		r.apply(&capsulev1.Workload{Name: "web"})
		r.f.did()
		r.stop()
		r.start()
		r.is("", "RUNNING", "Running")
		r.stop()
		r.f.end("web", 9)
		r.start()
		r.is("remove web", "FAILED", "Error")
		// It died after the end was stored, and before the instance was removed.
		r.sleep(time.Second)
		r.f.did()
		r.stop()
		r.f.end("web", 9)
		if _, err := r.s.Change(t.Context(), "web", func(row *workload.Row) error {
			i := r.f.all["web"]
			ended(row, seen{instance: &i, boot: r.boot, now: time.Now()})
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		r.start()
		r.is("remove web", "FAILED", "Error")
		if row, _ := r.s.Get("web"); row.Status().GetRestartCount() != 2 {
			t.Errorf("%d restarts", row.Status().GetRestartCount())
		}
	})
}

// After the machine has booted again, everything starts at once.
func TestMachineReboots(t *testing.T) {
	bubble(t, func(r *rig) {
		r.apply(&capsulev1.Workload{Name: "web"})
		r.f.did()
		r.stop()
		i := r.f.all["web"]
		i.State = Ended // how is not known
		r.f.all["web"] = i
		r.boot = "boot-2"
		r.start()
		r.is("remove web, start web", "RUNNING", "Running")
		events, _ := r.s.Events("web", 0)
		if !slices.ContainsFunc(events, func(e *capsulev1.WorkloadEvent) bool { return e.GetReason() == "MachineRebooted" }) {
			t.Errorf("events %v", events)
		}
	})
}

// A machine that ends stops its workloads, whatever code they end with, and starts them again when it is back, except those that never start again, and those that
// had ended before.
func TestMachineEnds(t *testing.T) {
	for policy, back := range map[capsulev1.RestartPolicy]bool{
		capsulev1.RestartPolicy_RESTART_POLICY_ALWAYS:     true,
		capsulev1.RestartPolicy_RESTART_POLICY_ON_FAILURE: true, // with code 0, too
		capsulev1.RestartPolicy_RESTART_POLICY_NEVER:      false,
	} {
		t.Run(policy.String(), func(t *testing.T) {
			bubble(t, func(r *rig) {
				r.t = t
				r.apply(&capsulev1.Workload{Name: "web", RestartPolicy: policy})
				r.apply(&capsulev1.Workload{Name: "job", RestartPolicy: capsulev1.RestartPolicy_RESTART_POLICY_ON_FAILURE})
				r.f.end("job", 0)
				r.is("start web, start job, remove job", "RUNNING", "Running")
				r.stop()
				r.r.Suspend(t.Context(), time.Second)
				if did := r.f.did(); did != "stop web" {
					t.Errorf("did %q", did)
				}
				r.boot = "boot-2"
				r.start()
				if back {
					r.is("remove web, start web", "RUNNING", "Running")
				} else {
					r.is("remove web", "STOPPED", "MachineRebooted")
				}
			})
		})
	}
}
