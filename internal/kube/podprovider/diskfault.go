package podprovider

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/vm"
)

// conditionDiskFault is True while the host's disk does not accept the VM's writes. A pod that never had the fault lacks
// the condition.
const conditionDiskFault corev1.PodConditionType = "vm.cocoonstack.io/DiskFault"

// diskFault returns the reason if rec runs and its disk has a fault, otherwise "".
func diskFault(rec *vm.Record) string {
	if rec != nil && rec.State == vm.StateRunning && (rec.Reason == vm.ReasonDiskFull || rec.Reason == vm.ReasonDiskError) {
		return rec.Reason
	}
	return ""
}

// sayDisk announces that a disk has a fault, or that the fault is over.
func (w *worker) sayDisk(rec *vm.Record) {
	fault := diskFault(rec)
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

func hasCondition(all []corev1.PodCondition, kind corev1.PodConditionType) bool {
	return slices.ContainsFunc(all, func(c corev1.PodCondition) bool { return c.Type == kind })
}
