package convert

import (
	"context"
	"fmt"
	"path"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// Several reports whether the containers of pod's VM have roots of their own. A pod's only container has the VM's root.
func Several(pod *corev1.Pod) bool {
	return len(pod.Spec.Containers) > 1 || len(pod.Spec.InitContainers) > 0
}

// ImageOf returns the name of the image that c, a container of pod, runs from.
func ImageOf(pod *corev1.Pod, c *corev1.Container) string {
	if !Several(pod) {
		return Image(pod)
	}
	return c.Image
}

// IsSidecar reports whether c, an init container, keeps running.
func IsSidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// containers returns all containers of pod in the order in which they start.
func containers(pod *corev1.Pod) []*corev1.Container {
	var out []*corev1.Container
	for i := range pod.Spec.InitContainers {
		out = append(out, &pod.Spec.InitContainers[i])
	}
	for i := range pod.Spec.Containers {
		out = append(out, &pod.Spec.Containers[i])
	}
	return out
}

// containerPath returns the path of the i-th of containers in the manifest.
func containerPath(pod *corev1.Pod, i int) *field.Path {
	if n := len(pod.Spec.InitContainers); i >= n {
		return field.NewPath("spec", "containers").Index(i - n)
	}
	return field.NewPath("spec", "initContainers").Index(i)
}

func several(pod *corev1.Pod, env Environment) []vm.Container {
	var out []vm.Container
	for i, c := range containers(pod) {
		kind := vm.ContainerApp
		if i < len(pod.Spec.InitContainers) {
			kind = vm.ContainerInit
			if IsSidecar(c) {
				kind = vm.ContainerSidecar
			}
		}
		x := app(pod, c, env)
		x.Image, x.Kind, x.Hold = c.Image, kind, holds(pod, i, c)
		out = append(out, x)
	}
	return out
}

// app returns c as an app container without an image of its own.
func app(pod *corev1.Pod, c *corev1.Container, env Environment) vm.Container {
	x := vm.Container{
		Name: c.Name, Kind: vm.ContainerApp, Process: process(pod, c, env[c.Name]), Mounts: mounts(pod, c, env[c.Name].values()), Restart: ownRestart(c),
	}
	if c.TerminationMessagePath != "" { // the API server has filled in the default
		x.MessagePath = path.Join("/", c.TerminationMessagePath)
	}
	x.MessageFromLog = c.TerminationMessagePolicy == corev1.TerminationMessageFallbackToLogsOnError
	return x
}

// holds reports whether the containers after c, the i-th of containers, wait until the node reports that c has started. c has
// started when its startup probe (only of a sidecar) has succeeded and its postStart hook has ended.
func holds(pod *corev1.Pod, i int, c *corev1.Container) bool {
	n := len(pod.Spec.InitContainers)
	hooked := c.Lifecycle != nil && c.Lifecycle.PostStart != nil
	return i < n && IsSidecar(c) && (hooked || c.StartupProbe != nil) || i >= n && i < n+len(pod.Spec.Containers)-1 && hooked
}

// Observed returns the containers of pod that may have probes and hooks, in the order in which they start.
func Observed(pod *corev1.Pod) []*corev1.Container {
	return slices.DeleteFunc(containers(pod), func(c *corev1.Container) bool {
		return slices.ContainsFunc(pod.Spec.InitContainers, func(i corev1.Container) bool { return i.Name == c.Name && !IsSidecar(&i) })
	})
}

func restart(pod *corev1.Pod) vm.RestartPolicy { return policy(string(pod.Spec.RestartPolicy)) }

// policy returns the restart policy that a pod or a container names in the same way; Always if it names none.
func policy(name string) vm.RestartPolicy {
	switch corev1.RestartPolicy(name) {
	case corev1.RestartPolicyNever:
		return vm.RestartNever
	case corev1.RestartPolicyOnFailure:
		return vm.RestartOnFailure
	case corev1.RestartPolicyAlways:
	}
	return vm.RestartAlways
}

// ownRestart returns what c itself says of its restarts, nil if it has the policy of its pod.
func ownRestart(c *corev1.Container) *vm.Restart {
	if c.RestartPolicy == nil {
		return nil
	}
	r := &vm.Restart{Policy: policy(string(*c.RestartPolicy))}
	for _, rule := range c.RestartPolicyRules {
		if codes := rule.ExitCodes; codes != nil {
			one := vm.RestartRule{Not: codes.Operator == corev1.ContainerRestartRuleOnExitCodesOpNotIn}
			for _, code := range codes.Values {
				one.Codes = append(one.Codes, int(code))
			}
			r.Rules = append(r.Rules, one)
		}
	}
	return r
}

// Restarts reports whether a run of c, an app or sidecar of pod, that ended with this exit code is followed by another one.
func Restarts(pod *corev1.Pod, c *corev1.Container, code int, failed bool) bool {
	r := vm.Restart{Policy: restart(pod)}
	if own := ownRestart(c); own != nil {
		r = *own
	}
	return r.Again(code, failed)
}

// AnyRestarts reports whether a container of pod restarts in that way.
func AnyRestarts(pod *corev1.Pod, code int, failed bool) bool {
	return slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool { return Restarts(pod, &c, code, failed) })
}

// OwnRestarts reports whether containers of pod have restart policies of their own. Sidecars do not count.
func OwnRestarts(pod *corev1.Pod) bool {
	own := func(c corev1.Container) bool { return c.RestartPolicy != nil }
	return slices.ContainsFunc(pod.Spec.Containers, own) ||
		slices.ContainsFunc(pod.Spec.InitContainers, func(c corev1.Container) bool { return own(c) && !IsSidecar(&c) })
}

// checkContainers refuses unsupported settings of containers, and annotations that only a pod with one container can have.
func checkContainers(pod *corev1.Pod) field.ErrorList {
	var errs field.ErrorList
	no := forbid(&errs)
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	for i, c := range containers(pod) {
		at := containerPath(pod, i)
		for j, e := range c.Env {
			no(inFile(e) && ask.Managed && !Several(pod), at.Child("env").Index(j).Child("valueFrom", "fileKeyRef"),
				"a managed VM has a process instead of containers, and only containers can have environment variables from files")
		}
		errs = append(errs, checkContainer(c, at)...)
		errs = append(errs, checkSecurity(c, at)...)
		for j, rule := range c.RestartPolicyRules {
			at := at.Child("restartPolicyRules").Index(j)
			no(rule.Action != corev1.ContainerRestartRuleActionRestart, at.Child("action"), "a VM starts a container again, but not all containers of its pod; use Restart")
			no(rule.ExitCodes == nil, at.Child("exitCodes"), "a rule needs exit codes")
		}
	}
	if !Several(pod) {
		return errs
	}
	no(pod.Annotations[contract.KeyImage] != "" && OriginOf(pod).Boots(), annotationPath(contract.KeyImage),
		"only a pod with one container and no init containers can have this annotation")
	return errs
}

// SameContainers reports whether rec, the record of a clone, has the containers of pod.
func SameContainers(pod *corev1.Pod, rec vm.Record) bool {
	if !Several(pod) {
		return len(rec.Containers) == 0 || rec.RootContainer()
	}
	return slices.EqualFunc(containers(pod), rec.Containers, func(c *corev1.Container, r vm.ContainerRecord) bool { return c.Name == r.Name })
}

// commonUser returns the user that all containers of pod run as. It returns nil if the users differ or one is not known.
func commonUser(pod *corev1.Pod) *int64 {
	var common *int64
	for i, c := range containers(pod) {
		uid, _ := runAs(pod, c)
		if uid == nil || i > 0 && *uid != *common {
			return nil
		}
		common = uid
	}
	return common
}

// sum returns how much of one resource the containers of pod need together. of returns the amount for one container. Apps and
// sidecars run at the same time. A plain init container runs with the sidecars before it. sum returns false if of returns no
// amount for any container.
func sum(pod *corev1.Pod, of func(*corev1.Container) (resource.Quantity, bool)) (resource.Quantity, bool) {
	var running, most resource.Quantity
	known := false
	for i, c := range containers(pod) {
		q, ok := of(c)
		known = known || ok
		if i < len(pod.Spec.InitContainers) && !IsSidecar(c) {
			q.Add(running)
			if q.Cmp(most) > 0 {
				most = q
			}
			continue
		}
		running.Add(q)
	}
	if running.Cmp(most) > 0 {
		most = running
	}
	return most, known
}

// Pulls returns the requests that pull the images of pod's VM, those of its containers and then those of its volumes, each image once, without credentials. The API server has set
// the default pull policies of the containers. A force-pull annotation takes precedence over them.
func Pulls(pod *corev1.Pod) []image.PullRequest {
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	var out []image.PullRequest
	add := func(name string, policy corev1.PullPolicy) {
		r := image.PullRequest{Name: name, Policy: image.PullIfNotPresent}
		if policy != "" {
			r.Policy = image.PullPolicy(policy)
		}
		if ask.ForcePull {
			r.Policy, r.Force = image.PullAlways, true
		}
		at := slices.IndexFunc(out, func(o image.PullRequest) bool { return o.Name == r.Name })
		switch {
		case at < 0:
			out = append(out, r)
		case r.Policy == image.PullAlways:
			out[at].Policy = image.PullAlways
		}
	}
	for _, c := range containers(pod) {
		add(ImageOf(pod, c), c.ImagePullPolicy)
	}
	for _, v := range ImageVolumes(pod) {
		add(v.Image.Reference, v.Image.PullPolicy)
	}
	return out
}

// PullAuth reads the pod's imagePullSecrets, in their order. (Admission has added the secrets of its service account to them.)
// Like the kubelet it continues without a secret that cannot be fetched or decoded. lost has the names of such secrets.
func PullAuth(ctx context.Context, pod *corev1.Pod, from Resolver) (auth []image.RegistryAuth, lost []string) {
	for _, ref := range pod.Spec.ImagePullSecrets {
		if ref.Name == "" {
			continue
		}
		secret, err := from.Secret(ctx, pod.Namespace, ref.Name)
		if err == nil {
			var more []image.RegistryAuth
			more, err = registryAuth(secret)
			auth = append(auth, more...)
		}
		if err != nil {
			lost = append(lost, ref.Name)
		}
	}
	return auth, lost
}

// registryAuth reads the credentials in a secret of one of the two Docker types, sorted by registry. A secret of another type
// has no credentials. Errors are InvalidArgument and never contain the content of the secret.
func registryAuth(secret *corev1.Secret) ([]image.RegistryAuth, error) {
	var auth []image.RegistryAuth
	var err error
	switch secret.Type {
	case corev1.SecretTypeDockerConfigJson:
		auth, err = image.ParseDockerConfig(secret.Data[corev1.DockerConfigJsonKey])
	case corev1.SecretTypeDockercfg:
		auth, err = image.ParseDockerCfg(secret.Data[corev1.DockerConfigKey])
	default: // no credentials
	}
	if err != nil {
		return nil, fmt.Errorf("secret %s: %w", secret.Name, err)
	}
	return auth, nil
}
