package podvolumes

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	certv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
)

// signer answers the requests of a fake API server: it issues, denies, or does not answer yet.
type signer struct {
	mu     sync.Mutex
	answer string
	forbid int // so many times, reading a request is forbidden
	asked  []*certv1.PodCertificateRequest
}

func (s *signer) set(answer string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = answer
}

func (s *signer) client() *fake.Clientset {
	client := fake.NewClientset(
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "account"}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", UID: "node-uid"}},
	)
	client.PrependReactor("create", "podcertificaterequests", func(a ktesting.Action) (bool, runtime.Object, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		r := a.(ktesting.CreateAction).GetObject().(*certv1.PodCertificateRequest).DeepCopy()
		r.Name = r.GenerateName + string(rune('a'+len(s.asked)))
		s.asked = append(s.asked, r)
		return true, r, nil
	})
	client.PrependReactor("get", "podcertificaterequests", func(a ktesting.Action) (bool, runtime.Object, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		r := s.asked[len(s.asked)-1].DeepCopy()
		if name := a.(ktesting.GetAction).GetName(); name != r.Name {
			return true, nil, errors.New("another request is asked for: " + name)
		}
		if s.forbid > 0 {
			s.forbid--
			return true, nil, apierrors.NewForbidden(certv1.Resource("podcertificaterequests"), r.Name, errors.New("no relationship found"))
		}
		if s.answer != "" {
			now := time.Now()
			r.Status.Conditions = []metav1.Condition{{Type: s.answer, Reason: "Because"}}
			r.Status.CertificateChain = "chain " + r.Name
			r.Status.BeginRefreshAt, r.Status.NotAfter = &metav1.Time{Time: now.Add(time.Hour)}, &metav1.Time{Time: now.Add(2 * time.Hour)}
		}
		return true, r, nil
	})
	return client
}

func TestCertificates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &signer{}
		c := &certificates{client: s.client(), all: map[certificateKey]*certificate{}}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web-0", UID: "pod"}, Spec: corev1.PodSpec{ServiceAccountName: "web"}}
		p := &corev1.PodCertificateProjection{SignerName: "test/one", KeyType: "ED25519", MaxExpirationSeconds: new(int32(7200)), UserAnnotations: map[string]string{"a": "b"}}
		get := func() (string, string, error) {
			key, chain, err := c.Certificate(t.Context(), pod, convert.Node{Name: "node"}, "tls", 0, p)
			return string(key), string(chain), err
		}
		pass := func(d time.Duration) {
			time.Sleep(d) //nolint:forbidigo // the fake clock of synctest
		}

		for range 2 {
			if _, _, err := get(); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "has not issued") {
				t.Fatalf("without an answer: %v", err)
			}
		}
		if len(s.asked) != 1 {
			t.Fatalf("%d requests for one certificate", len(s.asked))
		}
		if _, ok := c.renewal(); ok {
			t.Error("a certificate that is not there is to be renewed")
		}

		s.set(certv1.PodCertificateRequestConditionTypeIssued)
		s.forbid = 3 // the API server has not noticed yet that the request is of this node
		key, chain, err := get()
		if err != nil || chain != "chain req-a" {
			t.Fatalf("%q, %v", chain, err)
		}
		spec := s.asked[0].Spec
		if spec.SignerName != "test/one" || spec.PodUID != "pod" || spec.ServiceAccountUID != "account" || spec.NodeUID != "node-uid" || *spec.MaxExpirationSeconds != 7200 || spec.UnverifiedUserAnnotations["a"] != "b" {
			t.Errorf("the request says %+v", spec)
		}
		proof, err := x509.ParseCertificateRequest(spec.StubPKCS10Request)
		if err != nil || proof.CheckSignature() != nil {
			t.Errorf("the request proves nothing: %v", err)
		}
		if block, _ := pem.Decode([]byte(key)); block == nil || block.Type != "PRIVATE KEY" {
			t.Errorf("the key is %q", key)
		}

		pass(50 * time.Minute)
		if same, _, _ := get(); same != key || len(s.asked) != 1 {
			t.Error("a certificate was renewed too early")
		}
		pass(11 * time.Minute)
		if other, chain, err := get(); err != nil || other == key || chain != "chain req-b" {
			t.Errorf("not renewed: %q, %v", chain, err)
		}
		s.set(certv1.PodCertificateRequestConditionTypeDenied)
		pass(61 * time.Minute)
		if _, chain, err := get(); err != nil || chain != "chain req-b" {
			t.Errorf("while a renewal fails: %q, %v", chain, err)
		}
		pass(time.Hour)
		if _, _, err := get(); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "Denied: Because") {
			t.Errorf("an expired certificate: %v", err)
		}
	})
}

func TestKeys(t *testing.T) {
	for _, kind := range []string{"RSA3072", "ECDSAP256", "ECDSAP384", "ECDSAP521", "ED25519"} {
		text, _, err := newKey(kind)
		if err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		block, _ := pem.Decode(text)
		if _, err := x509.ParsePKCS8PrivateKey(block.Bytes); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
	if _, _, err := newKey("DSA"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("an unknown type of key: %v", err)
	}
}
