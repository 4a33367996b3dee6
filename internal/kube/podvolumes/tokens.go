package podvolumes

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// As in the kubelet, a token is renewed at 80 % of its lifetime or after a day, with some jitter. A failed request is repeated
// after a pause.
const (
	tokenMaxAge = 24 * time.Hour
	tokenJitter = 10 * time.Second
	tokenRetry  = 30 * time.Second
)

// tokens are the service account tokens in the volumes of one pod. They are stored only in memory and in the VM.
type tokens struct {
	client kubernetes.Interface

	mu  sync.Mutex
	all map[tokenKey]token
}

type tokenKey struct {
	audience string
	seconds  int64
}

type token struct {
	value   string
	expires time.Time
	renew   time.Time
}

// Token implements convert.Source. It returns the same token until its renewal is due. If the renewal fails, it returns the
// old token until that expires.
func (t *tokens) Token(ctx context.Context, pod *corev1.Pod, audience string, seconds int64) (string, error) {
	key := tokenKey{audience, seconds}
	t.mu.Lock()
	defer t.mu.Unlock()
	old, had := t.all[key]
	if had && time.Now().Before(old.renew) {
		return old.value, nil
	}
	fresh, err := t.ask(ctx, pod, key)
	switch {
	case err == nil:
		t.all[key] = fresh
		return fresh.value, nil
	case had && time.Now().Before(old.expires):
		old.renew = time.Now().Add(tokenRetry)
		t.all[key] = old
		return old.value, nil
	}
	return "", err
}

// fresh returns a new token, which is not kept, and when it expires.
func (t *tokens) fresh(ctx context.Context, pod *corev1.Pod, audience string, seconds int64) (string, time.Time, error) {
	got, err := t.ask(ctx, pod, tokenKey{audience, seconds})
	return got.value, got.expires, err
}

func (t *tokens) ask(ctx context.Context, pod *corev1.Pod, key tokenKey) (token, error) {
	r := &authv1.TokenRequest{Spec: authv1.TokenRequestSpec{
		ExpirationSeconds: &key.seconds,
		BoundObjectRef:    &authv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID},
	}}
	if key.audience != "" {
		r.Spec.Audiences = []string{key.audience}
	}
	got, err := t.client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, pod.Spec.ServiceAccountName, r, metav1.CreateOptions{})
	if err != nil {
		return token{}, classify(err)
	}
	now, expires := time.Now(), got.Status.ExpirationTimestamp.Time
	age := min(expires.Sub(now)*8/10, tokenMaxAge)
	return token{value: got.Status.Token, expires: expires, renew: now.Add(age - rand.N(tokenJitter))}, nil //nolint:gosec // G404: spreads requests, guards nothing
}

// renewal returns when the next token must be renewed. false: the volumes have no token.
func (t *tokens) renewal() (first time.Time, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, tok := range t.all {
		if !ok || tok.renew.Before(first) {
			first, ok = tok.renew, true
		}
	}
	return first, ok
}
