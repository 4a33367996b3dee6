// Package convert turns a Pod into the specification of a VM, or into the list of everything in it that a VM cannot provide.
//
// It is pure: ConfigMaps, Secrets and tokens of the cluster come through a Resolver or Source. It starts nothing and writes
// no status.
package convert

import (
	"strconv"
	"strings"
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

// Node holds the data about its node that a VM may see.
type Node struct {
	Name string
	IP   string
}

// VMName is the name of pod's VM: the annotation, else derived from namespace and name. See CheckNames.
func VMName(pod *corev1.Pod) string {
	if name := pod.Annotations[contract.KeyName]; name != "" {
		return name
	}
	return contract.VMName(pod.Namespace, pod.Name)
}

// Image is the image of pod's VM: the annotation, else that of the container.
func Image(pod *corev1.Pod) string {
	if image := pod.Annotations[contract.KeyImage]; image != "" {
		return image
	}
	if c := container(pod); c != nil {
		return c.Image
	}
	return ""
}

// maxGrace limits what a pod may request, so that later additions do not overflow.
const maxGrace = 10 * 365 * 24 * time.Hour

// Seconds returns n seconds as a grace period: 0 if n is negative, and at most ten years.
func Seconds(n int64) time.Duration {
	return time.Duration(min(max(n, 0), int64(maxGrace/time.Second))) * time.Second
}

// Grace is how long the guest may take to shut down.
func Grace(pod *corev1.Pod) time.Duration {
	if s := pod.Spec.TerminationGracePeriodSeconds; s != nil && *s >= 0 {
		return Seconds(*s)
	}
	return vm.DefaultStopGrace
}

// Environment is the environment of each container of a pod, by its name.
type Environment map[string][]vm.EnvVar

// Spec returns the VM of pod on node, with env (from Env) as the environment of its containers. Its volumes have no content;
// see Fill. Precondition: Check(pod) found nothing.
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
		Hostname:  hostname(pod),
		Labels:    labels(pod, node),
		NICs:      []vm.NICSpec{{Network: ask.Network}},
		StopGrace: Grace(pod),
		Volumes:   volumes(pod),
	}
	if Several(pod) {
		s.Containers, s.Restart = several(pod, env), restart(pod)
	} else if c := container(pod); c != nil {
		s.Process, s.Mounts = process(pod, c, env[c.Name]), mounts(c, valuesOf(env[c.Name]))
	}
	return s.Default()
}

// container is the pod's first application container, nil when there is none.
func container(pod *corev1.Pod) *corev1.Container {
	if len(pod.Spec.Containers) == 0 {
		return nil
	}
	return &pod.Spec.Containers[0]
}

func process(pod *corev1.Pod, c *corev1.Container, env []vm.EnvVar) vm.Process {
	values := valuesOf(env)
	p := vm.Process{Env: env, WorkDir: c.WorkingDir, User: user(pod, c), TTY: c.TTY, Stdin: c.Stdin, StdinOnce: c.StdinOnce}
	p.ReadOnlyRoot = c.SecurityContext != nil && yes(c.SecurityContext.ReadOnlyRootFilesystem)
	for _, a := range c.Command {
		p.Entrypoint = append(p.Entrypoint, expand(a, values))
	}
	for _, a := range c.Args {
		p.Args = append(p.Args, expand(a, values))
	}
	return p
}

// user returns uid or uid:gid, or "" for the image's own user.
func user(pod *corev1.Pod, c *corev1.Container) string {
	uid, gid := runAs(pod, c)
	if uid == nil {
		return ""
	}
	s := strconv.FormatInt(*uid, 10)
	if gid != nil {
		s += ":" + strconv.FormatInt(*gid, 10)
	}
	return s
}

// runAs merges the security contexts of pod and container, the container's first.
func runAs(pod *corev1.Pod, c *corev1.Container) (uid, gid *int64) {
	if sc := pod.Spec.SecurityContext; sc != nil {
		uid, gid = sc.RunAsUser, sc.RunAsGroup
	}
	if c.SecurityContext != nil {
		if c.SecurityContext.RunAsUser != nil {
			uid = c.SecurityContext.RunAsUser
		}
		if c.SecurityContext.RunAsGroup != nil {
			gid = c.SecurityContext.RunAsGroup
		}
	}
	return uid, gid
}

// hostname returns the pod's host name, cut to one DNS label: pod names may be longer and contain dots.
func hostname(pod *corev1.Pod) string {
	h := pod.Spec.Hostname
	if h == "" {
		h = strings.ReplaceAll(pod.Name, ".", "-")
	}
	if len(h) > 63 {
		h = h[:63]
	}
	return strings.Trim(h, "-")
}

// ProbeCommand returns the command of a probe of c. It replaces only variables whose values are in the spec.
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
