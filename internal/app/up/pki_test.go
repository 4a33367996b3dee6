package up

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func made(t *testing.T, dir string, now time.Time, s Settings) pki {
	t.Helper()
	p := pki{dir: dir, now: now}
	if err := p.ensure(s); err != nil {
		t.Fatal(err)
	}
	return p
}

// files maps the names in dir to their content.
func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		all[e.Name()] = string(data)
	}
	return all
}

func roots(t *testing.T, p pki, ca string) *x509.CertPool {
	t.Helper()
	cert, err := p.loadCert(ca)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return pool
}

func TestCertificatesFitTheirUse(t *testing.T) {
	s := Settings{APIPort: 6443, Nodes: []NodeSettings{{Name: "n1", Port: 10250}, {Name: "n2"}}}
	p := made(t, t.TempDir(), time.Now(), s)
	for _, c := range []struct {
		name, ca, cn, org string
		usage             x509.ExtKeyUsage
		host              string
	}{
		{"apiserver", "ca", "kube-apiserver", "", x509.ExtKeyUsageServerAuth, "127.0.0.1"},
		{"apiserver", "ca", "kube-apiserver", "", x509.ExtKeyUsageServerAuth, "kubernetes.default.svc"},
		{"apiserver", "ca", "kube-apiserver", "", x509.ExtKeyUsageServerAuth, serviceIP},
		{"kubelet", "ca", "", "", x509.ExtKeyUsageServerAuth, nodeIP},
		{"admin", "ca", "kubernetes-admin", "system:masters", x509.ExtKeyUsageClientAuth, ""},
		{"controller-manager", "ca", "system:kube-controller-manager", "", x509.ExtKeyUsageClientAuth, ""},
		{"scheduler", "ca", "system:kube-scheduler", "", x509.ExtKeyUsageClientAuth, ""},
		{"node", "ca", "system:node:n1", "system:nodes", x509.ExtKeyUsageClientAuth, ""},
		{kubeVirtServing, "ca", "virt-api", "", x509.ExtKeyUsageServerAuth, kubeVirtService},
		{kubeVirtServing, "ca", "virt-api", "", x509.ExtKeyUsageServerAuth, nodeIP},
		{"front-proxy-client", "front-proxy-ca", "", "", x509.ExtKeyUsageClientAuth, ""},
	} {
		t.Run(c.name+"/"+c.host, func(t *testing.T) {
			cert, err := p.loadCert(c.name)
			if err != nil {
				t.Fatal(err)
			}
			o := x509.VerifyOptions{Roots: roots(t, p, c.ca), KeyUsages: []x509.ExtKeyUsage{c.usage}, DNSName: c.host}
			if _, err := cert.Verify(o); err != nil {
				t.Error(err)
			}
			if c.cn != "" && cert.Subject.CommonName != c.cn {
				t.Errorf("common name %q, want %q", cert.Subject.CommonName, c.cn)
			}
			if c.org != "" && strings.Join(cert.Subject.Organization, ",") != c.org {
				t.Errorf("organisations %q, want %q", cert.Subject.Organization, c.org)
			}
			if cert.IsCA {
				t.Error("a leaf may not sign")
			}
			if _, err := tls.LoadX509KeyPair(p.crt(c.name), p.key(c.name)); err != nil {
				t.Error(err)
			}
		})
	}
	// Only the authority distinguishes front proxies from clients.
	front, err := p.loadCert("front-proxy-client")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := front.Verify(x509.VerifyOptions{Roots: roots(t, p, "ca"), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err == nil {
		t.Error("the front proxy's certificate is also one of a client")
	}
}

func TestKeysAreTheOwnersAlone(t *testing.T) {
	p := made(t, t.TempDir(), time.Now(), Settings{Nodes: []NodeSettings{{Name: "n1"}}})
	keys, err := filepath.Glob(p.join("*.key"))
	if err != nil || len(keys) < 9 {
		t.Fatalf("keys %v, %v", keys, err)
	}
	for _, k := range keys {
		if fi, err := os.Stat(k); err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v, %v", k, fi.Mode(), err)
		}
	}
}

func TestARestartTouchesNothing(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	s := Settings{Nodes: []NodeSettings{{Name: "n1"}}}
	made(t, dir, now, s)
	before := files(t, dir)
	made(t, dir, now.Add(24*time.Hour), s)
	for name, data := range files(t, dir) {
		if before[name] != data {
			t.Errorf("%s changed", name)
		}
	}
}

func TestLeavesAreRenewedKeysAndAuthoritiesKept(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	s := Settings{Nodes: []NodeSettings{{Name: "n1"}}}
	made(t, dir, now, s)
	before := files(t, dir)
	later := now.Add(leafLife - leafRenew + time.Hour)
	p := made(t, dir, later, s)
	for name, data := range files(t, dir) {
		isLeaf := strings.HasSuffix(name, ".crt") && name != "ca.crt" && name != "front-proxy-ca.crt"
		if changed := before[name] != data; changed != isLeaf {
			t.Errorf("%s: changed %v, want %v", name, changed, isLeaf)
		}
	}
	cert, err := p.loadCert("admin")
	if err != nil {
		t.Fatal(err)
	}
	if left := cert.NotAfter.Sub(later); left < leafLife-time.Hour {
		t.Errorf("renewed for %v", left)
	}
}

func TestAnotherNodeNameIsAnotherCertificate(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	made(t, dir, now, Settings{Nodes: []NodeSettings{{Name: "n1"}}})
	p := made(t, dir, now, Settings{Nodes: []NodeSettings{{Name: "n2"}}})
	cert, err := p.loadCert("node")
	if err != nil {
		t.Fatal(err)
	}
	if cert.Subject.CommonName != "system:node:n2" {
		t.Errorf("common name %q", cert.Subject.CommonName)
	}
}

// Whichever file a killed start has not written, or the user has removed, the next start makes a consistent set.
func TestMissingFilesAreMadeAnew(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	s := Settings{Nodes: []NodeSettings{{Name: "n1"}}}
	p := made(t, dir, now, s)
	for name := range files(t, dir) {
		if err := os.Remove(p.join(name)); err != nil {
			t.Fatal(err)
		}
		made(t, dir, now, s)
		for _, leaf := range []string{"apiserver", "admin", "node", "kubelet"} {
			cert, err := p.loadCert(leaf)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := cert.Verify(x509.VerifyOptions{Roots: roots(t, p, "ca"), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
				t.Errorf("without %s: %s: %v", name, leaf, err)
			}
			if _, err := tls.LoadX509KeyPair(p.crt(leaf), p.key(leaf)); err != nil {
				t.Errorf("without %s: %s: %v", name, leaf, err)
			}
		}
	}
}

// A damaged certificate is made again from its key; a damaged key is not silently replaced.
func TestDamagedFiles(t *testing.T) {
	s := Settings{Nodes: []NodeSettings{{Name: "n1"}}}
	for _, name := range []string{"ca.key", "admin.key", "sa.key", "ca.crt", "admin.crt"} {
		for _, data := range []string{"", "no PEM", "-----BEGIN X-----\nAAAA\n-----END X-----\n"} {
			p := made(t, t.TempDir(), time.Now(), s)
			if err := os.WriteFile(p.join(name), []byte(data), 0o600); err != nil {
				t.Fatal(err)
			}
			err := p.ensure(s)
			if strings.HasSuffix(name, ".crt") {
				if err != nil {
					t.Errorf("%s = %q: %v", name, data, err)
				}
				continue
			}
			if !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), name) {
				t.Errorf("%s = %q: %v", name, data, err)
			}
		}
	}
}

// A real handshake, as between clients and servers of an instance.
func TestHandshake(t *testing.T) {
	p := made(t, t.TempDir(), time.Now(), Settings{Nodes: []NodeSettings{{Name: "n1"}}})
	server, err := tls.LoadX509KeyPair(p.crt("kubelet"), p.key("kubelet"))
	if err != nil {
		t.Fatal(err)
	}
	client, err := tls.LoadX509KeyPair(p.crt("apiserver-kubelet-client"), p.key("apiserver-kubelet-client"))
	if err != nil {
		t.Fatal(err)
	}
	ca := roots(t, p, "ca")
	ln, err := tls.Listen("tcp", net.JoinHostPort(nodeIP, "0"), &tls.Config{
		Certificates: []tls.Certificate{server}, ClientCAs: ca, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS13,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		if c, err := ln.Accept(); err == nil {
			_, _ = c.Write([]byte("hello"))
			c.Close()
		}
	}()
	c, err := tls.Dial("tcp", ln.Addr().String(), &tls.Config{Certificates: []tls.Certificate{client}, RootCAs: ca, MinVersion: tls.VersionTLS13})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	got := make([]byte, 5)
	if _, err := c.Read(got); err != nil || !bytes.Equal(got, []byte("hello")) {
		t.Errorf("%q, %v", got, err)
	}
}
