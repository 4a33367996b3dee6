package convert

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

// Pull is the request that brings the image of pod's VM, but for its credentials. The API server has completed the
// policy of the container; a force-pull annotation wins over it.
func Pull(pod *corev1.Pod) image.PullRequest {
	r := image.PullRequest{Name: Image(pod), Policy: image.PullIfNotPresent}
	if c := container(pod); c != nil && c.ImagePullPolicy != "" {
		r.Policy = image.PullPolicy(c.ImagePullPolicy)
	}
	if ask, _ := contract.ParseVMSpec(pod.Annotations); ask.ForcePull {
		r.Policy, r.Force = image.PullAlways, true
	}
	return r
}

// PullAuth reads the pod's imagePullSecrets, in their order. (Those of its service account are among them: admission has
// written them there.) Like the kubelet it goes on without a secret that cannot be had or read, and names it in lost.
func PullAuth(ctx context.Context, pod *corev1.Pod, from Resolver) (auth []image.RegistryAuth, lost []string) {
	for _, ref := range pod.Spec.ImagePullSecrets {
		if ref.Name == "" {
			continue
		}
		secret, err := from.Secret(ctx, pod.Namespace, ref.Name)
		if err == nil {
			var more []image.RegistryAuth
			more, err = RegistryAuth(secret)
			auth = append(auth, more...)
		}
		if err != nil {
			lost = append(lost, ref.Name)
		}
	}
	return auth, lost
}

// RegistryAuth reads the credentials in a secret of one of the two docker types, sorted by registry. A secret of another
// type holds none. Errors are InvalidArgument and never tell what is in the secret.
func RegistryAuth(secret *corev1.Secret) ([]image.RegistryAuth, error) {
	var all map[string]dockerAuth
	var err error
	switch secret.Type {
	case corev1.SecretTypeDockerConfigJson:
		var config struct {
			Auths map[string]dockerAuth `json:"auths"`
		}
		err = json.Unmarshal(secret.Data[corev1.DockerConfigJsonKey], &config)
		all = config.Auths
	case corev1.SecretTypeDockercfg:
		err = json.Unmarshal(secret.Data[corev1.DockerConfigKey], &all)
	default:
		return nil, nil
	}
	if err != nil { // its text would quote the secret
		return nil, errdefs.Invalidf("secret %s is no docker configuration", secret.Name)
	}
	var out []image.RegistryAuth
	for _, registry := range slices.Sorted(maps.Keys(all)) {
		a, ok := all[registry].decode(registry)
		if !ok {
			return nil, errdefs.Invalidf("secret %s: the credentials for %q are not user:password in base64", secret.Name, registry)
		}
		out = append(out, a)
	}
	return out, nil
}

// dockerAuth is one entry of a docker configuration.
type dockerAuth struct {
	Username      string `json:"username"`
	Password      string `json:"password"`
	Auth          string `json:"auth"` // base64 of user:password; wins over the two
	IdentityToken string `json:"identitytoken"`
	RegistryToken string `json:"registrytoken"`
}

func (d dockerAuth) decode(registry string) (image.RegistryAuth, bool) {
	a := image.RegistryAuth{Registry: registry, Username: d.Username, Password: d.Password, Token: d.IdentityToken}
	if a.Token == "" {
		a.Token = d.RegistryToken
	}
	if d.Auth == "" {
		return a, true
	}
	// Some tools leave the padding out.
	plain, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(d.Auth, "="))
	if err != nil {
		return image.RegistryAuth{}, false
	}
	user, password, ok := strings.Cut(string(plain), ":")
	if !ok {
		return image.RegistryAuth{}, false
	}
	a.Username, a.Password = user, strings.Trim(password, "\x00")
	return a, true
}
