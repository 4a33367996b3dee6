// Package convert converts a Pod to the specification of a VM, or returns the list of the pod's settings that a VM cannot
// provide.
//
// It is pure: it reads ConfigMaps, Secrets and tokens of the cluster only through a Resolver or Source. It starts nothing and
// writes no status.
package convert

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// Default sizes of a VM.
const (
	DefaultCPUs   = 1
	DefaultMemory = 256 << 20
)

// DefaultClusterDomain is the DNS domain of a cluster that configures no other.
const DefaultClusterDomain = "cluster.local"

// Node holds the data about the node that a VM may see.
type Node struct {
	Name          string
	IP            string
	ClusterDomain string // "": DefaultClusterDomain

	Memory int64 // bytes that it has; 0: not known

	ClusterDNS []string // name servers of the cluster; none: pods have those of their VM's network
	Searches   []string // the node's own domains
}

// VMName returns the name of pod's VM: the annotation, else a name derived from namespace and name. See CheckNames.
func VMName(pod *corev1.Pod) string {
	if name := pod.Annotations[contract.KeyName]; name != "" {
		return name
	}
	return contract.VMName(pod.Namespace, pod.Name)
}

// Image returns the image of pod's VM: the annotation, else the image of the container.
func Image(pod *corev1.Pod) string {
	if image := pod.Annotations[contract.KeyImage]; image != "" {
		return image
	}
	if c := container(pod); c != nil {
		return c.Image
	}
	return ""
}

// maxGrace is the longest grace period that a pod may request, so that later additions do not overflow.
const maxGrace = 10 * 365 * 24 * time.Hour

// Seconds returns n seconds as a grace period: 0 if n is negative, and at most ten years.
func Seconds(n int64) time.Duration {
	return time.Duration(min(max(n, 0), int64(maxGrace/time.Second))) * time.Second
}

// Grace returns how long the guest may take to shut down.
func Grace(pod *corev1.Pod) time.Duration {
	if s := pod.Spec.TerminationGracePeriodSeconds; s != nil && *s >= 0 {
		return Seconds(*s)
	}
	return vm.DefaultStopGrace
}

// Environment is the environment of each container of a pod, by its name.
type Environment map[string]Variables

// Variables are the environment of one container.
type Variables struct {
	Env      []vm.EnvVar
	FileKeys []vm.FileKey // variables that the guest reads from files; Env may contain words for them
}

// values returns the values by the names of the variables; vm.FileWord for those that only the guest knows.
func (v Variables) values() map[string]string {
	values := make(map[string]string, len(v.Env)+len(v.FileKeys))
	for _, e := range v.Env {
		values[e.Name] = e.Value
	}
	for i, k := range v.FileKeys {
		if k.Name != "" {
			values[k.Name] = vm.FileWord(i)
		}
	}
	return values
}

// Spec returns the specification of pod's VM on node, with env (from Env) as the environment of its containers. Its volumes
// have no content yet; see Fill. Precondition: Check(pod) returned no errors.
func Spec(pod *corev1.Pod, node Node, env Environment) vm.Spec {
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	size := sizeOf(pod, ask)
	s := vm.Spec{
		Name:      VMName(pod),
		Image:     Image(pod),
		CPUs:      size.cpus,
		Memory:    size.memory,
		Storage:   size.storage,
		Driver:    string(ask.Backend),
		Hosts:     hostAliases(pod),
		DNS:       dns(pod, node),
		Labels:    labels(pod, node),
		NICs:      NICs(pod),
		StopGrace: Grace(pod),
		Volumes:   volumes(pod),
		Sysctls:   sysctls(pod),
	}
	s.Firmware, s.SMBIOS = machine(pod)
	s.Graphics, s.Hardware, s.DiskRate = graphics(pod), hardware(pod), diskRate(pod)
	if Windows(pod) {
		s = s.AsWindows()
	}
	s.Paused = contract.Paused(pod.Annotations)
	s.Hostname, s.Domain = hostname(pod, node)
	if Several(pod) {
		s.Containers, s.Restart = several(pod, env), restart(pod)
	} else if c := container(pod); c != nil {
		whole := app(pod, c, env)
		whole.Root = true
		s.Containers, s.Restart = []vm.Container{whole}, restart(pod)
	}
	for i, c := range containers(pod)[:len(s.Containers)] {
		s.Containers[i].Resources = resources(pod, c, node)
	}
	if ask.Managed { // its VM ends with the process and is restarted as a whole, or evicted
		s = s.Bootable()
	}
	return s.Default()
}

// container returns the pod's first app container, or nil if there is none.
func container(pod *corev1.Pod) *corev1.Container {
	if len(pod.Spec.Containers) == 0 {
		return nil
	}
	return &pod.Spec.Containers[0]
}

func process(pod *corev1.Pod, c *corev1.Container, env Variables) vm.Process {
	values := env.values()
	p := vm.Process{Env: env.Env, FileKeys: env.FileKeys, WorkDir: c.WorkingDir, User: user(pod, c), TTY: c.TTY, Stdin: c.Stdin, StdinOnce: c.StdinOnce}
	p.Security = security(pod, c)
	if c.Lifecycle != nil && c.Lifecycle.StopSignal != nil {
		p.StopSignal = string(*c.Lifecycle.StopSignal)
	}
	p.ReadOnlyRoot = c.SecurityContext != nil && yes(c.SecurityContext.ReadOnlyRootFilesystem)
	for _, a := range c.Command {
		p.Entrypoint = append(p.Entrypoint, expand(a, values))
	}
	for _, a := range c.Args {
		p.Args = append(p.Args, expand(a, values))
	}
	return p
}

// ProbeCommand returns the command of a probe of c. It expands only variables whose values are in the pod's spec.
func ProbeCommand(c *corev1.Container, command []string) []string {
	values := map[string]string{}
	for _, e := range c.Env {
		if e.ValueFrom == nil {
			values[e.Name] = expand(e.Value, values)
		}
	}
	out := make([]string, len(command))
	for i, arg := range command {
		out[i] = expand(arg, values)
	}
	return out
}

func annotationPath(key string) *field.Path {
	return field.NewPath("metadata", "annotations").Key(key)
}
