package podvolumes

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	crand "crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"math/rand/v2"
	"sync"
	"time"

	certv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/pauses"
)

// The signer has this time for a request before the pod reports that it waits. Later it is asked again, for the same request.
const signerTime = 10 * time.Second

// certificates are the keys and certificates in the volumes of one pod. They are stored only in memory and in the VM.
type certificates struct {
	client kubernetes.Interface

	mu  sync.Mutex
	all map[certificateKey]*certificate // the lock guards the map only
}

// certificateKey names a source of a volume.
type certificateKey struct {
	volume string
	source int
}

type certificate struct {
	mu      sync.Mutex
	key     []byte
	chain   []byte
	renew   time.Time
	expires time.Time

	asked    string // name of the request without an answer; "": there is none
	askedKey []byte
	refused  error // the signer refused the first request, and the pod never starts
}

// Certificate implements convert.Source. It returns the same certificate until its renewal is due. If the renewal fails, it
// returns the old certificate until that expires.
// Errors: FailedPrecondition while the signer has not answered, and after it refused.
func (c *certificates) Certificate(ctx context.Context, pod *corev1.Pod, node convert.Node, volume string, source int, p *corev1.PodCertificateProjection) (key, chain []byte, err error) {
	one := c.one(certificateKey{volume, source})
	one.mu.Lock()
	defer one.mu.Unlock()
	if one.chain != nil && time.Now().Before(one.renew) {
		return one.key, one.chain, nil
	}
	if one.refused != nil {
		return nil, nil, one.refused
	}
	err = c.renewed(ctx, one, pod, node, p)
	switch {
	case err == nil:
		return one.key, one.chain, nil
	case one.chain != nil && time.Now().Before(one.expires):
		one.renew, one.refused = time.Now().Add(tokenRetry), nil
		return one.key, one.chain, nil
	}
	return nil, nil, err
}

func (c *certificates) one(key certificateKey) *certificate {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all[key] == nil {
		c.all[key] = &certificate{}
	}
	return c.all[key]
}

// renewed asks for a certificate, unless it has already been asked for, and waits for the answer.
func (c *certificates) renewed(ctx context.Context, one *certificate, pod *corev1.Pod, node convert.Node, p *corev1.PodCertificateProjection) error {
	if one.asked == "" {
		var err error
		if one.asked, one.askedKey, err = c.ask(ctx, pod, node, p); err != nil {
			return err
		}
	}
	deadline := time.Now().Add(signerTime)
	for retries := pauses.Growing(100*time.Millisecond, 2*time.Second, 0); ; {
		r, err := c.client.CertificatesV1().PodCertificateRequests(pod.Namespace).Get(ctx, one.asked, metav1.GetOptions{})
		if apierrors.IsNotFound(err) { // somebody removed it
			one.asked = ""
			return classify(err)
		}
		if err == nil {
			if done, err := one.read(r); done {
				return err
			}
		}
		if time.Now().After(deadline) || !pauses.Sleep(ctx, nil, retries.Step(), false) {
			if err != nil { // for a moment after the request was made, the API server may forbid the node to read it
				return classify(err)
			}
			return errdefs.Preconditionf("signer %s has not issued the certificate of PodCertificateRequest %s yet", p.SignerName, r.Name)
		}
	}
}

// read reads the signer's answer. done: there is one.
// Errors: FailedPrecondition if the signer refused.
func (one *certificate) read(r *certv1.PodCertificateRequest) (done bool, err error) {
	for _, cond := range r.Status.Conditions {
		switch cond.Type {
		case certv1.PodCertificateRequestConditionTypeIssued:
			one.take(r)
			return true, nil
		case certv1.PodCertificateRequestConditionTypeDenied, certv1.PodCertificateRequestConditionTypeFailed:
			one.asked = ""
			one.refused = errdefs.Preconditionf("PodCertificateRequest %s for signer %s: %s: %s: %s", r.Name, r.Spec.SignerName, cond.Type, cond.Reason, cond.Message)
			return true, one.refused
		}
	}
	return false, nil
}

// take takes what the signer issued.
func (one *certificate) take(r *certv1.PodCertificateRequest) {
	one.key, one.chain, one.asked, one.askedKey = one.askedKey, []byte(r.Status.CertificateChain), "", nil
	one.expires = timeOf(r.Status.NotAfter)
	one.renew = one.expires
	if at := timeOf(r.Status.BeginRefreshAt); !at.IsZero() {
		one.renew = at.Add(rand.N(tokenJitter)) //nolint:gosec // G404: spreads requests, guards nothing
	}
}

func timeOf(t *metav1.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.Time
}

// ask makes a key and requests a certificate for it. The request says which pod, service account and node want it, by uid.
func (c *certificates) ask(ctx context.Context, pod *corev1.Pod, node convert.Node, p *corev1.PodCertificateProjection) (name string, key []byte, err error) {
	account, err := c.client.CoreV1().ServiceAccounts(pod.Namespace).Get(ctx, pod.Spec.ServiceAccountName, metav1.GetOptions{})
	if err != nil {
		return "", nil, classify(err)
	}
	self, err := c.client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
	if err != nil {
		return "", nil, classify(err)
	}
	key, proof, err := newKey(p.KeyType)
	if err != nil {
		return "", nil, err
	}
	r, err := c.client.CertificatesV1().PodCertificateRequests(pod.Namespace).Create(ctx, &certv1.PodCertificateRequest{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName:    "req-",
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}},
		},
		Spec: certv1.PodCertificateRequestSpec{
			SignerName: p.SignerName, MaxExpirationSeconds: p.MaxExpirationSeconds, StubPKCS10Request: proof, UnverifiedUserAnnotations: p.UserAnnotations,
			PodName: pod.Name, PodUID: pod.UID,
			ServiceAccountName: account.Name, ServiceAccountUID: account.UID,
			NodeName: types.NodeName(self.Name), NodeUID: self.UID,
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", nil, classify(err)
	}
	return r.Name, key, nil
}

// newKey returns a private key as PEM, and a request for a certificate that proves that we have it and says nothing else.
// Errors: FailedPrecondition if this node knows no such type.
func newKey(kind string) (text, proof []byte, err error) {
	key, err := generate(kind)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	proof, err = x509.CreateCertificateRequest(crand.Reader, &x509.CertificateRequest{}, key)
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), proof, err
}

func generate(kind string) (crypto.Signer, error) {
	switch kind {
	case "RSA3072":
		return rsa.GenerateKey(crand.Reader, 3072)
	case "RSA4096":
		return rsa.GenerateKey(crand.Reader, 4096)
	case "ECDSAP256":
		return ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	case "ECDSAP384":
		return ecdsa.GenerateKey(elliptic.P384(), crand.Reader)
	case "ECDSAP521":
		return ecdsa.GenerateKey(elliptic.P521(), crand.Reader)
	case "ED25519":
		_, key, err := ed25519.GenerateKey(crand.Reader)
		return key, err
	}
	return nil, errdefs.Preconditionf("this node knows no keys of type %q", kind)
}

// renewal returns when the next certificate must be renewed. false: the volumes have no certificate.
func (c *certificates) renewal() (first time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, one := range c.all {
		one.mu.Lock()
		if at := one.renew; one.chain != nil && (!ok || at.Before(first)) {
			first, ok = at, true
		}
		one.mu.Unlock()
	}
	return first, ok
}
