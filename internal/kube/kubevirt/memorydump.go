package kubevirt

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
)

// A dump of the memory of an instance is asked for by an entry in its status, which VirtualMachine's controller makes and removes. The pod of the
// instance gets the request as an annotation, and its node answers with another.

// maxDumpPart is how many characters of the name of an instance, and of a claim, are in the name of a file.
const maxDumpPart = 100

// GuestMemory returns the size of the guest's memory in bytes, 0 if the instance does not say it.
func GuestMemory(s *v1.VirtualMachineInstanceSpec) int64 {
	size, _ := memory(s)
	return size
}

// Dump returns the entry of a dump in the status of vmi, nil if there is none.
func Dump(vmi *v1.VirtualMachineInstance) *v1.VolumeStatus {
	i := slices.IndexFunc(vmi.Status.VolumeStatus, func(s v1.VolumeStatus) bool { return s.MemoryDumpVolume != nil })
	if i < 0 {
		return nil
	}
	return &vmi.Status.VolumeStatus[i]
}

// WithDump returns the status of vmi with the request to dump its memory to claim.
func WithDump(vmi *v1.VirtualMachineInstance, claim string, now time.Time) v1.VirtualMachineInstanceStatus {
	s := *vmi.Status.DeepCopy()
	file := fmt.Sprintf("%.*s-%.*s-%s.memory.dump", maxDumpPart, vmi.Name, maxDumpPart, claim, now.UTC().Format("20060102-150405"))
	s.VolumeStatus = append(s.VolumeStatus, v1.VolumeStatus{
		Name: claim, Phase: v1.MemoryDumpVolumeInProgress, Message: "the node writes the memory of the guest to the volume",
		PersistentVolumeClaimInfo: &v1.PersistentVolumeClaimInfo{ClaimName: claim},
		MemoryDumpVolume:          &v1.DomainMemoryDumpInfo{ClaimName: claim, TargetFileName: file},
	})
	return s
}

// WithoutDump returns the status of vmi without any dump.
func WithoutDump(vmi *v1.VirtualMachineInstance) v1.VirtualMachineInstanceStatus {
	s := *vmi.Status.DeepCopy()
	s.VolumeStatus = slices.DeleteFunc(s.VolumeStatus, func(s v1.VolumeStatus) bool { return s.MemoryDumpVolume != nil })
	return s
}

// AskedDump returns what the pod of vmi is to be asked for; the zero value: nothing that is not answered.
func AskedDump(vmi *v1.VirtualMachineInstance) contract.MemoryDump {
	d := Dump(vmi)
	if d == nil || d.Phase != v1.MemoryDumpVolumeInProgress {
		return contract.MemoryDump{}
	}
	return contract.MemoryDump{Claim: d.MemoryDumpVolume.ClaimName, File: d.MemoryDumpVolume.TargetFileName}
}

// DumpRequest returns the value that KeyMemoryDump has to have in the pod of vmi. same: it has it. A request that nobody waits for any more is
// withdrawn, so that the node does not write to a claim that may be for something else by then.
func DumpRequest(vmi *v1.VirtualMachineInstance, pod *corev1.Pod) (value string, same bool) {
	if ask := AskedDump(vmi); ask.File != "" {
		return ask.String(), pod.Annotations[contract.KeyMemoryDump] == ask.String()
	}
	ask, err := contract.ParseMemoryDump(pod.Annotations)
	return "", err != nil || ask.File == "" || contract.ParseMemoryDumped(pod.Annotations).Answers(ask)
}

// dumps returns the dump of vmi with what the node of pod has answered.
func dumps(vmi *v1.VirtualMachineInstance, pod *corev1.Pod) []v1.VolumeStatus {
	d := Dump(vmi)
	if d == nil {
		return nil
	}
	s, answer := *d.DeepCopy(), contract.ParseMemoryDumped(pod.Annotations)
	if ask := AskedDump(vmi); ask.File == "" || !answer.Answers(ask) {
		return []v1.VolumeStatus{s}
	}
	begun, ended := metav1.NewTime(answer.Begun), metav1.NewTime(answer.Ended)
	s.MemoryDumpVolume.StartTimestamp, s.MemoryDumpVolume.EndTimestamp = &begun, &ended
	s.Phase, s.Message = v1.MemoryDumpVolumeCompleted, "the memory of the guest is on the volume"
	if answer.Why != "" {
		s.Phase, s.Message = v1.MemoryDumpVolumeFailed, answer.Why
	}
	return []v1.VolumeStatus{s}
}
