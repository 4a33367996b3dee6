package convert

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// EphemeralContainer returns c as a container. The two have the same fields.
func EphemeralContainer(c *corev1.EphemeralContainer) *corev1.Container {
	return (*corev1.Container)(&c.EphemeralContainerCommon)
}

// alone returns pod with c as its only container, without the annotations that may name another image.
func alone(pod *corev1.Pod, c *corev1.EphemeralContainer) *corev1.Pod {
	own := *pod
	own.Annotations = nil
	own.Spec.InitContainers, own.Spec.EphemeralContainers = nil, nil
	own.Spec.Containers = []corev1.Container{*EphemeralContainer(c)}
	return &own
}

// CheckEphemeral returns an error for each setting of c, an ephemeral container of pod, that the VM cannot provide.
func CheckEphemeral(pod *corev1.Pod, c *corev1.EphemeralContainer) field.ErrorList {
	at := field.NewPath("spec", "ephemeralContainers").Key(c.Name)
	own := EphemeralContainer(c)
	errs := append(checkContainer(own, at), checkSecurity(own, at)...)
	no := forbid(&errs)
	has := volumes(pod)
	known := func(name string) bool {
		return slices.ContainsFunc(has, func(v vm.Volume) bool { return v.Name == name })
	}
	for i, m := range c.VolumeMounts {
		no(!known(m.Name), at.Child("volumeMounts").Index(i), fmt.Sprintf("volume %q: no container of the pod has used it since its VM started, so the VM does not have it", m.Name))
		no(propagated(m), at.Child("volumeMounts").Index(i).Child("mountPropagation"), noPropagation(m))
	}
	for i, e := range c.Env {
		no(inFile(e) && !known(e.ValueFrom.FileKeyRef.VolumeName), at.Child("env").Index(i),
			"no container of the pod has used the volume of its file since its VM started, so the VM does not have it")
	}
	no(len(c.VolumeDevices) > 0, at.Child("volumeDevices"), "a VM cannot have devices")
	return errs
}

// Ephemeral returns c, an ephemeral container of pod, for the pod's running VM. Errors are as for
// Env and CheckProfiles.
func Ephemeral(ctx context.Context, pod *corev1.Pod, c *corev1.EphemeralContainer, node Node, from Resolver, services []*corev1.Service, absent func(Absent)) (vm.Container, error) {
	own := alone(pod, c)
	own.Annotations = pod.Annotations // the environment may show them
	env, err := Env(ctx, own, node, from, services, absent)
	if err != nil {
		return vm.Container{}, err
	}
	if err := CheckProfiles(own); err != nil {
		return vm.Container{}, err
	}
	x := app(pod, EphemeralContainer(c), env)
	x.Image, x.Kind, x.Resources = c.Image, vm.ContainerEphemeral, resources(pod, EphemeralContainer(c), node)
	return x, x.ValidateEphemeral()
}

// CheckEphemeralUser is CheckUsers for an ephemeral container, whose image has that user.
func CheckEphemeralUser(pod *corev1.Pod, c *corev1.EphemeralContainer, user string) error {
	return CheckUsers(alone(pod, c), map[string]string{c.Image: user})
}

// EphemeralPull returns the request that pulls the image of c, without credentials.
func EphemeralPull(c *corev1.EphemeralContainer) image.PullRequest {
	r := image.PullRequest{Name: c.Image, Policy: image.PullIfNotPresent}
	if c.ImagePullPolicy != "" {
		r.Policy = image.PullPolicy(c.ImagePullPolicy)
	}
	return r
}
