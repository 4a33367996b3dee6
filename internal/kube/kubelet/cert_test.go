package kubelet

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestCertificates(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "c.crt"), filepath.Join(dir, "c.key")
	cfg, why, err := TLS(certFile, keyFile, "node-1", "192.0.2.1")
	if err != nil || why == "" {
		t.Fatalf("missing files: %q, %v", why, err)
	}
	serial := func() string {
		c, err := cfg.GetCertificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		leaf, err := x509.ParseCertificate(c.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		return leaf.Subject.CommonName
	}
	if got := serial(); got != "node-1" {
		t.Errorf("served %s", got)
	}
	write := func(name string, until time.Time, at time.Time) {
		key, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		template := &x509.Certificate{SerialNumber: big.NewInt(9), Subject: pkix.Name{CommonName: name}, NotAfter: until}
		der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		raw, _ := x509.MarshalPKCS8PrivateKey(key)
		for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: raw}} {
			if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chtimes(file, at, at); err != nil {
				t.Fatal(err)
			}
		}
	}
	now := time.Now()
	write("first", now.Add(time.Hour), now.Add(-3*time.Minute))
	if got := serial(); got != "first" {
		t.Errorf("valid pair on disk: served %s", got)
	}
	write("second", now.Add(time.Hour), now.Add(-2*time.Minute))
	if got := serial(); got != "second" {
		t.Errorf("renewed pair on disk: served %s", got)
	}
	write("old", now.Add(-time.Hour), now.Add(-time.Minute))
	if got := serial(); got != "node-1" {
		t.Errorf("expired pair on disk: served %s", got)
	}
}
