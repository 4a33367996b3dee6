package podprovider

import (
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// setLife sets the VM's lifecycle state, which its annotations will show.
func (w *worker) setLife(state contract.LifecycleState, message string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if state == contract.LifecycleHibernating || state == contract.LifecycleHibernated {
		w.tidy = false
	}
	w.life.State, w.life.Message = state, message
}

// annotations returns the annotations that describe the VM. An empty value removes the key. Preconditions: mu is held.
func (w *worker) annotations(ip string) map[string]string {
	a := map[string]string{}
	if w.static { // whoever runs the machine wrote them
		return a
	}
	switch {
	case podstatus.Up(w.rec):
		a[contract.KeyID] = string(w.rec.ID)
		if ip != "" {
			a[contract.KeyIP] = ip
		}
	case w.sleeping():
		a[contract.KeyID], a[contract.KeyIP] = "", ""
	}
	if hint, known := w.hint(); known {
		a[contract.KeyPostCloneHint] = hint
	}
	if w.lives() {
		w.settleLife()
		a[contract.KeyLifecycleState], a[contract.KeyLifecycleObserved], a[contract.KeyLifecycleMessage] = string(w.life.State), w.life.Observed, w.life.Message
	}
	return a
}

// lives reports whether somebody may wait for the VM's lifecycle state. An ordinary Kubernetes pod has its conditions for
// that. Preconditions: mu is held.
func (w *worker) lives() bool {
	return w.life.State != "" || contract.AsksSnapshot(w.pod.Annotations) || contract.Hibernate(w.pod.Annotations)
}

// settleLife derives the state from the VM where no transition sets it. Preconditions: mu is held.
func (w *worker) settleLife() {
	sleep := contract.Hibernate(w.pod.Annotations)
	switch {
	case w.verdict != nil:
		w.life.State, w.life.Message = contract.LifecycleFailed, w.verdict.Message
	case podstatus.Up(w.rec) && itself(w.rec, w.health.Reach().Ready) && w.tidy && !sleep:
		w.life.State, w.life.Message = contract.LifecycleReady, ""
	case w.life.State == "":
		w.life.State = contract.LifecycleCreating
	}
	// A state counts for a generation only when it is the state that was asked for.
	if w.life.State == contract.LifecycleFailed || w.life.State == contract.LifecycleReady && !sleep || w.life.State == contract.LifecycleHibernated && sleep {
		w.life.Observed = contract.Generation(w.pod.Annotations)
	}
}

// sleeping reports whether the VM is hibernated, here or elsewhere. Preconditions: mu is held.
func (w *worker) sleeping() bool {
	return w.rec != nil && w.rec.State == vm.StateHibernated || w.rec == nil && w.life.State == contract.LifecycleHibernated
}
