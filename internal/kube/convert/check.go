package convert

import (
	"errors"
	"maps"
	"path"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// Check returns everything about pod that its VM cannot provide; an empty list means that Spec can be used. It accepts
// settings that a VM may safely ignore because it isolates more strongly, such as dropped capabilities and seccomp.
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

// forbid returns a function that adds to errs, when its first argument is true, that the field at path is forbidden.
func forbid(errs *field.ErrorList) func(when bool, path *field.Path, why string) {
	return func(when bool, path *field.Path, why string) {
		if when {
			*errs = append(*errs, field.Forbidden(path, why))
		}
	}
}

// checkAnnotations refuses invalid keys and those that ask for what this node does not have.
func checkAnnotations(pod *corev1.Pod) field.ErrorList {
	var errs field.ErrorList
	ask, err := contract.ParseVMSpec(pod.Annotations)
	errs = append(errs, badKeys(err)...)
	_, err = contract.ParseSticky(pod.Annotations)
	errs = append(errs, badKeys(err)...)
	errs = append(errs, checkVirtlet(pod)...)
	errs = append(errs, checkOrigin(pod, ask)...)
	errs = append(errs, CheckNames(pod)...)
	forbid(&errs)(ask.OS != "" && ask.OS != contract.OSLinux, annotationPath(contract.KeyOS), "this node runs only Linux guests")
	return errs
}

// badKeys turns the errors of the contract's parsers into errors of the pod.
func badKeys(err error) (errs field.ErrorList) {
	bad, _ := errors.AsType[contract.Errors](err)
	for _, e := range bad {
		errs = append(errs, field.Invalid(annotationPath(e.Key), e.Value, e.Reason))
	}
	return errs
}

func checkPod(pod *corev1.Pod) field.ErrorList {
	var errs field.ErrorList
	spec, s := field.NewPath("spec"), &pod.Spec
	no := forbid(&errs)
	const own = "a VM cannot share namespaces of its host"
	no(s.HostNetwork, spec.Child("hostNetwork"), own)
	no(s.HostPID, spec.Child("hostPID"), own)
	no(s.HostIPC, spec.Child("hostIPC"), own)
	no(len(s.Containers) == 0, spec.Child("containers"), "the pod must have at least one container")
	no(s.OS != nil && s.OS.Name != corev1.Linux, spec.Child("os", "name"), "this node runs only Linux guests")
	no(len(s.HostAliases) > 0, spec.Child("hostAliases"), "a VM does not support hostAliases")
	no(s.DNSConfig != nil, spec.Child("dnsConfig"), "a VM gets its DNS settings from its network")
	no(s.DNSPolicy == corev1.DNSNone, spec.Child("dnsPolicy"), "a VM gets its DNS settings from its network")
	no(s.SetHostnameAsFQDN != nil && *s.SetHostnameAsFQDN, spec.Child("setHostnameAsFQDN"), "the host name of a guest cannot be an FQDN")
	no(len(s.ResourceClaims) > 0, spec.Child("resourceClaims"), "a VM cannot have devices")
	if sc := s.SecurityContext; sc != nil {
		podPath := spec.Child("securityContext")
		no(len(sc.Sysctls) > 0, podPath.Child("sysctls"), "a VM does not support sysctls of the pod")
		no(len(sc.SupplementalGroups) > 0, podPath.Child("supplementalGroups"), "a VM does not support supplementalGroups; the image sets the groups of the main process")
		no(sc.WindowsOptions != nil, podPath.Child("windowsOptions"), "this node runs only Linux guests")
	}
	return errs
}

// checkSecurity checks the combined settings of the pod and its container at that path.
func checkSecurity(pod *corev1.Pod, c *corev1.Container, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	no := forbid(&errs)
	uid, gid := runAs(pod, c)
	nonRoot := false
	path := field.NewPath("spec", "securityContext")
	if sc := pod.Spec.SecurityContext; sc != nil {
		nonRoot = yes(sc.RunAsNonRoot)
	}
	if sc := c.SecurityContext; sc != nil {
		path = at.Child("securityContext")
		if sc.RunAsNonRoot != nil {
			nonRoot = *sc.RunAsNonRoot
		}
		no(yes(sc.Privileged), path.Child("privileged"), "a VM has no privileges on its host")
		no(sc.WindowsOptions != nil, path.Child("windowsOptions"), "this node runs only Linux guests")
	}
	no(gid != nil && uid == nil, path.Child("runAsGroup"), "runAsGroup needs runAsUser")
	no(nonRoot && uid == nil, path.Child("runAsNonRoot"), "the user of the image is not known before the start; set runAsUser")
	no(nonRoot && uid != nil && *uid == 0, path.Child("runAsUser"), "runAsNonRoot forbids user 0")
	return errs
}

func checkContainer(c *corev1.Container, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	no := forbid(&errs)
	for i, p := range c.Ports {
		no(p.HostPort != 0, path.Child("ports").Index(i).Child("hostPort"), "a VM has its own IP address; connect to that address, or use a Service")
	}
	errs = append(errs, checkHooks(c.Lifecycle, path.Child("lifecycle"))...)
	foreign(c.Resources.Limits, path.Child("resources", "limits"), no)
	foreign(c.Resources.Requests, path.Child("resources", "requests"), no)
	no(len(c.Resources.Claims) > 0, path.Child("resources", "claims"), "a VM cannot have devices")
	for i, e := range c.Env {
		no(!nameable(e.Name), path.Child("env").Index(i).Child("name"), "is not a valid name of an environment variable")
		if e.ValueFrom == nil {
			continue
		}
		from := path.Child("env").Index(i).Child("valueFrom")
		if ref := e.ValueFrom.FieldRef; ref != nil {
			no(ref.FieldPath == "status.podIP" || ref.FieldPath == "status.podIPs", from.Child("fieldRef"),
				"the address of a VM is not known before it starts")
		}
		no(e.ValueFrom.FileKeyRef != nil, from.Child("fileKeyRef"), "a VM cannot read environment variables from a file of a volume")
	}
	return errs
}

// checkHooks refuses hooks at which the kubelet only fails later.
func checkHooks(l *corev1.Lifecycle, path *field.Path) field.ErrorList {
	if l == nil {
		return nil
	}
	var errs field.ErrorList
	hook := func(h *corev1.LifecycleHandler, name string) {
		if h != nil && h.Exec == nil && h.HTTPGet == nil && h.Sleep == nil {
			errs = append(errs, field.Forbidden(path.Child(name, "tcpSocket"), "a hook must be exec, httpGet or sleep"))
		}
	}
	hook(l.PostStart, "postStart")
	hook(l.PreStop, "preStop")
	if l.StopSignal != nil && *l.StopSignal != corev1.SIGTERM {
		errs = append(errs, field.Forbidden(path.Child("stopSignal"), "a VM's process is always stopped with SIGTERM"))
	}
	return errs
}

// foreign refuses resources other than those that every VM has.
func foreign(list corev1.ResourceList, path *field.Path, no func(bool, *field.Path, string)) {
	for _, name := range slices.Sorted(maps.Keys(list)) {
		switch name {
		case corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage:
		default:
			no(true, path.Key(string(name)), "a VM cannot have this resource")
		}
	}
}

// checkVM applies the engine's own rules, so that a pod that can never run is refused at once.
func checkVM(pod *corev1.Pod) field.ErrorList {
	if err := Spec(pod, Node{}, nil).Validate(); err != nil {
		return field.ErrorList{field.Invalid(field.NewPath("spec"), pod.Name, err.Error())}
	}
	return nil
}

// CheckNames returns the names of VMs and snapshots in pod that are invalid or belong to another namespace. The default name
// of a pod is always valid.
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

// CheckKeys returns the annotations of pod whose values are invalid for any node.
func CheckKeys(pod *corev1.Pod) field.ErrorList {
	_, spec := contract.ParseVMSpec(pod.Annotations)
	_, runtime := contract.ParseVMRuntime(pod.Annotations)
	_, eviction := contract.ParseEvictionPolicy(pod.Annotations)
	_, sticky := contract.ParseSticky(pod.Annotations)
	var errs field.ErrorList
	for _, err := range []error{spec, runtime, eviction, sticky} {
		errs = append(errs, badKeys(err)...)
	}
	return errs
}

// Static reports whether pod represents an existing machine that no node creates, starts or stops.
func Static(pod *corev1.Pod) bool {
	return pod.Annotations[contract.KeyMode] == string(contract.ModeStatic)
}

// checkStatic returns what prevents the machine of a static pod from being adopted. It ignores most of what the pod says of
// containers, because nothing of it runs. It refuses only settings that would never take effect although somebody waits for
// them.
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
