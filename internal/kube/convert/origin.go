package convert

import (
	"errors"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// Origin is what a pod's VM is created from. At most one field is set; the zero value boots from its image.
type Origin struct {
	Dir      string               // directory of the node with an exported snapshot
	Fork     string               // name of a running VM
	Snapshot contract.SnapshotRef // on the node, else in its registry
}

// Boots reports whether the VM boots from its image.
func (o Origin) Boots() bool { return o == Origin{} }

// OriginOf returns the origin of pod's VM: a directory, else a fork, else a snapshot, else its image. Precondition: Check
// returned no errors.
func OriginOf(pod *corev1.Pod) Origin {
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	switch {
	case ask.CloneFromDir != "":
		return Origin{Dir: ask.CloneFromDir}
	case ask.ForkFrom != "":
		return Origin{Fork: ask.ForkFrom}
	case clones(ask):
		ref, _ := contract.ParseSnapshotRef(Image(pod))
		return Origin{Snapshot: ref}
	}
	return Origin{}
}

// clones reports whether the mode is clone, which is the default of a managed VM.
func clones(ask contract.VMSpec) bool {
	return ask.Mode == contract.ModeClone || ask.Mode == "" && ask.Managed
}

// checkOrigin refuses invalid origins.
func checkOrigin(pod *corev1.Pod, ask contract.VMSpec) field.ErrorList {
	var errs field.ErrorList
	no := forbid(&errs)
	switch {
	case ask.CloneFromDir != "":
		no(!ask.Managed, annotationPath(contract.KeyCloneFromDir), "only a managed VM can be cloned from a folder; set "+contract.KeyManaged)
		no(ask.Mode == contract.ModeRun, annotationPath(contract.KeyCloneFromDir), "conflicts with mode run, which boots from the image; remove one of them")
		no(ask.ForkFrom != "", annotationPath(contract.KeyCloneFromDir), "conflicts with "+contract.KeyForkFrom+"; remove one of them")
	case ask.ForkFrom != "":
		if err := vm.ValidateName(ask.ForkFrom); err != nil {
			errs = append(errs, field.Invalid(annotationPath(contract.KeyForkFrom), ask.ForkFrom, err.Error()))
		}
		no(contract.CanonicalVMName(pod.Namespace, ask.ForkFrom) == contract.CanonicalVMName(pod.Namespace, VMName(pod)), annotationPath(contract.KeyForkFrom), "a VM cannot be forked from itself")
	case clones(ask):
		_, err := contract.ParseSnapshotRef(Image(pod))
		if bad, ok := errors.AsType[contract.KeyError](err); ok {
			errs = append(errs, badKeys(contract.Errors{bad})...)
		}
	}
	return errs
}

// Member returns the place of pod in its CocoonSet.
func Member(pod *corev1.Pod) contract.Member {
	return contract.Member{Namespace: pod.Namespace, Labels: pod.Labels, Owners: pod.OwnerReferences}
}

// Renames reports whether a controller of that kind gives each pod a name of its own. The next pod of any other controller,
// such as a StatefulSet or a custom resource, has the name of the pod that it replaces, and so the same VM.
func Renames(kind string) bool {
	switch kind {
	case "ReplicaSet", "Job", "DaemonSet", "ReplicationController":
		return true
	}
	return false
}

// Saves reports whether pod's VM must be saved before it is deleted.
func Saves(pod *corev1.Pod) bool {
	if !contract.AsksSnapshot(pod.Annotations) || contract.KeepSnapshot(pod.Annotations) {
		return false
	}
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	return contract.ShouldSnapshotVM(ask, Member(pod).Main(VMName(pod)))
}

// Clone returns the specification of the clone that pod asks for, without its origin. It ignores sizes, environment and
// command of the pod, because a clone keeps those of its snapshot.
func Clone(pod *corev1.Pod, node Node) vm.CloneSpec {
	name, _ := hostname(pod, node)
	return vm.CloneSpec{Name: VMName(pod), Labels: labels(pod, node), Hostname: name, StopGrace: Grace(pod), DNS: dns(pod, node), DiskRate: diskRate(pod)}
}

// Inherited describes, for an Event, the settings of pod that have no effect, because a clone takes them from its snapshot. It
// returns nil if there are none. It does not mention sizes, because users expect the snapshot's sizes.
func Inherited(pod *corev1.Pod) []string {
	var out []string
	say := func(when bool, what string) {
		if when {
			out = append(out, what)
		}
	}
	firmware, b := machine(pod)
	say(firmware != "", contract.KeyFirmware)
	say(b != nil, "what "+contract.KeySMBIOS+" and "+contract.KeyVirtletSystemUUID+" tell the guest")
	say(graphics(pod), contract.KeyGraphics)
	say(hardware(pod) != nil, contract.KeyHardware)
	say(len(sysctls(pod)) > 0, "sysctls")
	say(len(pod.Spec.HostAliases) > 0, "hostAliases")
	for _, c := range containers(pod) {
		of := ""
		if Several(pod) {
			of = " of container " + c.Name
		}
		say(len(c.Command)+len(c.Args) > 0, "command"+of)
		say(len(c.Env)+len(c.EnvFrom) > 0, "env"+of)
		say(c.SecurityContext != nil && yes(c.SecurityContext.ReadOnlyRootFilesystem), "readOnlyRootFilesystem"+of)
		say(c.SecurityContext != nil && (c.SecurityContext.Capabilities != nil || c.SecurityContext.AllowPrivilegeEscalation != nil || yes(c.SecurityContext.Privileged)),
			"capabilities and privileges"+of)
		for _, m := range c.VolumeMounts {
			say(m.MountPath != tokenPath, "the mount of "+m.Name+of)
		}
	}
	return out
}

// tokenPath is where admission mounts a token into every pod.
const tokenPath = "/var/run/secrets/kubernetes.io/serviceaccount"

// labels returns the labels by which the VM of pod is identified.
func labels(pod *corev1.Pod, node Node) map[string]string {
	l := map[string]string{
		contract.VMLabelNode:         node.Name,
		contract.VMLabelPodNamespace: pod.Namespace,
		contract.VMLabelPodName:      pod.Name,
		contract.VMLabelPodUID:       string(pod.UID),
	}
	if Saves(pod) {
		l[contract.VMLabelSave] = "true"
	}
	if contract.HibernatesOnDelete(pod.Annotations) {
		l[contract.VMLabelHibernate] = "true"
	}
	return l
}
