package podprovider

import (
	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// sayDisk announces that a disk has a fault, or that the fault is over.
func (w *worker) sayDisk(rec *vm.Record) {
	fault := podstatus.DiskFault(rec)
	if fault == w.diskTold {
		return
	}
	w.diskTold = fault
	switch {
	case fault != "":
		w.event(corev1.EventTypeWarning, fault, "VM %s: %s", w.vmName, rec.Message)
	case rec != nil && rec.State == vm.StateRunning:
		w.event(corev1.EventTypeNormal, eventDiskWell, "VM %s goes on: its disk takes what it writes", w.vmName)
	}
}
