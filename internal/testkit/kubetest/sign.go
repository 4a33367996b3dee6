package kubetest

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"path/filepath"
	"testing"
	"time"

	certificates "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Sign approves and signs requested certificates until ctx ends. Each is valid from now for the duration that life
// returns at that time. The signer of a cluster backdates by five minutes, so a certificate with a life of seconds
// would already be expired. Sign waits for an API server that is unavailable.
func Sign(ctx context.Context, t *testing.T, client kubernetes.Interface, ca tls.Certificate, life func() time.Duration) {
	requests := client.CertificatesV1().CertificateSigningRequests()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		list, err := requests.List(ctx, metav1.ListOptions{})
		if err != nil {
			list = &certificates.CertificateSigningRequestList{}
		}
		for i := range list.Items {
			r := &list.Items[i]
			if len(r.Status.Certificate) > 0 {
				continue
			}
			if r.Status.Certificate, err = sign(r.Spec.Request, ca, life()); err != nil {
				t.Error(err)
				return
			}
			approved := r.DeepCopy()
			approved.Status.Conditions = append(approved.Status.Conditions, certificates.CertificateSigningRequestCondition{Type: certificates.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test"})
			if now, err := requests.UpdateApproval(ctx, r.Name, approved, metav1.UpdateOptions{}); err == nil {
				now.Status.Certificate = r.Status.Certificate
				_, _ = requests.UpdateStatus(ctx, now, metav1.UpdateOptions{}) // on failure, the next round retries
			}
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// sign makes the certificate requested by request, in PEM.
func sign(request []byte, ca tls.Certificate, life time.Duration) ([]byte, error) {
	block, _ := pem.Decode(request)
	asked, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial, Subject: asked.Subject, DNSNames: asked.DNSNames, IPAddresses: asked.IPAddresses,
		NotBefore: time.Now(), NotAfter: time.Now().Add(life), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}, ca.Leaf, asked.PublicKey, ca.PrivateKey.(crypto.Signer))
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}

// Authority is the key pair with which the cluster signs.
func (c *Cluster) Authority(t *testing.T) tls.Certificate {
	t.Helper()
	pki := filepath.Join(c.Dir, "pki")
	ca, err := tls.LoadX509KeyPair(filepath.Join(pki, "ca.crt"), filepath.Join(pki, "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// Identity writes a kubeconfig with the identity of a node whose certificate the cluster has signed, and returns its
// path.
func (c *Cluster) Identity(t *testing.T, node string) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	asked, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}}}, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := sign(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: asked}), c.Authority(t), 24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return c.kubeconfig(t, node, &clientcmdapi.Cluster{Server: c.Config.Host, CertificateAuthorityData: c.Config.CAData},
		&clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})})
}

// Bootstrap writes a kubeconfig with the rights of a bootstrap token, which deploy/vk-cocoon grants with approval by
// the cluster, and returns its path.
func (c *Cluster) Bootstrap(t *testing.T) string {
	t.Helper()
	for _, folder := range []string{"vk-cocoon", "vk-cocoon/approve"} {
		c.Kubectl(t, "", "apply", "--server-side", "--force-conflicts", "-k", filepath.Join(root(t), "deploy", folder))
	}
	shared, err := clientcmd.LoadFromFile(filepath.Join(c.Dir, "kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	for _, user := range shared.AuthInfos {
		user.Impersonate, user.ImpersonateGroups = "system:bootstrap:abcdef", []string{"system:bootstrappers", "system:authenticated"}
	}
	path := filepath.Join(t.TempDir(), "bootstrap-kubeconfig")
	if err := clientcmd.WriteToFile(*shared, path); err != nil {
		t.Fatal(err)
	}
	return path
}
