package kubelet

import (
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
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	authn "k8s.io/api/authentication/v1"
	authz "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// guests is a Backend with commands written in Go.
type guests struct {
	commands map[string]func(ctx context.Context, e guest.Exec, s guest.Streams) (int, error)
	entries  []guest.LogEntry
	asked    guest.LogOptions
	hold     chan struct{} // following logs lasts until it is closed
	server   string        // the target of Forward
	attach   func(ctx context.Context, container string, s guest.Streams) error
	screen   io.ReadWriteCloser
	shown    chan string // what Display was asked
}

func (g *guests) Forward(_ context.Context, _, pod string, port int, stream io.ReadWriter) error {
	if pod != "web" || port != 80 {
		return errdefs.Unavailablef("no listener on port %d", port)
	}
	c, err := net.Dial("tcp", g.server)
	if err != nil {
		return err
	}
	defer c.Close()
	go func() {
		_, _ = io.Copy(c, stream)
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	_, err = io.Copy(stream, c)
	return err
}

func (g *guests) Attach(ctx context.Context, _, _, container string, _ guest.Attach, s guest.Streams) error {
	return g.attach(ctx, container, s)
}

func (g *guests) GetPods(context.Context) ([]*corev1.Pod, error) {
	p, waits := &corev1.Pod{}, &corev1.Pod{}
	p.Name, waits.Name = "web", "waits"
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
	waits.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}}}
	return []*corev1.Pod{p, waits}, nil
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

// node is a running server with a certificate authority and a fake API server. The API server knows two tokens: "good" has all
// permissions, "weak" has none.
type node struct {
	addr    string
	ca      *x509.Certificate
	key     *ecdsa.PrivateKey
	pool    *x509.CertPool
	backend *guests

	answered int // the last HTTP status that look got
}

func serve(t *testing.T) *node {
	t.Helper()
	n := &node{backend: &guests{commands: commands(t), hold: make(chan struct{}), shown: make(chan string, 10)}}
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

// client returns a client certificate for user, signed by the cluster's authority or, if stranger is set, by another one.
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

// reviewer returns a client of a fake API server that answers only TokenReviews and SubjectAccessReviews.
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
		{"no credentials", "/pods", nil, 401},
		{"no credentials", "/healthz", nil, 401},
		{"an unknown token", "/pods", token("bad"), 401},
		{"a token without permissions", "/pods", token("weak"), 403},
		{"a good token", "/pods", token("good"), 200},
		{"a good certificate", "/pods", cert("good", false), 200},
		{"a certificate without permissions", "/healthz", cert("weak", false), 403},
		{"a certificate of another authority", "/pods", cert("good", true), 401},
		{"fine-grained permission", "/pods", cert("lister", false), 200},
		{"fine-grained permission, another path", "/containerLogs/default/web/c", cert("lister", false), 403},
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

func TestListsOfPods(t *testing.T) {
	n := serve(t)
	for path, want := range map[string]string{"/pods": "web waits", "/runningpods": "web", "/runningpods/": "web"} {
		var list corev1.PodList
		code, body := n.get(t, path, token("good"))
		if err := json.Unmarshal([]byte(body), &list); code != 200 || err != nil {
			t.Fatalf("%s: %d %v", path, code, err)
		}
		var names []string
		for _, p := range list.Items {
			names = append(names, p.Name)
		}
		if got := strings.Join(names, " "); got != want || list.Kind != "PodList" {
			t.Errorf("%s: %s of %q, want %q", path, list.Kind, got, want)
		}
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
