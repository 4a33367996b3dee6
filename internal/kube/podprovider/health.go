package podprovider

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/podhealth"
	"cocoonstack.io/cocoon/internal/vm"
)

// newHealth returns the health of w's pod. Its lock comes after mu; see podhealth.Health.
func (w *worker) newHealth() *podhealth.Health {
	return podhealth.New(podhealth.Config{
		Prober: w.p.Prober, Scheduler: w.p.probes, Static: w.static,
		Measured: func(d time.Duration) { w.p.Metrics.probe.Observe(d.Seconds()) }, Count: w.p.Metrics.probed,
	}, podhealth.Owner{
		Look: w.whereabouts,
		Exec: w.guests.Exec, Kill: w.containers.KillContainer, Release: w.containers.ReleaseContainer,
		Poke: w.poke, Event: w.event, Log: w.log,
		Spawn: func(f func(context.Context)) context.CancelFunc { return w.background(f) },
	})
}

// whereabouts returns the pod, its VM and the VM's address.
func (w *worker) whereabouts() (pod *corev1.Pod, rec *vm.Record, ip string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pod, w.rec, w.address()
}
