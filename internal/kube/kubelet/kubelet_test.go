package kubelet

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
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	authn "k8s.io/api/authentication/v1"
	authz "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	clientexec "k8s.io/client-go/util/exec"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// guests is a Backend whose commands are written in Go.
type guests struct {
	commands map[string]func(ctx context.Context, e guest.Exec, s guest.Streams) (int, error)
	entries  []guest.LogEntry
	asked    guest.LogOptions
	hold     chan struct{} // follow until closed
	server   string        // that Dial reaches, whatever the port
}

func (g *guests) Dial(_ context.Context, _, pod string, port int) (net.Conn, error) {
	if pod != "web" || port != 80 {
		return nil, errdefs.Unavailablef("nobody listens on port %d", port)
	}
	return net.Dial("tcp", g.server)
}

func (g *guests) GetPods(context.Context) ([]*corev1.Pod, error) {
	p := &corev1.Pod{}
	p.Name = "web"
	return []*corev1.Pod{p}, nil
}

func (g *guests) Exec(ctx context.Context, _, pod, _ string, e guest.Exec, s guest.Streams) (int, error) {
	if pod != "web" {
		return 0, errdefs.NotFoundf("pod %q not found on this node", pod)
	}
	return g.commands[e.Command[0]](ctx, e, s)
}

func (g *guests) Logs(ctx context.Context, _, pod, _ string, o guest.LogOptions, fn func(guest.LogEntry) error) error {
	if pod != "web" {
		return errdefs.Preconditionf("container %q is waiting to start: ContainerCreating", "c")
	}
	g.asked = o
	for _, e := range g.entries {
		if err := fn(e); err != nil {
			return err
		}
	}
	if o.Follow {
		select {
		case <-g.hold:
		case <-ctx.Done():
		}
	}
	return nil
}

// node is a running server with a certificate authority and an API server that knows two tokens: "good" may do
// everything, "weak" nothing.
type node struct {
	addr    string
	ca      *x509.Certificate
	key     *ecdsa.PrivateKey
	pool    *x509.CertPool
	backend *guests
}

func serve(t *testing.T) *node {
	t.Helper()
	n := &node{backend: &guests{commands: commands(t), hold: make(chan struct{})}}
	n.ca, n.key = authority(t)
	caPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: n.ca.Raw})
	provider, err := dynamiccertificates.NewStaticCAContent("test", caPEM)
	if err != nil {
		t.Fatal(err)
	}
	auth, err := Delegate(reviewer(t), "node-1", provider)
	if err != nil {
		t.Fatal(err)
	}
	cfg, _, err := TLS("", "", "node-1", "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	own, _ := cfg.GetCertificate(nil)
	leaf, err := x509.ParseCertificate(own.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	n.pool = x509.NewCertPool()
	n.pool.AddCert(leaf)
	s, err := New(Config{Addr: "127.0.0.1:0", TLS: cfg, Auth: auth, Backend: n.backend, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.Listen()
	if err != nil {
		t.Fatal(err)
	}
	n.addr = "https://" + l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return n
}

func authority(t *testing.T) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

// client is a TLS configuration with a certificate for user, signed by the cluster's authority or by a stranger.
func (n *node) client(t *testing.T, user string, stranger bool) tls.Certificate {
	t.Helper()
	ca, caKey := n.ca, n.key
	if stranger {
		ca, caKey = authority(t)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: user}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, ca, key.Public(), caKey)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// reviewer is a client of an API server that knows nothing but reviews.
func reviewer(t *testing.T) kubernetes.Interface {
	t.Helper()
	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, v any) {
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(v); err != nil {
			t.Error(err)
		}
	}
	mux.HandleFunc("POST /apis/authentication.k8s.io/v1/tokenreviews", func(w http.ResponseWriter, req *http.Request) {
		var r authn.TokenReview
		if err := json.NewDecoder(req.Body).Decode(&r); err != nil {
			t.Error(err)
		}
		if r.Spec.Token == "good" || r.Spec.Token == "weak" {
			r.Status = authn.TokenReviewStatus{Authenticated: true, User: authn.UserInfo{Username: r.Spec.Token}}
		}
		answer(w, r)
	})
	mux.HandleFunc("POST /apis/authorization.k8s.io/v1/subjectaccessreviews", func(w http.ResponseWriter, req *http.Request) {
		var r authz.SubjectAccessReview
		if err := json.NewDecoder(req.Body).Decode(&r); err != nil {
			t.Error(err)
		}
		attr := r.Spec.ResourceAttributes
		fine := r.Spec.User == "good" || r.Spec.User == "lister" && attr.Subresource == "pods"
		r.Status.Allowed = fine && attr.Resource == "nodes" && attr.Name == "node-1"
		answer(w, r)
	})
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	c, err := kubernetes.NewForConfig(&rest.Config{Host: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (n *node) get(t *testing.T, path string, change func(*http.Request, *tls.Config)) (int, string) {
	t.Helper()
	cfg := &tls.Config{RootCAs: n.pool}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, n.addr+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(r, cfg)
	}
	tr := &http.Transport{TLSClientConfig: cfg}
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func token(v string) func(*http.Request, *tls.Config) {
	return func(r *http.Request, _ *tls.Config) { r.Header.Set("Authorization", "Bearer "+v) }
}

func TestWhoMayComeIn(t *testing.T) {
	n := serve(t)
	cert := func(user string, stranger bool) func(*http.Request, *tls.Config) {
		c := n.client(t, user, stranger)
		return func(_ *http.Request, cfg *tls.Config) { cfg.Certificates = []tls.Certificate{c} }
	}
	for _, tc := range []struct {
		name string
		path string
		who  func(*http.Request, *tls.Config)
		want int
	}{
		{"nobody", "/pods", nil, 401},
		{"nobody asks for health", "/healthz", nil, 401},
		{"an unknown token", "/pods", token("bad"), 401},
		{"a token without rights", "/pods", token("weak"), 403},
		{"a good token", "/pods", token("good"), 200},
		{"a good certificate", "/pods", cert("good", false), 200},
		{"a certificate without rights", "/healthz", cert("weak", false), 403},
		{"a stranger's certificate", "/pods", cert("good", true), 401},
		{"fine-grained right", "/pods", cert("lister", false), 200},
		{"fine-grained right elsewhere", "/containerLogs/default/web/c", cert("lister", false), 403},
		{"no such page", "/nothing", token("good"), 404},
		{"health", "/healthz", token("good"), 200},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if code, body := n.get(t, tc.path, tc.who); code != tc.want {
				t.Errorf("%d %s, want %d", code, body, tc.want)
			}
		})
	}
}

// commands are what the tests run in the guest.
func commands(t *testing.T) map[string]func(context.Context, guest.Exec, guest.Streams) (int, error) {
	return map[string]func(context.Context, guest.Exec, guest.Streams) (int, error){
		"seven": func(_ context.Context, _ guest.Exec, s guest.Streams) (int, error) {
			fmt.Fprint(s.Stdout, "out")
			fmt.Fprint(s.Stderr, "err")
			return 7, nil
		},
		"cat": func(_ context.Context, _ guest.Exec, s guest.Streams) (int, error) {
			_, err := io.Copy(s.Stdout, s.Stdin)
			return 0, err
		},
		"size": func(ctx context.Context, e guest.Exec, s guest.Streams) (int, error) {
			if !e.TTY || s.Stderr != nil {
				t.Errorf("no terminal, or one with a second output: %+v", e)
			}
			for {
				select {
				case w, ok := <-s.Resize:
					if !ok {
						return 1, errors.New("sizes ended")
					}
					fmt.Fprintf(s.Stdout, "%dx%d;", w.Cols, w.Rows)
					if w.Cols == 132 {
						return 0, nil
					}
				case <-ctx.Done():
					return 1, ctx.Err()
				}
			}
		},
		"broken": func(context.Context, guest.Exec, guest.Streams) (int, error) {
			return 0, errdefs.Unavailablef("the guest does not answer")
		},
		"wait": func(ctx context.Context, _ guest.Exec, s guest.Streams) (int, error) {
			fmt.Fprint(s.Stdout, "waiting")
			<-ctx.Done()
			fmt.Fprint(s.Stdout, "never seen")
			return 137, ctx.Err()
		},
		"big": func(_ context.Context, _ guest.Exec, s guest.Streams) (int, error) {
			_, err := s.Stdout.Write(bytes.Repeat([]byte("0123456789abcdef"), 1<<16))
			return 0, err
		},
	}
}

// executors are the two ways in: SPDY, as the API server comes, and a websocket.
func (n *node) executors(t *testing.T, pod, command string, o remotecommand.StreamOptions) map[string]remotecommand.Executor {
	t.Helper()
	q := url.Values{"command": {command}}
	for key, on := range map[string]bool{"input": o.Stdin != nil, "output": o.Stdout != nil, "error": o.Stderr != nil && !o.Tty, "tty": o.Tty} {
		if on {
			q.Set(key, "1")
		}
	}
	u, err := url.Parse(n.addr + "/exec/default/" + pod + "/c?" + q.Encode())
	if err != nil {
		t.Fatal(err)
	}
	cfg := &rest.Config{Host: n.addr, BearerToken: "good", TLSClientConfig: rest.TLSClientConfig{CAData: n.caPEM()}}
	overSPDY, err := remotecommand.NewSPDYExecutor(cfg, http.MethodPost, u)
	if err != nil {
		t.Fatal(err)
	}
	overSocket, err := remotecommand.NewWebSocketExecutor(cfg, http.MethodGet, u.String())
	if err != nil {
		t.Fatal(err)
	}
	return map[string]remotecommand.Executor{"spdy": overSPDY, "websocket": overSocket}
}

func (n *node) caPEM() []byte {
	c := &tls.Config{RootCAs: n.pool, InsecureSkipVerify: true} //nolint:gosec // fetches the certificate that is then trusted
	conn, err := tls.Dial("tcp", strings.TrimPrefix(n.addr, "https://"), c)
	if err != nil {
		return nil
	}
	defer conn.Close()
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: conn.ConnectionState().PeerCertificates[0].Raw})
}

// both runs a command over both transports.
func both(t *testing.T, n *node, pod, command string, options func() remotecommand.StreamOptions, check func(t *testing.T, o remotecommand.StreamOptions, err error)) {
	for _, name := range []string{"spdy", "websocket"} {
		t.Run(name, func(t *testing.T) {
			o := options()
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			err := n.executors(t, pod, command, o)[name].StreamWithContext(ctx, o)
			check(t, o, err)
		})
	}
}

func TestExecExitCodeAndStreams(t *testing.T) {
	n := serve(t)
	both(t, n, "web", "seven",
		func() remotecommand.StreamOptions {
			return remotecommand.StreamOptions{Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}}
		},
		func(t *testing.T, o remotecommand.StreamOptions, err error) {
			code := clientexec.CodeExitError{}
			if !errors.As(err, &code) || code.Code != 7 {
				t.Errorf("error %v, want exit code 7", err)
			}
			if o.Stdout.(*bytes.Buffer).String() != "out" || o.Stderr.(*bytes.Buffer).String() != "err" {
				t.Errorf("output %q and %q", o.Stdout, o.Stderr)
			}
		})
}

func TestExecStdinEnds(t *testing.T) {
	n := serve(t)
	long := strings.Repeat("line\n", 50000)
	both(t, n, "web", "cat",
		func() remotecommand.StreamOptions {
			return remotecommand.StreamOptions{Stdin: strings.NewReader(long), Stdout: &bytes.Buffer{}}
		},
		func(t *testing.T, o remotecommand.StreamOptions, err error) {
			if err != nil {
				t.Error(err)
			}
			if got := o.Stdout.(*bytes.Buffer).String(); got != long {
				t.Errorf("%d bytes came back of %d", len(got), len(long))
			}
		})
}

func TestExecMuchOutput(t *testing.T) {
	n := serve(t)
	both(t, n, "web", "big",
		func() remotecommand.StreamOptions { return remotecommand.StreamOptions{Stdout: &bytes.Buffer{}} },
		func(t *testing.T, o remotecommand.StreamOptions, err error) {
			if got := o.Stdout.(*bytes.Buffer).Len(); err != nil || got != 1<<20 {
				t.Errorf("%d bytes, %v", got, err)
			}
		})
}

// window is a terminal that is resized once it was told its first size.
type window struct {
	mu    sync.Mutex
	sizes []remotecommand.TerminalSize
}

func (w *window) Next() *remotecommand.TerminalSize {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.sizes) == 0 {
		return nil
	}
	s := w.sizes[0]
	w.sizes = w.sizes[1:]
	return &s
}

func TestExecTerminalSizes(t *testing.T) {
	n := serve(t)
	both(t, n, "web", "size",
		func() remotecommand.StreamOptions {
			return remotecommand.StreamOptions{
				Stdin: strings.NewReader(""), Stdout: &bytes.Buffer{}, Tty: true,
				TerminalSizeQueue: &window{sizes: []remotecommand.TerminalSize{{Width: 80, Height: 24}, {Width: 132, Height: 50}}},
			}
		},
		func(t *testing.T, o remotecommand.StreamOptions, err error) {
			if got := o.Stdout.(*bytes.Buffer).String(); err != nil || got != "80x24;132x50;" {
				t.Errorf("sizes %q, %v", got, err)
			}
		})
}

func TestExecErrorsAreTold(t *testing.T) {
	n := serve(t)
	for _, tc := range []struct{ pod, command, want string }{
		{"web", "broken", "the guest does not answer"},
		{"nobody", "cat", `pod "nobody" not found`},
	} {
		both(t, n, tc.pod, tc.command,
			func() remotecommand.StreamOptions { return remotecommand.StreamOptions{Stdout: &bytes.Buffer{}} },
			func(t *testing.T, _ remotecommand.StreamOptions, err error) {
				if err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("error %v, want %q", err, tc.want)
				}
			})
	}
}

// signal is a writer that tells when something was written.
type signal struct {
	once sync.Once
	c    chan struct{}
}

func (s *signal) Write(p []byte) (int, error) {
	s.once.Do(func() { close(s.c) })
	return len(p), nil
}

func TestExecEndsWithItsClient(t *testing.T) {
	n := serve(t)
	for _, name := range []string{"spdy", "websocket"} {
		t.Run(name, func(t *testing.T) {
			ended := make(chan struct{})
			wait := commands(t)["wait"]
			n.backend.commands["wait"] = func(ctx context.Context, e guest.Exec, s guest.Streams) (int, error) {
				defer close(ended)
				return wait(ctx, e, s)
			}
			out := &signal{c: make(chan struct{})}
			o := remotecommand.StreamOptions{Stdout: out}
			ctx, cancel := context.WithCancel(t.Context())
			returned := make(chan struct{})
			go func() {
				defer close(returned)
				_ = n.executors(t, "web", "wait", o)[name].StreamWithContext(ctx, o)
			}()
			<-out.c
			cancel()
			<-returned
			select {
			case <-ended:
			case <-time.After(10 * time.Second):
				t.Error("the command outlived its client")
			}
		})
	}
}

func entry(stream, data string, second int) guest.LogEntry {
	return guest.LogEntry{Stream: stream, Data: []byte(data), Time: time.Date(2026, 1, 1, 0, 0, second, 5000, time.UTC)}
}

func TestLogs(t *testing.T) {
	n := serve(t)
	n.backend.entries = []guest.LogEntry{entry("stdout", "one\n", 1), entry("stderr", "two ", 2), entry("stderr", "halves\n", 3)}
	for query, want := range map[string]string{
		"":              "one\ntwo halves\n",
		"timestamps=1":  "2026-01-01T00:00:01.000005Z one\n2026-01-01T00:00:02.000005Z two halves\n",
		"limitBytes=6":  "one\ntw",
		"stream=Stderr": "two halves\n",
	} {
		if code, body := n.get(t, "/containerLogs/default/web/c?"+query, token("good")); code != 200 || body != want {
			t.Errorf("%q: %d %q, want %q", query, code, body, want)
		}
	}
	if n.backend.asked.Tail != -1 {
		t.Errorf("no tail was asked for, %d was passed on", n.backend.asked.Tail)
	}
	n.get(t, "/containerLogs/default/web/c?tailLines=0&previous=true&sinceTime=2026-01-01T00:00:00Z", token("good"))
	if o := n.backend.asked; o.Tail != 0 || !o.Previous || o.Since.Year() != 2026 {
		t.Errorf("passed on %+v", o)
	}
	for _, bad := range []string{"tailLines=-1", "tailLines=x", "limitBytes=0", "sinceSeconds=0", "sinceTime=now", "follow=perhaps", "stream=x", "sinceSeconds=1&sinceTime=2026-01-01T00:00:00Z"} {
		if code, body := n.get(t, "/containerLogs/default/web/c?"+bad, token("good")); code != 400 {
			t.Errorf("%s: %d %s", bad, code, body)
		}
	}
	if code, body := n.get(t, "/containerLogs/default/new/c", token("good")); code != 400 || !strings.Contains(body, "ContainerCreating") {
		t.Errorf("a container that waits: %d %s", code, body)
	}
}

func TestLogsFollow(t *testing.T) {
	n := serve(t)
	n.backend.entries = []guest.LogEntry{entry("stdout", "now\n", 1)}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, n.addr+"/containerLogs/default/web/c?follow=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer good")
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: n.pool}}
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	line := make([]byte, 4)
	if _, err := io.ReadFull(resp.Body, line); err != nil || string(line) != "now\n" { // while the guest still runs
		t.Errorf("%q, %v", line, err)
	}
	close(n.backend.hold)
	if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
		t.Errorf("%q, %v", rest, err)
	}
}

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
		t.Errorf("a good pair is there, served %s", got)
	}
	write("second", now.Add(time.Hour), now.Add(-2*time.Minute))
	if got := serial(); got != "second" {
		t.Errorf("the pair was renewed, served %s", got)
	}
	write("old", now.Add(-time.Hour), now.Add(-time.Minute))
	if got := serial(); got != "node-1" {
		t.Errorf("the pair has expired, served %s", got)
	}
}

func TestSubresources(t *testing.T) {
	for path, want := range map[string]string{
		"/pods": "[pods proxy]", "/podsx": "[proxy]", "/exec/a/b/c": "[proxy]", "/metrics/resource": "[metrics]",
		"/stats/summary": "[stats]", "/logs/": "[log]", "/healthz": "[healthz proxy]", "/": "[proxy]",
	} {
		if got := fmt.Sprint(subresources(path)); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
}

func FuzzLogQuery(f *testing.F) {
	f.Add("follow=true&tailLines=5&sinceSeconds=3&timestamps=true&limitBytes=9")
	f.Add("sinceTime=2026-01-01T00:00:00.123456789Z&stream=Stdout")
	f.Add("tailLines=99999999999999999999")
	f.Fuzz(func(t *testing.T, raw string) {
		q, err := url.ParseQuery(raw)
		if err != nil {
			return
		}
		if l, err := parseLogQuery(q, time.Unix(1e9, 0)); err == nil && (l.options.Tail < -1 || l.limit == 0) {
			t.Errorf("%q gave %+v", raw, l)
		}
	})
}
