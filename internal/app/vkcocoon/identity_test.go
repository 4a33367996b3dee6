package vkcocoon

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	certificates "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/clientcmd"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// signer is an API server that signs requests. It works for one certificate: its watches do not select by name.
func signer(ctx context.Context, t *testing.T) *fake.Clientset {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	api := fake.NewClientset()
	named := 0
	api.PrependReactor("create", "certificatesigningrequests", func(a k8stesting.Action) (bool, runtime.Object, error) {
		if r, ok := a.(k8stesting.CreateAction).GetObject().(*certificates.CertificateSigningRequest); ok { // the fake client generates no names
			named++
			r.Name = fmt.Sprintf("csr-%d", named)
		}
		return false, nil, nil
	})
	ended := make(chan struct{})
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer close(ended)
		ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
		kubetest.Sign(ctx, t, api, tls.Certificate{Leaf: ca, PrivateKey: key}, func() time.Duration { return time.Hour })
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return api
}

// A node with only the credentials that all new nodes share gets its own identity, and has it again after a restart.
func TestBootstrap(t *testing.T) {
	dir := t.TempDir()
	shared := kubeconfig(t, "https://127.0.0.1:1")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	api := signer(ctx, t)
	c, err := Config{BootstrapKubeconfig: shared, CertDir: filepath.Join(dir, "pki"), NodeName: "n1", NodeIP: "10.1.2.3"}.complete()
	if err != nil {
		t.Fatal(err)
	}
	if !c.NoRole || c.Kubeconfig != filepath.Join(dir, "pki", "kubeconfig") {
		t.Errorf("%+v", c)
	}
	asked := 0
	clients := func(*rest.Config) (kubernetes.Interface, error) { asked++; return api, nil }
	stop, err := c.bootstrap(ctx, clients, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	stop()
	rc, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil || rc.Host != "https://127.0.0.1:1" {
		t.Fatalf("%+v, %v", rc, err)
	}
	if subject := read(t, rc.CertFile).Subject; subject.CommonName != "system:node:n1" || len(subject.Organization) != 1 || subject.Organization[0] != "system:nodes" {
		t.Errorf("subject %s", subject)
	}
	for _, path := range []string{c.Kubeconfig, rc.KeyFile} {
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", path, st, err)
		}
	}
	if err := writeKubeconfig(shared, rc, rc.CertFile); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("somebody's credentials are overwritten: %v", err)
	}
	asked = 0
	if stop, err = c.bootstrap(ctx, clients, slog.New(slog.DiscardHandler)); err != nil || asked != 0 {
		t.Errorf("a second certificate: asked %d times, %v", asked, err)
	} else {
		stop()
	}
	if err := os.Remove(shared); err != nil {
		t.Fatal(err)
	}
	if stop, err = c.bootstrap(ctx, clients, slog.New(slog.DiscardHandler)); err != nil {
		t.Errorf("without the shared credentials, which are not needed any more: %v", err)
	} else {
		stop()
	}

	path, run, err := c.serving(signer(ctx, t))
	if err != nil {
		t.Fatal(err)
	}
	serving, end := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- run(serving) }()
	for every := time.Tick(10 * time.Millisecond); ctx.Err() == nil; <-every {
		if _, err := os.Stat(path); err == nil {
			break
		}
	}
	if cert := read(t, path); cert.DNSNames[0] != "n1" || cert.IPAddresses[0].String() != "10.1.2.3" {
		t.Errorf("serving certificate for %v, %v", cert.DNSNames, cert.IPAddresses)
	}
	end()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the renewal ended: %v", err)
	}
}

func read(t *testing.T, path string) *x509.Certificate {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if block.Type == "CERTIFICATE" {
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				t.Fatal(err)
			}
			return cert
		}
	}
	t.Fatalf("%s holds no certificate", path)
	return nil
}
