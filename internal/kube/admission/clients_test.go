package admission

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// pair creates a certificate that parent signs, or a self-signed one if parent is nil.
func pair(t *testing.T, name string, parent *tls.Certificate, change func(*x509.Certificate)) *tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, BasicConstraintsValid: true, IsCA: parent == nil,
	}
	if change != nil {
		change(c)
	}
	by, signer := c, any(key)
	if parent != nil {
		by, signer = parent.Leaf, parent.PrivateKey
	}
	der, err := x509.CreateCertificate(rand.Reader, c, by, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

func TestClients(t *testing.T) {
	ours, theirs := pair(t, "ours", nil, nil), pair(t, "theirs", nil, nil)
	middle := pair(t, "middle", ours, func(c *x509.Certificate) { c.IsCA = true })
	through := pair(t, "apiserver", middle, nil)
	through.Certificate = append(through.Certificate, middle.Certificate[0])
	authority := ours
	c := Clients{Names: []string{"apiserver"}, Authorities: func() (x509.VerifyOptions, bool) {
		pool := x509.NewCertPool()
		if authority != nil {
			pool.AddCert(authority.Leaf)
		}
		return x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, authority != nil
	}}
	s := httptest.NewUnstartedServer(c.guard(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })))
	s.TLS = &tls.Config{MinVersion: tls.VersionTLS12, ClientAuth: tls.RequestClientCert}
	s.StartTLS()
	defer s.Close()
	ask := func(cert *tls.Certificate) int {
		t.Helper()
		roots := x509.NewCertPool()
		roots.AddCert(s.Certificate())
		config := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots}
		if cert != nil {
			config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil }
		}
		transport := &http.Transport{TLSClientConfig: config}
		defer transport.CloseIdleConnections()
		resp, err := (&http.Client{Transport: transport}).Get(s.URL)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	for name, tc := range map[string]struct {
		cert *tls.Certificate
		want int
	}{
		"no certificate":         {nil, http.StatusUnauthorized},
		"the API server":         {pair(t, "apiserver", ours, nil), http.StatusTeapot},
		"intermediate authority": {through, http.StatusTeapot},
		"another common name":    {pair(t, "kubelet", ours, nil), http.StatusForbidden},
		"another authority":      {pair(t, "apiserver", theirs, nil), http.StatusUnauthorized},
		"self-signed":            {pair(t, "apiserver", nil, nil), http.StatusUnauthorized},
		"expired":                {pair(t, "apiserver", ours, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }), http.StatusUnauthorized},
		"server certificate":     {pair(t, "apiserver", ours, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }), http.StatusUnauthorized},
	} {
		if got := ask(tc.cert); got != tc.want {
			t.Errorf("%s: status %d, want %d", name, got, tc.want)
		}
	}
	authority = theirs // the file has changed
	if got := ask(pair(t, "apiserver", theirs, nil)); got != http.StatusTeapot {
		t.Errorf("certificate of the new authority: status %d", got)
	}
	if got := ask(pair(t, "apiserver", ours, nil)); got != http.StatusUnauthorized {
		t.Errorf("certificate of the old authority: status %d", got)
	}
	if authority = nil; ask(pair(t, "apiserver", ours, nil)) != http.StatusUnauthorized {
		t.Error("a client is accepted although no authority is loaded")
	}
}
