//go:build bench

package bench

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

const (
	reviews     = 10000 // AdmissionReviews that are sent to the webhook
	reviewers   = 16    // in parallel
	dryCreates  = 200   // pods of each kind that are created in dry-run mode
	webhookPath = "/mutate"
)

// admissions sends pods of VMs to the manager's webhook, as the API server does. Then it creates pods in the API server, some of
// which the API server sends to the webhook, and some not.
func admissions(t *testing.T, results *table) {
	k := kubetest.Up(t, "--with", "manager")
	config := *k.Config
	config.QPS = -1
	kube := must(kubernetes.NewForConfig(&config))(t)
	until(t, time.Minute, "pods can be created", func() bool {
		_, err := kube.CoreV1().ServiceAccounts(namespace).Get(t.Context(), "default", metav1.GetOptions{})
		return err == nil
	})
	var s struct {
		WebhookPort int `json:"webhookPort"`
	}
	if err := json.Unmarshal(must(os.ReadFile(filepath.Join(k.Dir, "up.json")))(t), &s); err != nil {
		t.Fatal(err)
	}
	hook := must(kube.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(t.Context(), "cocoon-manager", metav1.GetOptions{}))(t)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(hook.Webhooks[0].ClientConfig.CABundle)
	client := &http.Client{Transport: &http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}}
	url := fmt.Sprintf("https://127.0.0.1:%d%s", s.WebhookPort, webhookPath)

	vm := &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: "vm", Namespace: namespace, Annotations: map[string]string{"cocoonset.cocoonstack.io/mode": "run"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "agent", Image: "cocoon/demo:latest"}}},
	}
	review := must(json.Marshal(admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request: &admissionv1.AdmissionRequest{
			UID: "u", Operation: admissionv1.Create, Namespace: namespace, Name: "vm", Kind: metav1.GroupVersionKind{Version: "v1", Kind: "Pod"},
			Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"}, Object: runtime.RawExtension{Raw: must(json.Marshal(vm))(t)},
		},
	}))(t)
	ask := func() error {
		resp, err := client.Post(url, "application/json", bytes.NewReader(review))
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		var got admissionv1.AdmissionReview
		if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
			return err
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		if got.Response == nil || !got.Response.Allowed || len(got.Response.Patch) == 0 {
			return fmt.Errorf("the answer is %+v", got.Response)
		}
		return nil
	}
	for range 100 {
		if err := ask(); err != nil {
			t.Fatal(err)
		}
	}
	var mu sync.Mutex
	var took samples
	var left atomic.Int64
	left.Store(reviews)
	var all sync.WaitGroup
	began := time.Now()
	for range reviewers {
		all.Go(func() {
			for left.Add(-1) >= 0 {
				at := time.Now()
				if err := ask(); err != nil {
					t.Error(err)
					return
				}
				d := time.Since(at)
				mu.Lock()
				took = append(took, d)
				mu.Unlock()
			}
		})
	}
	all.Wait()
	rate := float64(len(took)) / time.Since(began).Seconds()
	results.add(row{
		what: fmt.Sprintf("pods of VMs completed by the webhook, %d at once: p50 (A), p99 (B)", reviewers), a: millis(took.median()), b: millis(took.quantile(0.99)),
		figure: fmt.Sprintf("%.0f/s", rate), goal: ">= 1000/s", n: len(took), missed: rate < 1000,
	})

	plain := vm.DeepCopy()
	plain.Annotations = nil
	kinds := []*corev1.Pod{vm, plain}
	times := make([]samples, len(kinds))
	for i := range dryCreates + 10 {
		for j, pod := range kinds {
			at := time.Now()
			if _, err := kube.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
				t.Fatal(err)
			}
			if i >= 10 {
				times[j] = append(times[j], time.Since(at))
			}
		}
	}
	a, b := times[0].median(), times[1].median()
	results.add(row{what: "pod of a VM admitted by the API server, dry run (A), against one that no webhook is asked about (B)", a: millis(a), b: millis(b), figure: fmt.Sprintf("+%s", millis(a-b)), n: dryCreates})
}
