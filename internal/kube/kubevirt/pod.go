package kubevirt

import (
	"crypto/sha1" //nolint:gosec // as KubeVirt shortens names; nothing depends on its strength
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// What programs of KubeVirt look for in the pod of a VirtualMachineInstance.
const (
	Container = "compute"       // the container that is the VM
	launcher  = "virt-launcher" // value of the label kubevirt.io, and begin of the pod's name
)

const defaultPool = "default"

// kind is the kind of a VirtualMachineInstance.
var kind = v1.VirtualMachineInstanceGroupVersionKind

// PodName returns the name of the pod of a VirtualMachineInstance. It depends on the UID: the next instance of the name has another
// pod, and a controller that tries again makes no second one. It has room for the name of a volume: claims of emptyDisks have both.
func PodName(vmi *v1.VirtualMachineInstance) string {
	sum := sha256.Sum256([]byte(vmi.UID))
	return shorten(launcher+"-"+vmi.Name, 183) + "-" + hex.EncodeToString(sum[:])[:5]
}

// shorten cuts name to at most n bytes, such that different names stay different.
func shorten(name string, n int) string {
	if len(name) <= n {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	return name[:n-9] + "-" + hex.EncodeToString(sum[:])[:8]
}

// VMName returns the name of the VM on its node. All instances of one name have it, so they keep its addresses.
func VMName(vmi *v1.VirtualMachineInstance) string {
	return contract.VMName(vmi.Namespace, launcher+"-"+vmi.Name)
}

// ID returns the value of the label vmi.kubevirt.io/id: the name, or if it is no valid value, its begin and a hash.
func ID(name string) string {
	const most, begin = 63, 54
	if len(name) <= most {
		return name
	}
	sum := sha1.Sum([]byte(name)) //nolint:gosec // see the import
	return name[:begin] + "-" + hex.EncodeToString(sum[:])[:8]
}

// Controls reports whether vmi is the controller of the object.
func Controls(vmi *v1.VirtualMachineInstance, o metav1.Object) bool {
	return metav1.IsControlledBy(o, vmi)
}

// IsLauncher reports whether the pod says that it is the VM of a VirtualMachineInstance.
func IsLauncher(pod *corev1.Pod) bool { return pod.Labels[v1.AppLabel] == launcher }

// passed are the annotations of an instance that its pod has, too.
var passed = []string{contract.KeySticky, contract.KeyEvictionPolicy, contract.KeyDiskBandwidth, contract.KeyDiskIOPS}

// Pod returns the pod that is the VM of vmi. Preconditions: Check returns no error.
func Pod(vmi *v1.VirtualMachineInstance) *corev1.Pod {
	s := &vmi.Spec
	labels := maps.Clone(vmi.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	labels[v1.AppLabel], labels[v1.CreatedByLabel], labels[v1.VirtualMachineInstanceIDLabel] = launcher, string(vmi.UID), ID(vmi.Name)
	annotations := map[string]string{v1.DomainAnnotation: vmi.Name}
	size, _ := memory(s)
	contract.VMSpec{Name: VMName(vmi), SnapshotPolicy: contract.SnapshotNever}.Apply(annotations)
	machine := hardware(vmi)
	machine.Apply(annotations)
	networks(s, annotations)
	for _, key := range passed {
		if value := vmi.Annotations[key]; value != "" {
			annotations[key] = value
		}
	}
	if machine.Hardware.Keep != "" && annotations[contract.KeySticky] == "" { // what is kept is on one node
		annotations[contract.KeySticky] = contract.StickyNever
	}
	if id := systemUUID(vmi); id != "" {
		annotations[contract.KeyVirtletSystemUUID] = id
	}
	if s.StartStrategy != nil && *s.StartStrategy == v1.StartStrategyPaused {
		annotations[contract.KeyPaused] = "true"
	}
	annotations[contract.KeyVirtletVCPUs] = strconv.FormatInt(cpus(s), 10)
	container := corev1.Container{
		Name:           Container,
		Resources:      resources(s, size),
		ReadinessProbe: probe(s.ReadinessProbe),
		LivenessProbe:  probe(s.LivenessProbe),
	}
	no := false
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: PodName(vmi), Namespace: vmi.Namespace, Labels: labels, Annotations: annotations,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(vmi, kind)},
		},
		Spec: corev1.PodSpec{
			RestartPolicy:                 corev1.RestartPolicyNever,
			TerminationGracePeriodSeconds: grace(s),
			AutomountServiceAccountToken:  &no,
			ServiceAccountName:            serviceAccount(s),
			PriorityClassName:             s.PriorityClassName,
			SchedulerName:                 s.SchedulerName,
			Affinity:                      s.Affinity,
			TopologySpreadConstraints:     s.TopologySpreadConstraints,
			Hostname:                      s.Hostname,
			Subdomain:                     s.Subdomain,
			NodeSelector:                  selector(s),
			Tolerations:                   tolerations(s),
		},
	}
	if pod.Spec.Hostname == "" {
		pod.Spec.Hostname = hostname(vmi.Name)
	}
	if root := rootVolume(s); root == nil {
		container.Image = vm.FromVolume(kernelVolume(s))
	} else if root.ContainerDisk == nil {
		container.Image = vm.FromVolume(root.Name)
	}
	for _, v := range s.Volumes {
		if d := v.ContainerDisk; d != nil {
			container.Image, container.ImagePullPolicy = d.Image, d.ImagePullPolicy
			addPullSecret(pod, d.ImagePullSecret)
		}
		if seed, _ := cloudInit(v); seed != nil {
			seed.apply(pod, v.Name, seedName(vmi), keySecrets(s))
		}
		if volume, _, name := files(v); name != "" {
			pod.Spec.Volumes = append(pod.Spec.Volumes, volume) // an annotation makes it a disk
		}
		if v.HostDisk != nil {
			pod.Spec.Volumes = append(pod.Spec.Volumes, hostDiskVolume(v)) // an annotation makes it a disk
		}
		if dataDisk(v) {
			pod.Spec.Volumes = append(pod.Spec.Volumes, data(v))
			if name := CopiedClaim(&v); name != "" { // so that the scheduler takes a node that has it
				pod.Spec.Volumes = append(pod.Spec.Volumes, claimVolume(shorten("source-of-"+v.Name, 63), name))
			}
			container.VolumeDevices = append(container.VolumeDevices, corev1.VolumeDevice{Name: v.Name, DevicePath: "/dev/" + v.Name}) // the guest finds it by its serial
		}
	}
	addKernel(pod, s)
	if secrets := logins(s).Secrets(); len(secrets) > 0 {
		pod.Spec.Volumes = append(pod.Spec.Volumes, loginsVolume(secrets, pod.Spec.Volumes))
	}
	pod.Spec.Containers = []corev1.Container{container}
	return pod
}

// data returns the volume of the pod for a data disk.
func data(v v1.Volume) corev1.Volume {
	out := corev1.Volume{Name: v.Name}
	if d := v.PersistentVolumeClaim; d != nil {
		claim := d.PersistentVolumeClaimVolumeSource
		out.PersistentVolumeClaim = &claim
		return out
	}
	if d := v.DataVolume; d != nil {
		out.PersistentVolumeClaim = &corev1.PersistentVolumeClaimVolumeSource{ClaimName: d.Name}
		return out
	}
	block := corev1.PersistentVolumeBlock
	if name := CopiedClaim(&v); name != "" {
		out.Ephemeral = &corev1.EphemeralVolumeSource{VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, VolumeMode: &block,
			DataSource: &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: name},
		}}}
		return out
	}
	out.Ephemeral = &corev1.EphemeralVolumeSource{VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, VolumeMode: &block,
		Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: v.EmptyDisk.Capacity}},
	}}}
	return out
}

func claimVolume(name, claim string) corev1.Volume {
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}
}

// SizeCopies gives the copies of claims in a pod of Pod the sizes and the storage classes of the claims, which are given by the names of volumes.
func SizeCopies(pod *corev1.Pod, claims map[string]*corev1.PersistentVolumeClaim) {
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		claim := claims[v.Name]
		if claim == nil || v.Ephemeral == nil {
			continue
		}
		size := claim.Spec.Resources.Requests[corev1.ResourceStorage]
		if has := claim.Status.Capacity[corev1.ResourceStorage]; has.Cmp(size) > 0 { // a copy is not smaller than its source
			size = has
		}
		spec := &v.Ephemeral.VolumeClaimTemplate.Spec
		spec.StorageClassName, spec.Resources.Requests = claim.Spec.StorageClassName, corev1.ResourceList{corev1.ResourceStorage: size}
		spec.VolumeMode = claim.Spec.VolumeMode // a volume is copied in its own mode
	}
}

// grace returns how long the guest may take to shut down, in seconds; nil for the default of pods. It is never zero, which the examples of
// KubeVirt have: such a pod would be gone before its node has stopped the VM, and the next instance would find the VM there.
func grace(s *v1.VirtualMachineInstanceSpec) *int64 {
	if s.TerminationGracePeriodSeconds == nil {
		return nil
	}
	n := max(*s.TerminationGracePeriodSeconds, 1)
	return &n
}

// resources returns what the scheduler counts for the VM, and the size of its memory: as spec says, else the memory of the guest, and
// a tenth of each CPU, as in KubeVirt. Huge pages are instead of other memory.
func resources(s *v1.VirtualMachineInstanceSpec, size int64) corev1.ResourceRequirements {
	r := corev1.ResourceRequirements{Requests: corev1.ResourceList{}, Limits: corev1.ResourceList{}}
	maps.Copy(r.Requests, s.Domain.Resources.Requests)
	maps.Copy(r.Limits, s.Domain.Resources.Limits)
	q := *resource.NewQuantity(size, resource.BinarySI)
	r.Limits[corev1.ResourceMemory] = q
	if _, ok := r.Requests[corev1.ResourceMemory]; !ok {
		r.Requests[corev1.ResourceMemory] = q
	}
	if p, ok := pageSize(hugePages(&s.Domain)); ok {
		for _, list := range []corev1.ResourceList{r.Requests, r.Limits} {
			delete(list, corev1.ResourceMemory)
			list[corev1.ResourceName(corev1.ResourceHugePagesPrefix+p.String())] = q
		}
	}
	if _, ok := r.Limits[corev1.ResourceCPU]; !ok && r.Requests.Cpu().IsZero() {
		r.Requests[corev1.ResourceCPU] = *resource.NewMilliQuantity(cpuShare*cpus(s), resource.DecimalSI)
	}
	return r
}

// selector keeps the pod on nodes of Cocoon: other nodes cannot run it.
func selector(s *v1.VirtualMachineInstanceSpec) map[string]string {
	out := maps.Clone(s.NodeSelector)
	if out == nil {
		out = map[string]string{}
	}
	if out[contract.LabelPool] == "" {
		out[contract.LabelPool] = defaultPool
	}
	return out
}

func tolerations(s *v1.VirtualMachineInstanceSpec) []corev1.Toleration {
	return append([]corev1.Toleration{{Key: contract.TaintKey, Operator: corev1.TolerationOpExists}}, s.Tolerations...)
}

func probe(p *v1.Probe) *corev1.Probe {
	if p == nil {
		return nil
	}
	action := corev1.ProbeHandler{Exec: p.Exec, HTTPGet: p.HTTPGet, TCPSocket: p.TCPSocket}
	if p.GuestAgentPing != nil {
		action.Exec = &corev1.ExecAction{Command: []string{contract.CommandPing}}
	}
	return &corev1.Probe{
		ProbeHandler:        action,
		InitialDelaySeconds: p.InitialDelaySeconds, TimeoutSeconds: p.TimeoutSeconds, PeriodSeconds: p.PeriodSeconds,
		SuccessThreshold: p.SuccessThreshold, FailureThreshold: p.FailureThreshold,
	}
}

// hostname returns the host name of an instance that gives none: the name up to its first dot, cut to the length of a label.
func hostname(name string) string {
	name, _, _ = strings.Cut(name, ".")
	return strings.TrimRight(name[:min(len(name), 63)], "-")
}
