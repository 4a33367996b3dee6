package podprovider

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file has what other goroutines tell a worker, and what becomes of it.

// update stores the pod as the API server now has it.
func (w *worker) update(pod *corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(pod.Spec.EphemeralContainers) > len(w.pod.Spec.EphemeralContainers) {
		w.p.Recorder.Eventf(pod, corev1.EventTypeWarning, podstatus.ReasonUnserved, "%s", podstatus.NoEphemeral)
	}
	if w.rec != nil && !slices.Equal(imagesOf(pod), imagesOf(w.pod)) {
		w.p.Recorder.Eventf(pod, corev1.EventTypeWarning, podstatus.ReasonUnserved, "VM %s goes on with the image that it was made of; delete the pod to have one of another image", w.vmName)
	}
	w.pod = bare(pod)
	w.volumes.Poke() // the pod's labels and annotations may be in volume files
	w.poke()
}

// imagesOf returns the images that pod names.
func imagesOf(pod *corev1.Pod) (images []string) {
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		images = append(images, c.Image)
	}
	return images
}

// renew stores the pod when it is being deleted, because its annotations about the VM's state still count.
func (w *worker) renew(pod *corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pod = bare(pod)
	w.poke()
}

// noteGates stores the conditions of the pod as others set them.
func (w *worker) noteGates(pod *corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gates = pod.Status.Conditions
	w.poke()
}

func (w *worker) requestRemoval(r removal) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.removal != nil && w.removal.grace <= r.grace && (w.removal.confirmed || !r.confirmed) {
		return // nothing new: a grace can only become shorter
	}
	w.removal = &r
	if w.interrupt != nil {
		w.interrupt()
	}
	w.poke()
}

// replaced is called when the API server has another pod of our name: our pod is gone.
func (w *worker) replaced() {
	w.writer.stop()
	pod, _, _ := w.look()
	w.requestRemoval(removal{grace: convert.Grace(pod), confirmed: true})
}

// leaving reports whether the pod is being removed.
func (w *worker) leaving() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.removal != nil
}

func (w *worker) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// apply takes an event of a VM that is ours, or that will be ours by its label.
func (w *worker) apply(e vm.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rec == nil {
		w.heard[e.Record.ID] = e
		return
	}
	w.settle(e)
	w.poke()
}

// settle updates rec from e, unless rec is newer. Preconditions: mu is held, rec is set.
func (w *worker) settle(e vm.Event) {
	switch {
	case e.Record.ID != w.rec.ID:
	case e.Type == vm.EventDeleted:
		w.lost = true
	case e.Record.Revision > w.rec.Revision:
		rec := e.Record
		w.rec = &rec
	}
}

// missing is called when the Runtime's complete list does not contain our VM.
func (w *worker) missing(id vm.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rec != nil && w.rec.ID == id {
		w.lost = true
		w.poke()
	}
}

// take records rec as our VM, or as a newer state of it.
func (w *worker) take(rec vm.Record) *vm.Record {
	if rec.Spec.Labels[contract.VMLabelPodUID] == "" {
		w.p.adopted(w, rec.ID)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.rec == nil || w.rec.ID != rec.ID || rec.Revision >= w.rec.Revision {
		w.rec, w.lost = &rec, false
	}
	if e, ok := w.heard[rec.ID]; ok {
		w.settle(e)
	}
	clear(w.heard)
	return w.rec
}

// forget drops a VM that vanished before it ever ran: the engine rolls back a creation when its caller, such as an earlier
// process of ours, goes away. The pod lost nothing and gets another VM. The same applies to a hibernated VM whose snapshot
// is also in the registry.
func (w *worker) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log.Info("vm went and is made anew", "vm", w.rec.ID)
	w.rec, w.lost = nil, false
}
