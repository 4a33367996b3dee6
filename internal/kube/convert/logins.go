package convert

import (
	"context"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/cloudinit"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// LoginSecrets returns the Secrets by which users log in to pod's guest, as its annotation says.
func LoginSecrets(pod *corev1.Pod) (objects []Object) {
	ask, _ := contract.ParseMachine(pod.Annotations)
	for _, name := range ask.Logins.Secrets() {
		objects = append(objects, Object{KindSecret, name})
	}
	return objects
}

// Logins reads the Secrets by which users log in to pod's guest. An SSH key that several Secrets have is there once; comments are left out. If a Secret
// is missing or has invalid content, the error is FailedPrecondition. Other errors are the Resolver's. No error quotes a Secret.
func Logins(ctx context.Context, pod *corev1.Pod, from Resolver) (guest.Logins, error) {
	ask, _ := contract.ParseMachine(pod.Annotations)
	l := guest.Logins{Passwords: map[string]string{}, Keys: map[string][]string{}}
	s := sources{pod: pod, from: from}
	for _, name := range slices.Sorted(maps.Keys(ask.Logins.Keys)) {
		data, err := s.read(ctx, contract.KeyLogins, contract.Source{Kind: contract.SourceSecret, Name: name})
		if err != nil {
			return guest.Logins{}, err
		}
		for _, user := range ask.Logins.Keys[name] {
			keys := l.Keys[user]
			for _, at := range slices.Sorted(maps.Keys(data)) {
				for _, key := range cloudinit.Keys(data[at]) {
					if !strings.HasPrefix(key, "#") && !slices.Contains(keys, key) {
						keys = append(keys, key)
					}
				}
			}
			l.Keys[user] = keys
		}
	}
	for _, name := range ask.Logins.Passwords {
		data, err := s.read(ctx, contract.KeyLogins, contract.Source{Kind: contract.SourceSecret, Name: name})
		if err != nil {
			return guest.Logins{}, err
		}
		for user, password := range data {
			l.Passwords[user] = strings.TrimSpace(password)
		}
	}
	return l, errdefs.As(errdefs.FailedPrecondition, l.Validate())
}
