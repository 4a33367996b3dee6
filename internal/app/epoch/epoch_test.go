package epoch

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
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"cocoonstack.io/cocoon/internal/settings"
	"cocoonstack.io/cocoon/internal/testkit/settingsdoc"
)

const childEnv = "EPOCH_TEST_CHILD"

// TestMain lets the test binary act as the registry, so that it can be killed.
func TestMain(m *testing.M) {
	if args := os.Getenv(childEnv); args != "" {
		os.Exit(Main(context.Background(), strings.Split(args, " "), os.Getenv, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

func noEnv(string) string { return "" }

func tokenFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(path, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func run(args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = Main(context.Background(), args, noEnv, &out, &errs)
	return code, out.String(), errs.String()
}

func TestCommandLine(t *testing.T) {
	tokens := tokenFile(t)
	open := filepath.Join(t.TempDir(), "open")
	if err := os.WriteFile(open, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o644); err != nil { //nolint:gosec // that is the fault
		t.Fatal(err)
	}
	for _, c := range []struct {
		args string
		code int
		say  string
	}{
		{"serve", 2, "--token-file"},
		{"serve --token-file x --quota much", 2, "--quota"},
		{"serve --token-file x --tls-cert y", 2, "--tls-key"},
		{"serve --token-file x --gc-interval 0s", 2, "--gc-interval"},
		{"serve --token-file x --no-such-flag", 2, "no-such-flag"},
		{"serve now", 2, "takes no arguments"},
		{"serve --data " + t.TempDir() + " --token-file " + open, 1, "chmod 600"},
		{"serve --data " + t.TempDir() + " --token-file /no/such/file", 1, "token file"},
		{"serve --data " + t.TempDir() + " --addr nowhere --token-file " + tokens, 1, "serve on nowhere"},
		{"gc", 2, "--server or --data"},
		{"gc --data " + t.TempDir(), 1, "not the data folder of a registry"},
		{"scrub --server http://127.0.0.1:1", 1, "registry"},
		{"token new", 2, "name"},
		{"token new --name a --scope write:x", 2, "scope"},
		{"token new --name a", 0, ""},
		{"--help", 0, ""},
		{"serve --help", 0, ""},
	} {
		code, out, errs := run(strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(errs, c.say) || code == 0 && (out == "" || errs != "") {
			t.Errorf("epoch %s: %d: %s", c.args, code, errs)
		}
	}
}

func TestEnvironmentAndFlags(t *testing.T) {
	env := map[string]string{"EPOCH_ADDR": "1.2.3.4:5", "EPOCH_TOKEN_FILE": "/t", "EPOCH_QUOTA": "2Ki", "EPOCH_ANONYMOUS_PULL": "true", "EPOCH_GC_GRACE": "3m"}
	cfg := defaults()
	if err := settings.New("epoch", "EPOCH_CONFIG", cfg.settings()).Parse("", []string{"--addr", ":9"}, func(name string) string { return env[name] }, io.Discard); err != nil {
		t.Fatal(err)
	}
	if cfg.Addr != ":9" || cfg.TokenFile != "/t" || cfg.Quota != 2<<10 || !cfg.AnonymousPull || cfg.GCGrace != 3*time.Minute {
		t.Errorf("%+v", cfg)
	}
	bad := func(name string) string { return map[string]string{"EPOCH_SCRUB_INTERVAL": "x"}[name] }
	if code := Main(t.Context(), []string{"serve", "--token-file", "/t"}, bad, io.Discard, io.Discard); code != 2 {
		t.Errorf("bad variable: %d", code)
	}
	if code := Main(t.Context(), []string{"serve"}, func(string) string { return "x" }, io.Discard, io.Discard); code != 2 {
		t.Errorf("bad environment: %d", code)
	}
}

func TestSettingsAreDocumented(t *testing.T) {
	all := new(Config).settings()
	settingsdoc.Reference(t, "epoch", all)
	settingsdoc.Example(t, "deploy/systemd/epoch.env.example", all, "EPOCH_DATA", "EPOCH_TOKEN_FILE", "EPOCH_CONFIG") // the unit has flags for the first two
	settingsdoc.Manifest(t, "deploy/epoch/epoch.yaml", all)
}

// child is a registry in a separate process.
type child struct {
	cmd *exec.Cmd
	url string
}

func start(t *testing.T, dir, tokens string, more ...string) *child {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0") // a free port
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	args := append([]string{"serve", "--addr", addr, "--data", dir, "--token-file", tokens, "--log-level", "warn"}, more...)
	c := &child{cmd: exec.Command(os.Args[0]), url: "http://" + addr}
	c.cmd.Env = append(os.Environ(), childEnv+"="+strings.Join(args, " "))
	var log bytes.Buffer
	c.cmd.Stdout, c.cmd.Stderr = &log, &log
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.kill() })
	deadline := time.Now().Add(time.Minute)
	for {
		if resp, err := http.Get(c.url + "/healthz"); err == nil { //nolint:noctx // a probe
			resp.Body.Close()
			return c
		}
		if time.Now().After(deadline) {
			c.kill()
			t.Fatalf("not serving: %s", log.String())
		}
	}
}

func (c *child) kill() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

func (c *child) do(method, path string, body []byte) (int, http.Header, []byte, error) {
	req, err := http.NewRequest(method, c.url+path, bytes.NewReader(body)) //nolint:noctx // ends with the child
	if err != nil {
		return 0, nil, nil, err
	}
	req.Header.Set("Authorization", "Bearer secret")
	if strings.Contains(path, "/manifests/") {
		req.Header.Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		return 0, nil, nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header, data, err
}

// push is a client: it sends missing blobs in chunks, then the manifest. It stops at the first failure.
func (c *child) push(repo, tag string, layers ...[]byte) error {
	type desc struct {
		MediaType string        `json:"mediaType"`
		Digest    digest.Digest `json:"digest"`
		Size      int           `json:"size"`
	}
	m := map[string]any{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}
	var descs []desc
	for _, b := range append([][]byte{[]byte("{}")}, layers...) {
		d := digest.FromBytes(b)
		descs = append(descs, desc{"x/y", d, len(b)})
		status, _, _, err := c.do("HEAD", "/v2/"+repo+"/blobs/"+d.String(), nil)
		if err != nil {
			return err
		}
		if status == 200 {
			continue
		}
		status, h, _, err := c.do("POST", "/v2/"+repo+"/blobs/uploads/", nil)
		if err != nil || status != 202 {
			return fmt.Errorf("POST: %d, %w", status, err)
		}
		for i := 0; i < len(b); i += 64 << 10 {
			if status, _, _, err := c.do("PATCH", h.Get("Location"), b[i:min(len(b), i+64<<10)]); err != nil || status != 202 {
				return fmt.Errorf("PATCH: %d, %w", status, err)
			}
		}
		if status, _, _, err := c.do("PUT", h.Get("Location")+"?digest="+d.String(), nil); err != nil || status != 201 {
			return fmt.Errorf("PUT: %d, %w", status, err)
		}
	}
	m["config"], m["layers"] = descs[0], descs[1:]
	body, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if status, _, text, err := c.do("PUT", "/v2/"+repo+"/manifests/"+tag, body); err != nil || status != 201 {
		return fmt.Errorf("PUT manifest: %d %s, %w", status, text, err)
	}
	return nil
}

func noise(seed, n int) []byte {
	b := make([]byte, n)
	x := uint32(seed*2654435761 + 1)
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return b
}

// A registry that is killed at any moment during pushes serves, after its next start, every manifest that it had
// confirmed, complete, and accepts the interrupted pushes.
func TestKillDuringPushes(t *testing.T) {
	dir, tokens := t.TempDir(), tokenFile(t)
	confirmed := map[string][][]byte{}
	var mu sync.Mutex
	for round := range 8 {
		c := start(t, dir, tokens, "--gc-grace", "0s", "--gc-interval", "1s")
		var wg sync.WaitGroup
		progress := make(chan struct{}, 100)
		for p := range 3 {
			wg.Go(func() {
				for i := 0; ; i++ {
					layers := [][]byte{noise(round*100+p*10+i, 200<<10), noise(i, 100<<10)}
					tag := fmt.Sprintf("r%d-p%d-i%d", round, p, i)
					if err := c.push("vm/x", tag, layers...); err != nil {
						return // killed
					}
					mu.Lock()
					confirmed[tag] = layers
					mu.Unlock()
					select {
					case progress <- struct{}{}:
					default:
					}
				}
			})
		}
		for range round + 1 {
			<-progress
		}
		c.kill()
		wg.Wait()
	}
	c := start(t, dir, tokens)
	for tag, layers := range confirmed {
		status, _, body, err := c.do("GET", "/v2/vm/x/manifests/"+tag, nil)
		if err != nil || status != 200 {
			t.Fatalf("%s was confirmed and is gone: %d, %v", tag, status, err)
		}
		for _, l := range layers {
			d := digest.FromBytes(l)
			if !bytes.Contains(body, []byte(d)) {
				t.Errorf("%s names others", tag)
			}
			if status, _, got, err := c.do("GET", "/v2/vm/x/blobs/"+d.String(), nil); err != nil || status != 200 || !bytes.Equal(got, l) {
				t.Errorf("%s of %s: %d, %d bytes, %v", d, tag, status, len(got), err)
			}
		}
	}
	if len(confirmed) == 0 {
		t.Error("nothing was pushed")
	}
	if err := c.push("vm/x", "after", noise(1, 500_000)); err != nil {
		t.Error(err)
	}

	// The data has one owner; after the owner has ended, the verbs work offline.
	if code, _, errs := run("scrub", "--data", dir); code != 1 || !strings.Contains(errs, "another epoch") {
		t.Errorf("scrub under a running registry: %d, %s", code, errs)
	}
	env := func(name string) string { return map[string]string{"EPOCH_TOKEN": "secret"}[name] }
	var out bytes.Buffer
	if code := Main(t.Context(), []string{"gc", "--server", c.url}, env, &out, io.Discard); code != 0 || !strings.Contains(out.String(), `"blobs"`) {
		t.Errorf("gc by the server: %d, %s", code, out.String())
	}
	c.kill()
	if code, out, errs := run("scrub", "--data", dir); code != 0 || !strings.Contains(out, `"damaged":0`) {
		t.Errorf("scrub: %d, %s%s", code, out, errs)
	}
	if code, out, errs := run("gc", "--data", dir, "--gc-grace", "0s"); code != 0 || !strings.Contains(out, `"blobs":`) {
		t.Errorf("gc: %d, %s%s", code, out, errs)
	}
	for tag, layers := range confirmed { // and removed nothing that has a name
		hex := digest.FromBytes(layers[0]).Encoded()
		if _, err := os.Stat(filepath.Join(dir, "blobs", "sha256", hex[:2], hex)); err != nil {
			t.Errorf("%s: %v", tag, err)
		}
	}
}

func makeCertificate(t *testing.T) (cert, key string, pool *x509.CertPool) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "epoch"}, NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	pool = x509.NewCertPool()
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	pool.AppendCertsFromPEM(certPEM)
	cert, key = filepath.Join(t.TempDir(), "crt"), filepath.Join(t.TempDir(), "key")
	for path, data := range map[string][]byte{cert: certPEM, key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key, pool
}

func TestTLSAndEnd(t *testing.T) {
	cert, key, pool := makeCertificate(t)
	cfg := defaults()
	cfg.Addr, cfg.Data, cfg.TokenFile, cfg.TLSCert, cfg.TLSKey = "127.0.0.1:0", t.TempDir(), tokenFile(t), cert, key
	cfg.MetricsAddr = "127.0.0.1:0"
	addr := make(chan string, 1)
	cfg.ready = func(a string) { addr <- a }
	ctx, stop := context.WithCancel(t.Context())
	s, err := newServer(ctx, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.run(ctx) }()
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), "GET", "https://"+<-addr+"/v2/", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.SetBasicAuth("x", "secret")
	resp, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 200 || resp.ProtoMajor != 2 {
		t.Errorf("%s over %s", resp.Status, resp.Proto)
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("a wanted end: %v", err)
	}
}

func TestCertificateIsReadAgain(t *testing.T) {
	cert, key, _ := makeCertificate(t)
	c, err := loadCertificate(cert, key, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	serves := func() string {
		t.Helper()
		c.looked = time.Time{}
		pair, err := c.get(nil)
		if err != nil {
			t.Fatal(err)
		}
		return string(pair.Certificate[0])
	}
	first := serves()
	newCert, newKey, _ := makeCertificate(t)
	later := time.Now().Add(time.Minute)
	replace := func(from, to string) {
		t.Helper()
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(to, later, later); err != nil {
			t.Fatal(err)
		}
	}
	replace(newCert, cert)
	if serves() != first {
		t.Error("a certificate without its key is served")
	}
	replace(newKey, key)
	if serves() == first {
		t.Error("the new certificate is not served")
	}
	if _, err := loadCertificate(cert, cert, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a certificate for a key is taken")
	}
}
