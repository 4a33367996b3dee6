package virtualmachine

import (
	"context"
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// Reasons of Events about dumps of memory.
const (
	ReasonDumped     = "MemoryDumpCompleted"
	ReasonDumpFailed = "MemoryDumpError"
)

// dumpFailed is what the annotation of a claim says that has no dump, in KubeVirt's words.
const dumpFailed = "Memory dump failed"

// dump decides the next step of a dump of the machine's memory. The status of the instance has the dump while its node works on it.
func (s *step) dump(x seen) {
	r := s.status.MemoryDumpRequest
	if r == nil {
		return
	}
	runs := x.vmi != nil && x.vmi.DeletionTimestamp == nil && x.vmi.Status.Phase == v1.Running
	var entry *v1.VolumeStatus
	if x.vmi != nil {
		entry = kubevirt.Dump(x.vmi)
	}
	drop := func() (gone bool) {
		if entry != nil && !x.vmi.IsFinal() {
			without := kubevirt.WithoutDump(x.vmi)
			s.told = &without
		}
		return entry == nil || x.vmi.IsFinal()
	}
	switch {
	case r.Remove || r.Phase == v1.MemoryDumpDissociating:
		if r.Phase = v1.MemoryDumpDissociating; drop() {
			s.status.MemoryDumpRequest = nil
		}
	case r.Phase == v1.MemoryDumpAssociating && !runs, r.Phase == v1.MemoryDumpInProgress && (!runs || entry == nil):
		s.dumpEnds(x, v1.MemoryDumpFailed, "the VM does not run any more")
	case r.Phase == v1.MemoryDumpAssociating && entry == nil:
		with := kubevirt.WithDump(x.vmi, r.ClaimName, x.now)
		begun := metav1.NewTime(x.now)
		s.told, r.Phase, r.StartTimestamp = &with, v1.MemoryDumpInProgress, &begun
	case r.Phase == v1.MemoryDumpAssociating && entry.Phase == v1.MemoryDumpVolumeInProgress && entry.MemoryDumpVolume.ClaimName == r.ClaimName: // killed before the status was written
		r.Phase = v1.MemoryDumpInProgress
	case r.Phase == v1.MemoryDumpAssociating: // an earlier one
		drop()
	case r.Phase == v1.MemoryDumpInProgress:
		d := entry.MemoryDumpVolume
		if d.StartTimestamp != nil {
			r.StartTimestamp, r.EndTimestamp = d.StartTimestamp, d.EndTimestamp
		}
		switch entry.Phase {
		case v1.MemoryDumpVolumeCompleted:
			r.FileName = &d.TargetFileName
			s.dumpEnds(x, v1.MemoryDumpUnmounting, "")
		case v1.MemoryDumpVolumeFailed:
			s.dumpEnds(x, v1.MemoryDumpFailed, entry.Message)
		default:
		}
	case r.Phase == v1.MemoryDumpUnmounting:
		if drop() {
			r.Phase = v1.MemoryDumpCompleted
		}
	default: // Completed, Failed
		drop()
	}
}

// dumpEnds notes how a dump has ended.
func (s *step) dumpEnds(x seen, phase v1.MemoryDumpPhase, why string) {
	r := s.status.MemoryDumpRequest
	if r.Phase, r.Message = phase, why; r.EndTimestamp == nil {
		ended := metav1.NewTime(x.now)
		r.EndTimestamp = &ended
	}
}

// tell writes the status of the instance that a dump asks for.
func (r *Reconciler) tell(ctx context.Context, vmi *v1.VirtualMachineInstance, s v1.VirtualMachineInstanceStatus) error {
	next := vmi.DeepCopy()
	next.Status = s
	if err := r.Client.Patch(ctx, next, client.MergeFromWithOptions(vmi, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("write the status of VirtualMachineInstance %s: %w", vmi.Name, err)
	}
	return nil
}

// noteDump notes at its claim which dump it has, and tells that a dump has ended, once. is is the new status, whose write follows.
func (r *Reconciler) noteDump(ctx context.Context, vm *v1.VirtualMachine, is *v1.VirtualMachineMemoryDumpRequest) error {
	was := vm.Status.MemoryDumpRequest
	if is == nil || was == nil || was.Phase == is.Phase || is.Phase != v1.MemoryDumpUnmounting && is.Phase != v1.MemoryDumpFailed {
		return nil
	}
	note := dumpFailed
	if is.Phase == v1.MemoryDumpUnmounting && is.FileName != nil {
		note = *is.FileName
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{v1.PVCMemoryDumpAnnotation: note}}})
	if err == nil {
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: vm.Namespace, Name: is.ClaimName}}
		err = controller.IgnoreStale(r.Client.Patch(ctx, claim, client.RawPatch(types.MergePatchType, body)))
	}
	if err != nil {
		return fmt.Errorf("annotate PersistentVolumeClaim %s of VirtualMachine %s: %w", is.ClaimName, vm.Name, err)
	}
	if is.Phase == v1.MemoryDumpFailed {
		r.Events.Eventf(vm, nil, corev1.EventTypeWarning, ReasonDumpFailed, "MemoryDump", "the memory is not dumped to claim %s: %s", is.ClaimName, is.Message)
	} else {
		r.Events.Eventf(vm, nil, corev1.EventTypeNormal, ReasonDumped, "MemoryDump", "the memory is the file %s on the volume of claim %s", note, is.ClaimName)
	}
	return nil
}
