//go:build e2e

package servingcert

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	registration "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// No request fails while the certificate and its authority are replaced. Two replicas serve a webhook that the API server
// calls for every ConfigMap. Each request opens a new connection.
func TestRotationUnderRequests(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes minutes: make test-e2e runs it, make test does not")
	}
	cluster := kubetest.Up(t)
	kube, err := kubernetes.NewForConfig(cluster.Config)
	if err != nil {
		t.Fatal(err)
	}
	cluster.Kubectl(t, "", "create", "namespace", "certs")
	var keepers []*Keeper
	var calls atomic.Int32 // of all webhooks
	none, fail := registration.SideEffectClassNone, registration.Fail
	rules := []registration.RuleWithOperations{{Operations: []registration.OperationType{"CREATE"}, Rule: registration.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}}}}
	mine := &metav1.LabelSelector{MatchLabels: map[string]string{"kubernetes.io/metadata.name": "certs"}}
	validating := &registration.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "certs"}}
	mutating := &registration.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "certs"}}
	for i := range 2 {
		k := &Keeper{
			Secret: types.NamespacedName{Namespace: "certs", Name: "serving"}, Configuration: "certs", APIs: []string{"v1.certs.example.com"}, Hosts: []string{"127.0.0.1"},
			Lives: Lives{Authority: 180 * time.Second, Serving: 60 * time.Second, Overlap: 7 * time.Second}, Now: time.Now, // 6 s late is in time
		}
		keepers = append(keepers, k)
		url := "https://" + serve(t, k, &calls)
		run(t, cluster.Config, k)
		validating.Webhooks = append(validating.Webhooks, registration.ValidatingWebhook{
			Name: fmt.Sprintf("v%d.example.com", i), ClientConfig: registration.WebhookClientConfig{URL: &url}, Rules: rules, NamespaceSelector: mine,
			SideEffects: &none, FailurePolicy: &fail, AdmissionReviewVersions: []string{"v1"},
		})
		mutating.Webhooks = append(mutating.Webhooks, registration.MutatingWebhook{
			Name: fmt.Sprintf("m%d.example.com", i), ClientConfig: registration.WebhookClientConfig{URL: &url}, Rules: rules, NamespaceSelector: mine,
			SideEffects: &none, FailurePolicy: &fail, AdmissionReviewVersions: []string{"v1"},
		})
	}
	const api = "{apiVersion: apiregistration.k8s.io/v1, kind: APIService, metadata: {name: v1.certs.example.com}, spec: {group: certs.example.com, version: v1, " +
		"service: {namespace: certs, name: none}, groupPriorityMinimum: 1000, versionPriority: 15}}"
	cluster.Kubectl(t, api, "apply", "--server-side", "-f", "-")
	hooks := kube.AdmissionregistrationV1()
	_, err = hooks.ValidatingWebhookConfigurations().Create(t.Context(), validating, metav1.CreateOptions{})
	if err == nil {
		_, err = hooks.MutatingWebhookConfigurations().Create(t.Context(), mutating, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	request := func() error {
		_, err := kube.CoreV1().ConfigMaps("certs").Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "c-"}}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	wait(t, "the first request", func() error { // the API server knows all webhooks, and trusts them
		before := calls.Load()
		if err := request(); err != nil {
			return err
		}
		if n := calls.Load() - before; n != 4 {
			return fmt.Errorf("the API server has called %d of 4 webhooks", n)
		}
		return nil
	})

	authorities, servings, done := map[string]bool{}, map[string]bool{}, 0
	wait(t, "two authorities and four certificates", func() error {
		if err := request(); err != nil {
			t.Fatalf("request %d: %v", done, err)
		}
		done++
		for _, k := range keepers {
			m := k.current.Load()
			for _, a := range m.authorities {
				if m.serving.Leaf.CheckSignatureFrom(a) == nil {
					authorities[string(a.Raw)] = true
				}
			}
			servings[string(m.serving.Leaf.Raw)] = true
		}
		if len(authorities) < 2 || len(servings) < 4 {
			return fmt.Errorf("%d authorities, %d certificates", len(authorities), len(servings))
		}
		return nil
	})
	t.Logf("%d requests", done)

	// Both serve the same certificate, because the second replica reads the Secret that the first one wrote.
	wait(t, "both have the same certificate", func() error {
		if a, b := keepers[0].current.Load().serving.Leaf, keepers[1].current.Load().serving.Leaf; !a.Equal(b) {
			return fmt.Errorf("%s and %s", a.SerialNumber, b.SerialNumber)
		}
		return nil
	})
	// The registration of an API has the same authorities, also after users have applied it again without.
	registered := func() error {
		text := cluster.Kubectl(t, "", "get", "apiservice", "v1.certs.example.com", "-o", "jsonpath={.spec.caBundle}")
		if bundle, err := base64.StdEncoding.DecodeString(text); err != nil || !bytes.Equal(bundle, keepers[0].current.Load().bundle()) {
			return fmt.Errorf("it trusts %q, %w", bundle, err)
		}
		return nil
	}
	wait(t, "the API's authorities", registered)
	cluster.Kubectl(t, api, "replace", "-f", "-")
	wait(t, "the API's authorities again", registered)
	// The Secret is lost, and users apply the configurations again without authorities.
	if err := kube.CoreV1().Secrets("certs").Delete(t.Context(), "serving", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	wait(t, "the Secret is created again", func() error {
		_, err := kube.CoreV1().Secrets("certs").Get(t.Context(), "serving", metav1.GetOptions{})
		return err
	})
	wait(t, "requests succeed again", request)
	cluster.Kubectl(t, "", "delete", "validatingwebhookconfiguration", "certs")
	wait(t, "the replica is not ready", func() error {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		if keepers[0].Check(req) == nil {
			return fmt.Errorf("the replica is ready")
		}
		return nil
	})
}

// serve answers webhooks with the keeper's certificate, allows every request, and counts the calls.
func serve(t *testing.T, k *Keeper, calls *atomic.Int32) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		calls.Add(1)
		var review admissionv1.AdmissionReview
		if err := json.NewDecoder(req.Body).Decode(&review); err != nil || review.Request == nil {
			http.Error(w, "no review", http.StatusBadRequest)
			return
		}
		review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
		_ = json.NewEncoder(w).Encode(review)
	}), ReadHeaderTimeout: time.Minute}
	s.SetKeepAlivesEnabled(false)
	go func() {
		_ = s.Serve(tls.NewListener(l, &tls.Config{GetCertificate: k.Certificate, NextProtos: []string{"http/1.1"}, MinVersion: tls.VersionTLS12}))
	}()
	t.Cleanup(func() { _ = s.Close() })
	return l.Addr().String()
}

// run runs a replica with the keeper until the test ends.
func run(t *testing.T, c *rest.Config, k *Keeper) {
	t.Helper()
	several := true
	m, err := ctrl.NewManager(c, ctrl.Options{Metrics: metricsserver.Options{BindAddress: "0"}, Client: client.Options{Cache: &client.CacheOptions{Unstructured: true}}, Controller: config.Controller{SkipNameValidation: &several}})
	if err != nil {
		t.Fatal(err)
	}
	k.Client = m.GetClient()
	if err := k.Setup(m); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// wait retries try until it succeeds.
func wait(t *testing.T, what string, try func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute) // the certificates live for four
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if apierrors.IsNotFound(err) {
				t.Fatalf("%s: timed out", what)
			}
			t.Fatalf("%s: %v", what, err)
		}
	}
}
