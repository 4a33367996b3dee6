package up

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Lifetimes of certificates. A start renews a leaf that has less than leafRenew left.
const (
	caLife    = 10 * 365 * 24 * time.Hour
	leafLife  = 365 * 24 * time.Hour
	leafRenew = 60 * 24 * time.Hour
)

// pki is a folder of PEM files: NAME.crt and NAME.key.
type pki struct {
	dir string
	now time.Time
}

// authority is a CA that can sign.
type authority struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// leaf describes a certificate to issue.
type leaf struct {
	name    string // of the files
	cn      string
	orgs    []string
	dns     []string
	ips     []net.IP
	server  bool
	signing *authority
}

func (p pki) join(file string) string { return filepath.Join(p.dir, file) }
func (p pki) crt(name string) string  { return filepath.Join(p.dir, name+".crt") }
func (p pki) key(name string) string  { return filepath.Join(p.dir, name+".key") }

// ensure makes every certificate of an instance that is missing, expiring or for other names. It keeps existing keys.
func (p pki) ensure(s Settings) error {
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return fmt.Errorf("create certificates folder: %w", err)
	}
	ca, err := p.authority("ca", "cocoon")
	if err != nil {
		return err
	}
	front, err := p.authority("front-proxy-ca", "cocoon-front-proxy")
	if err != nil {
		return err
	}
	loopback := []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}
	leaves := []leaf{
		{
			name: "apiserver", cn: "kube-apiserver", server: true, signing: ca,
			dns: []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"},
			ips: append(slices.Clone(loopback), net.ParseIP(serviceIP)),
		},
		{name: "admin", cn: "kubernetes-admin", orgs: []string{"system:masters"}, signing: ca},
		{name: "controller-manager", cn: "system:kube-controller-manager", signing: ca},
		{name: "scheduler", cn: "system:kube-scheduler", signing: ca},
		{name: "apiserver-kubelet-client", cn: "kube-apiserver-kubelet-client", orgs: []string{"system:masters"}, signing: ca},
		{name: partMetricsServer, cn: metricsServerUser, signing: ca},
		{name: "metrics-server-serving", cn: partMetricsServer, server: true, signing: ca, dns: []string{partMetricsServer + ".kube-system.svc"}},
		{name: partManager, cn: "cocoon-manager", signing: ca},
		{name: kubeVirtServing, cn: "virt-api", server: true, signing: ca, dns: []string{kubeVirtService}, ips: loopback}, // uploads come to loopback
		{name: partSnapshots, cn: partSnapshots, signing: ca},
		{name: partProxy, cn: "system:kube-proxy", signing: ca},
		{name: partDNS, cn: dnsUser, signing: ca},
		{name: "scheduler-serving", cn: "cocoon-scheduler", server: true, signing: ca, dns: []string{"localhost"}, ips: loopback},
		{name: "front-proxy-client", cn: "front-proxy-client", signing: front},
	}
	for i := range s.Nodes {
		n := layout{}.node(s, i)
		ips := loopback
		if ip := net.ParseIP(s.Nodes[i].Address); ip != nil {
			ips = append(slices.Clone(loopback), ip)
		}
		leaves = append(leaves,
			leaf{name: n.suffixed("node"), cn: "system:node:" + n.name, orgs: []string{"system:nodes"}, signing: ca},
			leaf{name: n.suffixed("kubelet"), cn: n.name, server: true, signing: ca, dns: []string{n.name, "localhost"}, ips: ips})
	}
	if s.Kubelet != nil {
		n := layout{}.kubelet()
		leaves = append(leaves,
			leaf{name: n.suffixed("node"), cn: "system:node:" + n.name, orgs: []string{"system:nodes"}, signing: ca},
			leaf{name: n.suffixed("kubelet"), cn: "system:node:" + n.name, server: true, signing: ca, dns: []string{n.name}, ips: []net.IP{s.Kubelet.node().AsSlice()}})
	}
	for _, l := range leaves {
		if err := p.leaf(l); err != nil {
			return err
		}
	}
	return p.serviceAccountKey()
}

func (p pki) authority(name, cn string) (*authority, error) {
	key, err := p.loadOrMakeKey(name)
	if err != nil {
		return nil, err
	}
	if cert, err := p.loadCert(name); err == nil && p.now.Before(cert.NotAfter) && belongs(cert, key) {
		return &authority{cert, key}, nil
	}
	tmpl := &x509.Certificate{
		Subject:               pkix.Name{CommonName: cn},
		NotAfter:              p.now.Add(caLife),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature,
	}
	cert, err := p.sign(name, tmpl, key, nil)
	return &authority{cert, key}, err
}

func (p pki) leaf(l leaf) error {
	key, err := p.loadOrMakeKey(l.name)
	if err != nil {
		return err
	}
	if cert, err := p.loadCert(l.name); err == nil && p.current(cert, l, key) {
		return nil
	}
	usage := x509.ExtKeyUsageClientAuth
	if l.server {
		usage = x509.ExtKeyUsageServerAuth
	}
	_, err = p.sign(l.name, &x509.Certificate{
		Subject:     pkix.Name{CommonName: l.cn, Organization: l.orgs},
		NotAfter:    p.now.Add(leafLife),
		DNSNames:    l.dns,
		IPAddresses: l.ips,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{usage},
	}, key, l.signing)
	return err
}

// current reports whether cert is still valid for l: same key, same names, same signer, enough time left.
func (p pki) current(cert *x509.Certificate, l leaf, key crypto.Signer) bool {
	return belongs(cert, key) &&
		cert.Subject.CommonName == l.cn &&
		slices.Equal(cert.Subject.Organization, l.orgs) &&
		slices.Equal(cert.DNSNames, l.dns) &&
		slices.EqualFunc(cert.IPAddresses, l.ips, net.IP.Equal) &&
		cert.CheckSignatureFrom(l.signing.cert) == nil &&
		p.now.Add(leafRenew).Before(cert.NotAfter)
}

// belongs reports whether cert is for key. The user may have removed a damaged key so that a new one is made.
func belongs(cert *x509.Certificate, key crypto.Signer) bool {
	pub, ok := cert.PublicKey.(*ecdsa.PublicKey)
	return ok && pub.Equal(key.Public())
}

func (p pki) sign(name string, tmpl *x509.Certificate, key crypto.Signer, by *authority) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("create certificate %s: %w", name, err)
	}
	tmpl.SerialNumber = serial
	tmpl.NotBefore = p.now.Add(-5 * time.Minute) // clocks of one machine agree, but those of its guests may not
	parent, signer := tmpl, key
	if by != nil {
		parent, signer = by.cert, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, key.Public(), signer)
	if err != nil {
		return nil, fmt.Errorf("create certificate %s: %w", name, err)
	}
	if err := p.write(p.crt(name), "CERTIFICATE", der, 0o644); err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func (p pki) loadCert(name string) (*x509.Certificate, error) {
	der, err := readPEM(p.crt(name))
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func (p pki) loadOrMakeKey(name string) (crypto.Signer, error) {
	der, err := readPEM(p.key(name))
	switch {
	case err == nil:
		key, err := x509.ParseECPrivateKey(der)
		if err != nil {
			return nil, errdefs.DataLossf("key %s is damaged (%w); remove the file, and the next start creates a new one", p.key(name), err)
		}
		return key, nil
	case !os.IsNotExist(err):
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("create key %s: %w", name, err)
	}
	der, err = x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("create key %s: %w", name, err)
	}
	return key, p.write(p.key(name), "EC PRIVATE KEY", der, 0o600)
}

// serviceAccountKey makes sa.key and sa.pub, which sign and verify service account tokens.
func (p pki) serviceAccountKey() error {
	key, err := p.loadOrMakeKey("sa")
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return fmt.Errorf("encode service account key: %w", err)
	}
	return p.write(filepath.Join(p.dir, "sa.pub"), "PUBLIC KEY", der, 0o644)
}

// write does not touch a file that already has this content, so that a restart changes nothing.
func (p pki) write(path, kind string, der []byte, mode os.FileMode) error {
	data := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	return atomicfile.WriteFile(path, data, mode)
}

func readPEM(path string) ([]byte, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, errdefs.DataLossf("%s contains no PEM block; remove the file, and the next start creates a new one", path)
	}
	return block.Bytes, nil
}
