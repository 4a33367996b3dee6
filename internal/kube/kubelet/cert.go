package kubelet

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net"
	"os"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// TLS returns a configuration that serves the key pair in certFile and keyFile. It requests a client certificate but does not
// require it, because clients may send a token instead. A pair that is renewed on disk is loaded without a restart. While the
// files are missing, expired or unusable, it serves a self-signed certificate from memory. The second result says why it does
// so now, "" if it does not.
func TLS(certFile, keyFile, node, nodeIP string) (cfg *tls.Config, selfMade string, err error) {
	own, err := selfSigned(node, nodeIP, time.Now())
	if err != nil {
		return nil, "", err
	}
	p := &pair{cert: certFile, key: keyFile, own: own}
	if _, why := p.load(time.Now()); why != nil {
		selfMade = why.Error()
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12, ClientAuth: tls.RequestClientCert,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			c, _ := p.load(time.Now())
			return c, nil
		},
	}, selfMade, nil
}

// pair is a key pair on disk that is reloaded when its files change.
type pair struct {
	cert, key string
	own       *tls.Certificate

	mu     sync.Mutex
	seen   [2]time.Time // modification times of the loaded files
	loaded *tls.Certificate
	why    error
}

// load returns the certificate to serve now. If that is the self-signed one, the error says why.
func (p *pair) load(now time.Time) (*tls.Certificate, error) {
	if p.cert == "" || p.key == "" {
		return p.own, errdefs.NotFoundf("no serving certificate is configured")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var at [2]time.Time
	for i, f := range []string{p.cert, p.key} {
		st, err := os.Stat(f)
		if err != nil {
			return p.own, fmt.Errorf("serving certificate: %w", err)
		}
		at[i] = st.ModTime()
	}
	if at != p.seen {
		c, err := tls.LoadX509KeyPair(p.cert, p.key)
		p.seen, p.loaded, p.why = at, &c, err
	}
	switch {
	case p.why != nil:
		return p.own, fmt.Errorf("serving certificate: %w", p.why)
	case now.After(p.loaded.Leaf.NotAfter):
		return p.own, errdefs.Preconditionf("serving certificate %s expired at %s", p.cert, p.loaded.Leaf.NotAfter)
	}
	return p.loaded, nil
}

// selfSigned creates an ECDSA P-256 certificate for the names and addresses of the node and localhost. It is valid for ten
// years.
func selfSigned(node, nodeIP string, now time.Time) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("create a serving key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("create a serving certificate: %w", err)
	}
	t := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: node}, DNSNames: []string{node, "localhost"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(10, 0, 0),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	if ip := net.ParseIP(nodeIP); ip != nil {
		t.IPAddresses = append(t.IPAddresses, ip)
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("create a serving certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
