package convert

import (
	"errors"
	"maps"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// Check returns an error for each setting of pod that its VM cannot provide. If it returns none, Spec may be called. It
// accepts settings that a VM may ignore because it isolates more strongly.
func Check(pod *corev1.Pod) field.ErrorList {
	if Static(pod) {
		return checkStatic(pod)
	}
	var errs field.ErrorList
	errs = append(errs, checkAnnotations(pod)...)
	errs = append(errs, checkPod(pod)...)
	errs = append(errs, checkVolumes(pod)...)
	errs = append(errs, checkContainers(pod)...)
	if len(errs) == 0 {
		errs = append(errs, checkVM(pod)...)
	}
	return errs
}

// forbid returns a function that, if its first argument is true, adds the error that the field at path is forbidden.
func forbid(errs *field.ErrorList) func(when bool, path *field.Path, why string) {
	return func(when bool, path *field.Path, why string) {
		if when {
			*errs = append(*errs, field.Forbidden(path, why))
		}
	}
}

// checkAnnotations refuses annotations with invalid values, and annotations that ask for features that this node lacks.
func checkAnnotations(pod *corev1.Pod) field.ErrorList {
	var errs field.ErrorList
	ask, err := contract.ParseVMSpec(pod.Annotations)
	errs = append(errs, badKeys(err)...)
	_, err = contract.ParseSticky(pod.Annotations)
	errs = append(errs, badKeys(err)...)
	errs = append(errs, checkDeletion(pod, ask)...)
	errs = append(errs, checkVirtlet(pod)...)
	errs = append(errs, checkMachine(pod)...)
	errs = append(errs, CheckNetworks(pod)...)
	errs = append(errs, checkOrigin(pod, ask)...)
	errs = append(errs, CheckNames(pod)...)
	no := forbid(&errs)
	no(ask.OS == contract.OSAndroid || ask.OS == contract.OSMacOS, annotationPath(contract.KeyOS), "this node runs guests of linux and windows")
	no(ask.OS == contract.OSWindows && ask.Backend == contract.BackendFirecracker, annotationPath(contract.KeyOS), "firecracker cannot run windows; leave out "+contract.KeyBackend)
	return errs
}

// checkDeletion refuses to hibernate a VM at its pod's deletion if no later pod would resume it, or if another annotation
// decides what is saved.
func checkDeletion(pod *corev1.Pod, ask contract.VMSpec) field.ErrorList {
	policy, err := contract.ParseDeletionPolicy(pod.Annotations)
	errs := badKeys(err)
	no := forbid(&errs)
	for _, v := range Disks(pod) {
		no(Saves(pod), annotationPath(contract.KeySnapshotPolicy), "the content of the volume "+v.Name+" is in no snapshot of the VM; set the policy to "+string(contract.SnapshotNever))
	}
	if policy != contract.DeleteHibernates {
		return errs
	}
	path := annotationPath(contract.KeyDeletionPolicy)
	for _, v := range Disks(pod) {
		no(true, path, "the state of the VM fits only its volume "+v.Name+" as it is now, so it cannot outlive the VM; remove one of them")
	}
	controller := metav1.GetControllerOf(pod)
	no(controller == nil, path, "the state is kept as long as the controller of the pod exists, and this pod has none")
	no(controller != nil && Renames(controller.Kind), path, "the state is kept for the next pod of the same name, and the controller of this pod gives each pod another name")
	no(ask.Managed, path, "conflicts with "+contract.KeyManaged+", because the policies of a managed VM decide what is saved; remove one of them")
	for _, name := range Shared(pod) {
		no(true, path, "the VM shares the folder of volume "+name+", so its state cannot be kept; remove one of them")
	}
	no(ask.SnapshotPolicy != "", path, "conflicts with "+contract.KeySnapshotPolicy+"; remove one of them")
	return errs
}

// badKeys converts the errors of the contract's parsers to errors of the pod's annotations.
func badKeys(err error) (errs field.ErrorList) {
	bad, _ := errors.AsType[contract.Errors](err)
	for _, e := range bad {
		errs = append(errs, field.Invalid(annotationPath(e.Key), e.Value, e.Reason))
	}
	return errs
}

// WrongOS reports whether pod is for another operating system than that of all guests, Linux.
func WrongOS(pod *corev1.Pod) bool { return pod.Spec.OS != nil && pod.Spec.OS.Name != corev1.Linux }

func checkPod(pod *corev1.Pod) field.ErrorList {
	var errs field.ErrorList
	spec, s := field.NewPath("spec"), &pod.Spec
	no := forbid(&errs)
	const own = "a VM cannot share namespaces of its host"
	no(s.HostNetwork, spec.Child("hostNetwork"), own)
	no(s.HostPID, spec.Child("hostPID"), own)
	no(s.HostIPC, spec.Child("hostIPC"), own)
	no(len(s.Containers) == 0, spec.Child("containers"), "the pod must have at least one container")
	no(s.DNSPolicy == corev1.DNSNone && (s.DNSConfig == nil || len(s.DNSConfig.Nameservers) == 0), spec.Child("dnsConfig"), "dnsPolicy None needs a name server")
	no(len(s.ResourceClaims) > 0, spec.Child("resourceClaims"), "a VM cannot have devices")
	if sc := s.SecurityContext; sc != nil {
		podPath := spec.Child("securityContext")
		no(sc.WindowsOptions != nil, podPath.Child("windowsOptions"), "this node runs only Linux guests")
	}
	return errs
}

func checkContainer(c *corev1.Container, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	no := forbid(&errs)
	for i, p := range c.Ports {
		at, err := netip.ParseAddr(p.HostIP)
		no(p.HostPort != 0 && p.HostIP != "" && (err != nil || !at.Is4() || at.IsLoopback() || at.IsMulticast()), path.Child("ports").Index(i).Child("hostIP"),
			"a node can forward ports of its IPv4 addresses, except loopback; leave it out for all of them")
	}
	foreign(c.Resources.Limits, path.Child("resources", "limits"), no)
	foreign(c.Resources.Requests, path.Child("resources", "requests"), no)
	no(len(c.Resources.Claims) > 0, path.Child("resources", "claims"), "a VM cannot have devices")
	for i, e := range c.Env {
		no(!nameable(e.Name), path.Child("env").Index(i).Child("name"), "is not a valid name of an environment variable")
		for j, m := range c.VolumeMounts {
			no(inFile(e) && strings.Contains(strings.ReplaceAll(m.SubPathExpr, "$$", ""), "$("+e.Name+")"), path.Child("volumeMounts").Index(j).Child("subPathExpr"),
				"the volumes of a VM are mounted before the value of the variable "+e.Name+" can be read from its file")
		}
	}
	return errs
}

// foreign refuses resources that a VM cannot have; see also checkHugePages.
func foreign(list corev1.ResourceList, path *field.Path, no func(bool, *field.Path, string)) {
	for _, name := range slices.Sorted(maps.Keys(list)) {
		switch name {
		case corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage, hugePages(vm.HugePages2M), hugePages(vm.HugePages1G):
		default:
			no(true, path.Key(string(name)), "a VM cannot have this resource")
		}
	}
}

// checkVM applies the engine's rules, so that a pod that can never run is refused immediately.
func checkVM(pod *corev1.Pod) field.ErrorList {
	if err := Spec(pod, Node{}, nil).Validate(); err != nil {
		return field.ErrorList{field.Invalid(field.NewPath("spec"), pod.Name, err.Error())}
	}
	return nil
}

// CheckNames returns an error for each name of a VM or snapshot in pod that is invalid or belongs to another namespace. The
// default name of a pod's VM is always valid.
func CheckNames(pod *corev1.Pod) field.ErrorList {
	if Static(pod) {
		return nil
	}
	var errs field.ErrorList
	foreign := func(key, value, name string) {
		if !contract.MayName(pod.Namespace, name) {
			errs = append(errs, field.Forbidden(annotationPath(key), strconv.Quote(value)+" is the name of a VM of another namespace"))
		}
	}
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	if ask.Name != "" {
		if err := vm.ValidateName(ask.Name); err != nil {
			errs = append(errs, field.Invalid(annotationPath(contract.KeyName), ask.Name, err.Error()))
		}
		foreign(contract.KeyName, ask.Name, ask.Name)
	}
	if ask.ForkFrom != "" {
		foreign(contract.KeyForkFrom, ask.ForkFrom, ask.ForkFrom)
	}
	if clones(ask) && ask.ForkFrom == "" && ask.CloneFromDir == "" {
		if ref, err := contract.ParseSnapshotRef(Image(pod)); err == nil {
			foreign(contract.KeyImage, Image(pod), path.Base(ref.Repo))
		}
	}
	return errs
}

// CheckKeys returns an error for each annotation of pod whose value is invalid on every node.
func CheckKeys(pod *corev1.Pod) field.ErrorList {
	_, spec := contract.ParseVMSpec(pod.Annotations)
	_, runtime := contract.ParseVMRuntime(pod.Annotations)
	_, eviction := contract.ParseEvictionPolicy(pod.Annotations)
	_, deletion := contract.ParseDeletionPolicy(pod.Annotations)
	_, sticky := contract.ParseSticky(pod.Annotations)
	var errs field.ErrorList
	for _, err := range []error{spec, runtime, eviction, deletion, sticky} {
		errs = append(errs, badKeys(err)...)
	}
	return errs
}

// Static reports whether pod represents an existing machine, which no node creates, starts or stops.
func Static(pod *corev1.Pod) bool {
	return pod.Annotations[contract.KeyMode] == string(contract.ModeStatic)
}

// checkStatic returns the errors of a static pod. It ignores most settings of containers, because the containers do not run.
// It refuses settings, such as a deadline, whose effect the user would wait for in vain.
func checkStatic(pod *corev1.Pod) field.ErrorList {
	ask, err := contract.ParseVMSpec(pod.Annotations)
	errs := badKeys(err)
	runtime, err := contract.ParseVMRuntime(pod.Annotations)
	errs = append(errs, badKeys(err)...)
	const why = "mode static adopts an existing machine and needs this annotation"
	if runtime.ID == "" {
		errs = append(errs, field.Required(annotationPath(contract.KeyID), why))
	}
	if pod.Annotations[contract.KeyIP] == "" {
		errs = append(errs, field.Required(annotationPath(contract.KeyIP), why))
	}
	no := forbid(&errs)
	no(ask.Managed, annotationPath(contract.KeyManaged), "a node cannot manage a static VM")
	no(contract.Hibernate(pod.Annotations), annotationPath(contract.KeyHibernate), "a node cannot hibernate a static VM")
	no(contract.HibernatesOnDelete(pod.Annotations), annotationPath(contract.KeyDeletionPolicy), "a node cannot hibernate a static VM")
	no(len(pod.Spec.Containers) > 1 || len(pod.Spec.InitContainers) > 0, field.NewPath("spec", "containers"), "a pod of a static VM must have one container and no init containers")
	no(pod.Spec.ActiveDeadlineSeconds != nil, field.NewPath("spec", "activeDeadlineSeconds"), "a node cannot stop a static VM")
	for i := range pod.Spec.Containers {
		c, path := &pod.Spec.Containers[i], field.NewPath("spec", "containers").Index(i)
		const foreign = "a static VM does not run the containers of the pod; its readiness is checked with ICMP, or on the TCP port of the annotation probe-port"
		no(c.ReadinessProbe != nil, path.Child("readinessProbe"), foreign)
		no(c.LivenessProbe != nil, path.Child("livenessProbe"), foreign)
		no(c.StartupProbe != nil, path.Child("startupProbe"), foreign)
		no(c.Lifecycle != nil, path.Child("lifecycle"), foreign)
	}
	return errs
}
