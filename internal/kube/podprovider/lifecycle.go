package podprovider

import (
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// slept reports whether the VM is hibernated or on its way there.
func (l *lifecycle) slept() bool {
	return l.life.State == contract.LifecycleHibernating || l.life.State == contract.LifecycleHibernated
}

// setLife sets the VM's lifecycle state, which its annotations will show.
func (l *lifecycle) setLife(state contract.LifecycleState, message string) {
	l.life.State, l.life.Message = state, message
	l.tidy = l.tidy && !l.slept()
}

// annotations returns the annotations that describe the VM. An empty value removes the key.
func (r *report) annotations(f facts, ip string) map[string]string {
	a := map[string]string{}
	if r.static { // whoever runs the machine wrote them
		return a
	}
	switch {
	case podstatus.Up(f.rec):
		a[contract.KeyID] = string(f.rec.ID)
		if ip != "" {
			a[contract.KeyIP] = ip
		}
	case r.sleeping(f):
		a[contract.KeyID], a[contract.KeyIP] = "", ""
	}
	if hint, known := r.hint(f); known {
		a[contract.KeyPostCloneHint] = hint
	}
	// Somebody may wait for the VM's lifecycle state. An ordinary Kubernetes pod has its conditions for that.
	if r.life.State != "" || contract.AsksSnapshot(f.pod.Annotations) || contract.Hibernate(f.pod.Annotations) {
		r.settleLife(f)
		a[contract.KeyLifecycleState], a[contract.KeyLifecycleObserved], a[contract.KeyLifecycleMessage] = string(r.life.State), r.life.Observed, r.life.Message
	}
	return a
}

// settleLife derives the state from the VM where no transition sets it.
func (r *report) settleLife(f facts) {
	sleep := contract.Hibernate(f.pod.Annotations)
	switch {
	case r.verdict != nil:
		r.life.State, r.life.Message = contract.LifecycleFailed, r.verdict.Message
	case podstatus.Up(f.rec) && itself(f.rec, r.health.Reach().Ready) && r.tidy && !sleep:
		r.life.State, r.life.Message = contract.LifecycleReady, ""
	case r.life.State == "":
		r.life.State = contract.LifecycleCreating
	}
	// A state counts for a generation only when it is the state that was asked for.
	if r.life.State == contract.LifecycleFailed || r.life.State == contract.LifecycleReady && !sleep || r.life.State == contract.LifecycleHibernated && sleep {
		r.life.Observed = contract.Generation(f.pod.Annotations)
	}
}

// sleeping reports whether the VM is hibernated, here or elsewhere.
func (l *lifecycle) sleeping(f facts) bool {
	return f.rec != nil && f.rec.State == vm.StateHibernated || f.rec == nil && l.life.State == contract.LifecycleHibernated
}
