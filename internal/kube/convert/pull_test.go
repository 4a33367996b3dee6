package convert

import (
	"context"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

func TestPullPolicyOfAPod(t *testing.T) {
	for name, tc := range map[string]struct {
		policy corev1.PullPolicy
		notes  map[string]string
		want   image.PullRequest
	}{
		"always":         {policy: corev1.PullAlways, want: image.PullRequest{Name: "demo", Policy: image.PullAlways}},
		"if not present": {policy: corev1.PullIfNotPresent, want: image.PullRequest{Name: "demo", Policy: image.PullIfNotPresent}},
		"never":          {policy: corev1.PullNever, want: image.PullRequest{Name: "demo", Policy: image.PullNever}},
		"not completed":  {want: image.PullRequest{Name: "demo", Policy: image.PullIfNotPresent}},
		"forced": {
			policy: corev1.PullNever, notes: map[string]string{contract.KeyForcePull: "true"},
			want: image.PullRequest{Name: "demo", Policy: image.PullAlways, Force: true},
		},
		"image of the annotation": {
			policy: corev1.PullNever, notes: map[string]string{contract.KeyImage: "other:1"},
			want: image.PullRequest{Name: "other:1", Policy: image.PullNever},
		},
	} {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Annotations: tc.notes},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Image: "demo", ImagePullPolicy: tc.policy}}},
		}
		got := Pulls(pod)[0]
		if got.Name != tc.want.Name || got.Policy != tc.want.Policy || got.Force != tc.want.Force {
			t.Errorf("%s: %+v, want %+v", name, got, tc.want)
		}
	}
}

func dockerJSON(data string) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "s"}, Type: corev1.SecretTypeDockerConfigJson,
		Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(data)},
	}
}

func TestRegistryAuthOfSecrets(t *testing.T) {
	for name, tc := range map[string]struct {
		secret *corev1.Secret
		want   []image.RegistryAuth
		bad    bool
	}{
		"docker configuration": {
			secret: dockerJSON(`{"auths":{"b.example":{"username":"u","password":"p:q"}}}`),
			want:   []image.RegistryAuth{{Registry: "b.example", Username: "u", Password: "p:q"}},
		},
		"the old type": {
			secret: &corev1.Secret{Type: corev1.SecretTypeDockercfg, Data: map[string][]byte{corev1.DockerConfigKey: []byte(`{"a":{"username":"u","password":"p"}}`)}},
			want:   []image.RegistryAuth{{Registry: "a", Username: "u", Password: "p"}},
		},
		"another type": {secret: &corev1.Secret{Type: corev1.SecretTypeOpaque, Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(`{"auths":{"a":{}}}`)}}},
		"damaged":      {secret: dockerJSON(`hunter2`), bad: true},
	} {
		got, err := registryAuth(tc.secret)
		if !slices.Equal(got, tc.want) || tc.bad != errdefs.IsInvalid(err) || !tc.bad && err != nil {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: the error contains the secret: %v", name, err)
		}
	}
}

// secrets is a Resolver with fixed Secrets.
type secrets map[string]*corev1.Secret

func (secrets) ConfigMap(context.Context, string, string) (*corev1.ConfigMap, error) {
	return nil, errdefs.NotFoundf("no configmap")
}

func (s secrets) Secret(_ context.Context, namespace, name string) (*corev1.Secret, error) {
	if got := s[namespace+"/"+name]; got != nil {
		return got, nil
	}
	return nil, errdefs.NotFoundf("no secret")
}

func TestPullSecretsThatAreMissingAreNamed(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns"}}
	for _, name := range []string{"second", "missing", "", "damaged", "first"} {
		pod.Spec.ImagePullSecrets = append(pod.Spec.ImagePullSecrets, corev1.LocalObjectReference{Name: name})
	}
	auth, lost := PullAuth(t.Context(), pod, secrets{
		"ns/first":      dockerJSON(`{"auths":{"a":{"username":"1"}}}`),
		"ns/second":     dockerJSON(`{"auths":{"b":{"username":"2"}}}`),
		"ns/damaged":    dockerJSON(`{`),
		"other/missing": dockerJSON(`{"auths":{"c":{"username":"3"}}}`),
	})
	want := []image.RegistryAuth{{Registry: "b", Username: "2"}, {Registry: "a", Username: "1"}}
	if !slices.Equal(auth, want) || !slices.Equal(lost, []string{"missing", "damaged"}) {
		t.Errorf("%+v, lost %v", auth, lost)
	}
}
