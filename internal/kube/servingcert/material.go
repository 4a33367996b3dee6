package servingcert

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"slices"
	"time"

	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
)

// Keys of the Secret, as in cert-manager.
const (
	keyCACert = "ca.crt" // all trusted authorities; the first one signs
	keyCAKey  = "ca.key" // key of the first authority
	keyCert   = "tls.crt"
	keyKey    = "tls.key"
)

// skew is the allowed difference between the clocks of two machines.
const skew = 5 * time.Minute

// Lives holds the lifetimes of certificates. A certificate is replaced when a third of its lifetime is left.
type Lives struct {
	Authority time.Duration
	Serving   time.Duration // at most a third of the authority's
	// Overlap is how long a new authority is published before it signs a certificate, so that clients can load it. It is less
	// than a quarter of Serving. Otherwise a certificate can expire while its successor waits for the new authority: a third of
	// its lifetime is left when the wait begins, and the next check may be a twelfth later.
	Overlap time.Duration
}

// Default holds the default lifetimes.
var Default = Lives{Authority: 2 * 365 * 24 * time.Hour, Serving: 90 * 24 * time.Hour, Overlap: time.Hour}

// material is the usable content of the Secret.
type material struct {
	authorities []*x509.Certificate
	signer      crypto.Signer // key of authorities[0]; nil: lost
	serving     *tls.Certificate
}

// read decodes the data of the Secret. Damaged data counts as missing.
func read(data map[string][]byte) material {
	var m material
	m.authorities, _ = cert.ParseCertsPEM(data[keyCACert])
	if key, err := keyutil.ParsePrivateKeyPEM(data[keyCAKey]); err == nil && len(m.authorities) > 0 {
		if signer, ok := key.(crypto.Signer); ok && matches(m.authorities[0], signer) {
			m.signer = signer
		}
	}
	if pair, err := tls.X509KeyPair(data[keyCert], data[keyKey]); err == nil {
		m.serving = &pair
	}
	return m
}

func matches(c *x509.Certificate, key crypto.Signer) bool {
	public, ok := key.Public().(*ecdsa.PublicKey)
	return ok && public.Equal(c.PublicKey)
}

// bundle returns the PEM of every trusted authority.
func (m material) bundle() []byte { return encode(m.authorities) }

func encode(list []*x509.Certificate) []byte {
	out, _ := cert.EncodeCertificates(list...)
	return out
}

// data returns the new content of the Secret.
func (m material) data() (map[string][]byte, error) {
	caKey, err := keyutil.MarshalPrivateKeyToPEM(m.signer)
	if err != nil {
		return nil, fmt.Errorf("encode key of the authority: %w", err)
	}
	key, err := keyutil.MarshalPrivateKeyToPEM(m.serving.PrivateKey)
	if err != nil {
		return nil, fmt.Errorf("encode serving key: %w", err)
	}
	serving := pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: m.serving.Certificate[0]})
	return map[string][]byte{keyCACert: m.bundle(), keyCAKey: caKey, keyCert: serving, keyKey: key}, nil
}

// next returns the material for that time, and whether it differs from m. A new authority is added to the old one. It signs
// after it has been published for the overlap. The old authority is removed when it expires, long after the certificates that
// it signed.
func (m material) next(now time.Time, hosts []string, l Lives) (material, bool, error) {
	changed := false
	living := slices.DeleteFunc(slices.Clone(m.authorities), func(c *x509.Certificate) bool { return !now.Before(c.NotAfter) })
	if len(living) != len(m.authorities) {
		changed = true
		if len(living) == 0 || !living[0].Equal(m.authorities[0]) {
			m.signer = nil
		}
		m.authorities = living
	}
	if m.signer == nil || m.authorities[0].NotAfter.Sub(now) < l.Authority/3 {
		authority, key, err := newAuthority(now, l)
		if err != nil {
			return m, false, err
		}
		m.authorities, m.signer, changed = append([]*x509.Certificate{authority}, m.authorities...), key, true
	}
	signs := !now.Before(m.authorities[0].NotBefore.Add(skew + l.Overlap))
	valid := m.valid(now)
	if valid { // keep the current hosts, because replicas with other settings may need them
		if missing := m.missing(hosts); len(missing) > 0 {
			hosts, valid = append(m.hosts(), missing...), false
		}
	}
	if !valid || signs && m.serving.Leaf.NotAfter.Sub(now) < l.Serving/3 {
		var err error
		if m.serving, err = m.sign(now, hosts, l); err != nil {
			return m, false, err
		}
		changed = true
	}
	return m, changed, nil
}

// valid reports whether the serving certificate is valid at that time and signed by a trusted authority.
func (m material) valid(now time.Time) bool {
	return m.serving != nil && now.Before(m.serving.Leaf.NotAfter) && !now.Before(m.serving.Leaf.NotBefore) && trusts(m.authorities, m.serving.Leaf)
}

// hosts returns the hosts of the serving certificate.
func (m material) hosts() []string {
	all := slices.Clone(m.serving.Leaf.DNSNames)
	for _, ip := range m.serving.Leaf.IPAddresses {
		all = append(all, ip.String())
	}
	return all
}

// missing returns the hosts that the serving certificate does not cover.
func (m material) missing(hosts []string) (missing []string) {
	for _, h := range hosts {
		if m.serving.Leaf.VerifyHostname(h) != nil {
			missing = append(missing, h)
		}
	}
	return missing
}

// trusts reports whether one of the authorities has signed the certificate.
func trusts(authorities []*x509.Certificate, c *x509.Certificate) bool {
	return slices.ContainsFunc(authorities, func(a *x509.Certificate) bool { return c.CheckSignatureFrom(a) == nil })
}

func split(hosts []string) (dns []string, ips []net.IP) {
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			ips = append(ips, ip)
		} else {
			dns = append(dns, h)
		}
	}
	return dns, ips
}

func newAuthority(now time.Time, l Lives) (*x509.Certificate, crypto.Signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("create key of an authority: %w", err)
	}
	// Each authority has a name of its own, because clients find issuers by name.
	name := pkix.Name{CommonName: "cocoon-webhook-ca@" + now.UTC().Format(time.RFC3339)}
	c, err := issue(&x509.Certificate{
		Subject: name, NotBefore: now.Add(-skew), NotAfter: now.Add(l.Authority), IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}, nil, key.Public(), key)
	return c, key, err
}

func (m material) sign(now time.Time, hosts []string, l Lives) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("create serving key: %w", err)
	}
	dns, ips := split(hosts)
	c, err := issue(&x509.Certificate{
		Subject: pkix.Name{CommonName: "cocoon-webhook"}, NotBefore: now.Add(-skew), NotAfter: now.Add(l.Serving), DNSNames: dns, IPAddresses: ips,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, m.authorities[0], key.Public(), m.signer)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{c.Raw}, PrivateKey: key, Leaf: c}, nil
}

// issue signs tmpl with parent, or self-signs it if parent is nil.
func issue(tmpl, parent *x509.Certificate, public crypto.PublicKey, signer crypto.Signer) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("create certificate %s: %w", tmpl.Subject, err)
	}
	tmpl.SerialNumber = serial
	if parent == nil {
		parent = tmpl
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, public, signer)
	if err != nil {
		return nil, fmt.Errorf("create certificate %s: %w", tmpl.Subject, err)
	}
	return x509.ParseCertificate(der)
}
