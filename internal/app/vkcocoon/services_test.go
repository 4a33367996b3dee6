package vkcocoon

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Pods wait until the Services are known, and start without them where the node may not list them.
func TestServices(t *testing.T) {
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", Labels: map[string]string{"a": "b"}}, Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.2"}}
	forbidden := apierrors.NewForbidden(corev1.Resource("services"), "", errors.New("no such right"))
	for name, tc := range map[string]struct {
		refuses error
		want    int
	}{
		"allowed":   {nil, 1},
		"forbidden": {forbidden, 0},
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset(service)
			client.PrependReactor("list", "services", func(ktesting.Action) (bool, runtime.Object, error) { return tc.refuses != nil, nil, tc.refuses })
			s, err := newServices(client, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.list("shop"); !errdefs.IsUnavailable(err) {
				t.Errorf("before anything was asked: %v", err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { defer close(done); _ = s.run(ctx) }()
			if err := s.wait(ctx); err != nil {
				t.Fatal(err)
			}
			if all, err := s.list("shop"); err != nil || len(all) != tc.want {
				t.Errorf("%d are known, want %d; %v", len(all), tc.want, err)
			}
			if none, err := s.list("other"); err != nil || len(none) != 0 {
				t.Errorf("of another namespace: %v, %v", none, err)
			}
			cancel()
			<-done
		})
	}

	// Nothing waits for an API server longer than the node lives.
	client := fake.NewClientset()
	client.PrependReactor("list", "services", func(ktesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewInternalError(errors.New("away"))
	})
	s, err := newServices(client, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("a node that stops: %v", err)
	}
}
