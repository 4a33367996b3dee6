package convert

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/image"
)

// Pulls returns the requests that pull the images of pod's VM, each image once, without credentials. The API server has
// completed the policies of the containers. A force-pull annotation takes precedence over them.
func Pulls(pod *corev1.Pod) []image.PullRequest {
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	var out []image.PullRequest
	for _, c := range containers(pod) {
		r := image.PullRequest{Name: c.Image, Policy: image.PullIfNotPresent}
		if !Several(pod) {
			r.Name = Image(pod)
		}
		if c.ImagePullPolicy != "" {
			r.Policy = image.PullPolicy(c.ImagePullPolicy)
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
	return out
}

// PullAuth reads the pod's imagePullSecrets, in their order. (They include those of its service account, because admission
// has added them.) Like the kubelet it continues without a secret that cannot be fetched or decoded, and returns its name in
// lost.
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

// registryAuth reads the credentials in a secret of one of the two docker types, sorted by registry. A secret of another type
// holds none. Errors are InvalidArgument and never contain the content of the secret.
func registryAuth(secret *corev1.Secret) ([]image.RegistryAuth, error) {
	var auth []image.RegistryAuth
	var err error
	switch secret.Type {
	case corev1.SecretTypeDockerConfigJson:
		auth, err = image.ParseDockerConfig(secret.Data[corev1.DockerConfigJsonKey])
	case corev1.SecretTypeDockercfg:
		auth, err = image.ParseDockerCfg(secret.Data[corev1.DockerConfigKey])
	default: // it holds none
	}
	if err != nil {
		return nil, fmt.Errorf("secret %s: %w", secret.Name, err)
	}
	return auth, nil
}
