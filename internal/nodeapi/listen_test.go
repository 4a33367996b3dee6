package nodeapi_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeapi"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/vm"
)

func found(string) (vm.Record, error) { return vm.Record{ID: "i"}, nil }

func TestSocketPathOfAnyLength(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "cocoond.sock")
	c, stop := serve(t, &scripted{inspect: found}, nodeapi.Config{Socket: path})
	if _, err := c.Inspect(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	stop()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the socket is still there: %v", err)
	}
}

func TestSocketMode(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cocoond.sock")
	serve(t, &scripted{}, nodeapi.Config{Socket: path, Group: "no-such-group-here"})
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v", fi.Mode(), err)
	}
}

func TestSocketInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cocoond.sock")
	c, _ := serve(t, &scripted{inspect: found}, nodeapi.Config{Socket: path})
	if err := runOnce(t, path); errdefs.ClassOf(err) != errdefs.AlreadyExists {
		t.Errorf("second server: %v", err)
	}
	if _, err := c.Inspect(t.Context(), "x"); err != nil {
		t.Errorf("the first one does not answer any more: %v", err)
	}
}

func TestWhatIsInTheWay(t *testing.T) {
	dir := t.TempDir()
	stale := filepath.Join(dir, "stale.sock")
	l, err := net.Listen("unix", stale)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	c, _ := serve(t, &scripted{inspect: found}, nodeapi.Config{Socket: stale})
	if _, err := c.Inspect(t.Context(), "x"); err != nil {
		t.Errorf("a stale socket was not replaced: %v", err)
	}

	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := runOnce(t, file); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a file in the way: %v", err)
	}
	if b, _ := os.ReadFile(file); string(b) != "precious" {
		t.Error("the file was touched")
	}
	if err := runOnce(t, filepath.Join(dir, "none", "x.sock")); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("no folder: %v", err)
	}
}

func runOnce(t *testing.T, socket string) error {
	t.Helper()
	srv, err := nodeapi.New(nodeapi.Config{Socket: socket}, nodeapi.Deps{Engine: &scripted{}, Images: catalog.Images{}, Host: host{}, Log: discard})
	if err != nil {
		t.Fatal(err)
	}
	return srv.Run(t.Context())
}

func TestTCPNeedsACertificate(t *testing.T) {
	ca, caKey := certificate(t, nil, nil)
	files := tlsFiles(t, ca, caKey)

	probe, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := probe.Addr().String()
	probe.Close()
	serve(t, &scripted{inspect: found}, nodeapi.Config{TCP: addr, TLS: files})

	roots := x509.NewCertPool()
	roots.AddCert(ca)
	other, otherKey := certificate(t, nil, nil)
	for name, c := range map[string]struct {
		certs []tls.Certificate
		ok    bool
	}{
		"ours":    {[]tls.Certificate{pair(t, ca, caKey)}, true},
		"none":    {nil, false},
		"foreign": {[]tls.Certificate{pair(t, other, otherKey)}, false},
	} {
		client, err := nodeclient.DialTLS(addr, &tls.Config{RootCAs: roots, Certificates: c.certs})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		_, err = client.Inspect(ctx, "x")
		cancel()
		client.Close()
		if c.ok && err != nil || !c.ok && !errdefs.IsUnavailable(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := nodeapi.New(nodeapi.Config{Socket: "x", TCP: addr}, nodeapi.Deps{Log: discard}); !errdefs.IsInvalid(err) {
		t.Errorf("TCP without TLS: %v", err)
	}
}

// certificate makes a certificate signed by parent, or a CA of its own.
func certificate(t *testing.T, parent *x509.Certificate, parentKey *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature,
	}
	if parent == nil {
		tmpl.IsCA, tmpl.BasicConstraintsValid = true, true
		tmpl.KeyUsage |= x509.KeyUsageCertSign
		parent, parentKey = tmpl, key
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, key.Public(), parentKey)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

func pair(t *testing.T, ca *x509.Certificate, caKey *ecdsa.PrivateKey) tls.Certificate {
	t.Helper()
	cert, key := certificate(t, ca, caKey)
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}
}

// tlsFiles returns the files of a server, for clients of the same CA.
func tlsFiles(t *testing.T, ca *x509.Certificate, caKey *ecdsa.PrivateKey) nodeapi.TLS {
	t.Helper()
	dir, server := t.TempDir(), pair(t, ca, caKey)
	files := nodeapi.TLS{Cert: filepath.Join(dir, "crt"), Key: filepath.Join(dir, "key"), ClientCA: filepath.Join(dir, "ca")}
	key, err := x509.MarshalPKCS8PrivateKey(server.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	writePEM(t, files.Cert, "CERTIFICATE", server.Certificate[0])
	writePEM(t, files.Key, "PRIVATE KEY", key)
	writePEM(t, files.ClientCA, "CERTIFICATE", ca.Raw)
	return files
}

func writePEM(t *testing.T, path, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}
