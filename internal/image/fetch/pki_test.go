package fetch

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/image/translate"
)

// pki is an authority with an intermediate authority.
type pki struct{ root, intermediate *entity }

// entity is a certificate and its key.
type entity struct {
	cert *x509.Certificate
	key  crypto.Signer
}

func newPKI(t *testing.T) *pki {
	authority := func(name string, by *entity) *entity {
		return issue(t, by, ecKey(t), &x509.Certificate{
			Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
			NotBefore: time.Unix(0, 0), NotAfter: time.Now().Add(time.Hour),
		})
	}
	p := &pki{root: authority("root", nil)}
	p.intermediate = authority("intermediate", p.root)
	return p
}

func ecKey(t *testing.T) crypto.Signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// issue signs template with the key of by, or with its own key if by is nil.
func issue(t *testing.T, by *entity, key crypto.Signer, template *x509.Certificate) *entity {
	t.Helper()
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber = serial
	parent, signer := template, key
	if by != nil {
		parent, signer = by.cert, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &entity{cert, key}
}

func leafTemplate(name string) *x509.Certificate {
	return &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		NotBefore:   time.Unix(0, 0), NotAfter: time.Now().Add(time.Hour),
	}
}

func (p *pki) under(t *testing.T, by *entity, name string) *entity {
	return issue(t, by, ecKey(t), leafTemplate(name))
}

func (p *pki) leaf(t *testing.T, name string) *entity { return p.under(t, p.root, name) }

func (p *pki) rsaLeaf(t *testing.T, name string) *entity {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	return issue(t, p.root, key, leafTemplate(name))
}

func (p *pki) serving(t *testing.T, c *x509.Certificate) tls.Certificate {
	e := issue(t, p.root, ecKey(t), c)
	return tls.Certificate{Certificate: [][]byte{e.cert.Raw}, PrivateKey: e.key}
}

// server is a certificate for 127.0.0.1 and example.com.
func (p *pki) server(t *testing.T) tls.Certificate {
	return p.valid(t, time.Unix(0, 0), time.Now().Add(time.Hour))
}

func (p *pki) valid(t *testing.T, from, to time.Time) tls.Certificate {
	c := leafTemplate("server")
	c.NotBefore, c.NotAfter = from, to
	c.IPAddresses, c.DNSNames = []net.IP{net.IPv4(127, 0, 0, 1)}, []string{"example.com"}
	return p.serving(t, c)
}

func (p *pki) named(t *testing.T, name string) tls.Certificate {
	c := leafTemplate("server")
	c.DNSNames = []string{name}
	return p.serving(t, c)
}

func (p *pki) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(p.root.cert)
	return pool
}

func (p *pki) rootPEM() string { return p.root.certPEM() }

// trusting is a profile that trusts p and has no other settings.
func trusting(p *pki) *translate.Profile {
	return &translate.Profile{TLS: &translate.TLS{Certificates: []translate.Certificate{{Cert: p.rootPEM()}}}}
}

func (e *entity) certPEM() string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: e.cert.Raw}))
}

// keyPEM returns the key as pkcs8, pkcs1 or sec1.
func (e *entity) keyPEM(t *testing.T, form string) string {
	t.Helper()
	b := &pem.Block{Type: "PRIVATE KEY"}
	var err error
	switch form {
	case "pkcs1":
		b.Type, b.Bytes = "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(e.key.(*rsa.PrivateKey))
	case "sec1":
		b.Type = "EC PRIVATE KEY"
		b.Bytes, err = x509.MarshalECPrivateKey(e.key.(*ecdsa.PrivateKey))
	default:
		b.Bytes, err = x509.MarshalPKCS8PrivateKey(e.key)
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(b))
}
