package controlplanetest

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// cluster is a folder with everything the control plane needs.
type cluster struct {
	dir  string
	bin  string
	port int
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	bin := os.Getenv("COCOON_UP_BIN")
	if bin == "" {
		t.Skip("COCOON_UP_BIN is not set: build the binary with build.sh and name it there")
	}
	bin, err := filepath.Abs(bin)
	must(t, err)
	// Not t.TempDir: a unix socket's name must stay short.
	dir, err := os.MkdirTemp("", "cocoon-up-")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	c := &cluster{dir: dir, bin: bin, port: freePort(t)}

	ca := newCA(t, "cocoon-ca")
	front := newCA(t, "cocoon-front-proxy-ca")
	c.write(t, "ca.crt", ca.pem)
	c.write(t, "front-proxy-ca.crt", front.pem)
	c.issue(t, ca, "apiserver", pkix.Name{CommonName: "kube-apiserver"})
	c.issue(t, ca, "kubelet-client", pkix.Name{CommonName: "kube-apiserver-kubelet-client", Organization: []string{"system:masters"}})
	c.issue(t, front, "front-proxy-client", pkix.Name{CommonName: "front-proxy-client"})
	c.issue(t, ca, "service-account", pkix.Name{CommonName: "service-account"})
	for user, name := range map[string]pkix.Name{
		"admin":              {CommonName: "admin", Organization: []string{"system:masters"}},
		"controller-manager": {CommonName: "system:kube-controller-manager"},
		"scheduler":          {CommonName: "system:kube-scheduler"},
		"node":               {CommonName: "system:node:virtual", Organization: []string{"system:nodes"}},
	} {
		c.issue(t, ca, user, name)
		c.kubeconfig(t, user)
	}
	c.config(t)
	return c
}

// config writes the configuration file, with the given changes.
func (c *cluster) config(t *testing.T, changes ...func(map[string]any)) {
	t.Helper()
	pair := func(name string) map[string]string {
		return map[string]string{"cert": name + ".crt", "key": name + ".key"}
	}
	file := map[string]any{
		"dataDir":    "data",
		"securePort": c.port,
		"pki": map[string]any{
			"servingCA":      "ca.crt",
			"serving":        pair("apiserver"),
			"clientCA":       "ca.crt",
			"kubeletCA":      "ca.crt",
			"kubeletClient":  pair("kubelet-client"),
			"frontProxy":     map[string]any{"ca": "front-proxy-ca.crt", "client": pair("front-proxy-client")},
			"serviceAccount": map[string]any{"key": "service-account.key", "publicKeys": []string{"service-account.crt"}},
		},
		"controllerManager": map[string]any{"kubeconfig": "controller-manager.kubeconfig"},
		"scheduler":         map[string]any{"kubeconfig": "scheduler.kubeconfig"},
	}
	for _, change := range changes {
		change(file)
	}
	data, err := json.MarshalIndent(file, "", "  ")
	must(t, err)
	c.write(t, "config.json", data)
}

func (c *cluster) kubeconfig(t *testing.T, user string) {
	t.Helper()
	c.write(t, user+".kubeconfig", fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: cocoon
clusters: [{name: cocoon, cluster: {server: "https://127.0.0.1:%d", certificate-authority: ca.crt}}]
users: [{name: user, user: {client-certificate: %s.crt, client-key: %s.key}}]
contexts: [{name: cocoon, context: {cluster: cocoon, user: user}}]
`, c.port, user, user))
}

func (c *cluster) write(t *testing.T, name string, data []byte) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(c.dir, name), data, 0o600))
}

// process is a running control plane.
type process struct {
	cmd    *exec.Cmd
	log    *bytes.Buffer
	exited chan struct{}
}

// start starts the control plane. The end of the test kills it if it still runs.
func (c *cluster) start(t *testing.T) *process {
	t.Helper()
	p := &process{log: &bytes.Buffer{}, exited: make(chan struct{})}
	p.cmd = exec.Command(c.bin, "control-plane", "--config", filepath.Join(c.dir, "config.json"))
	p.cmd.Stderr = p.log
	must(t, p.cmd.Start())
	go func() {
		defer close(p.exited)
		_ = p.cmd.Wait() // the process state holds the exit code
	}()
	t.Cleanup(func() {
		p.signal(t, syscall.SIGKILL)
		<-p.exited
		if t.Failed() {
			t.Logf("control plane log:\n%s", p.log)
		}
	})
	return p
}

func (p *process) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("send %s: %v", s, err)
	}
}

// wait returns the exit code once the process has ended.
func (p *process) wait(t *testing.T, within time.Duration) int {
	t.Helper()
	select {
	case <-p.exited:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(within):
		t.Fatalf("still running after %s", within)
		return 0
	}
}

// kubectl runs kubectl as user and returns its combined output.
func (c *cluster) kubectl(user string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.bin, append([]string{"kubectl"}, args...)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+filepath.Join(c.dir, user+".kubeconfig"), "HOME="+c.dir)
	out, err := cmd.CombinedOutput()
	return string(bytes.TrimSpace(out)), err
}

// eventually runs kubectl as the administrator until it prints want.
func (c *cluster) eventually(t *testing.T, want string, args ...string) {
	t.Helper()
	var out string
	var err error
	if !until(30*time.Second, func() bool {
		out, err = c.kubectl("admin", args...)
		return err == nil && out == want
	}) {
		t.Fatalf("kubectl %q: got %q, %v; want %q", args, out, err, want)
	}
}

// until reports whether condition became true in time.
func until(within time.Duration, condition func() bool) bool {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(within); !condition(); {
		select {
		case <-deadline:
			return false
		case <-tick.C:
		}
	}
	return true
}

func (c *cluster) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.kubectl("admin", args...)
	if err != nil {
		t.Fatalf("kubectl %q: %v: %s", args, err, out)
	}
	return out
}

// patch sends a merge patch as user. kubectl would read the subresource first,
// which a node may not do.
func (c *cluster) patch(t *testing.T, user, path, body string) error {
	t.Helper()
	cert, err := tls.LoadX509KeyPair(filepath.Join(c.dir, user+".crt"), filepath.Join(c.dir, user+".key"))
	must(t, err)
	ca, err := os.ReadFile(filepath.Join(c.dir, "ca.crt"))
	must(t, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	transport := &http.Transport{TLSClientConfig: &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: roots}}
	defer transport.CloseIdleConnections()

	url := fmt.Sprintf("https://127.0.0.1:%d%s", c.port, path)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPatch, url, strings.NewReader(body))
	must(t, err)
	req.Header.Set("Content-Type", "application/merge-patch+json")
	res, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		text, err := io.ReadAll(res.Body)
		return errors.Join(fmt.Errorf("%s: %s", res.Status, text), err)
	}
	return nil
}

type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newCA(t *testing.T, name string) authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	must(t, err)
	cert, err := x509.ParseCertificate(der)
	must(t, err)
	return authority{cert, key, encode("CERTIFICATE", der)}
}

// issue writes a certificate for name, valid for client and server.
func (c *cluster) issue(t *testing.T, ca authority, file string, name pkix.Name) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: serial, Subject: name,
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{"localhost"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4(10, 96, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, &key.PublicKey, ca.key)
	must(t, err)
	c.write(t, file+".crt", encode("CERTIFICATE", der))
	der, err = x509.MarshalECPrivateKey(key)
	must(t, err)
	c.write(t, file+".key", encode("EC PRIVATE KEY", der))
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
