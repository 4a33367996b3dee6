package aggregated

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
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
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	authv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	authorizationv1 "k8s.io/client-go/kubernetes/typed/authorization/v1"
	"k8s.io/client-go/rest"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	fakeclient "sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

const prefix = "/apis/subresources.kubevirt.io/v1/namespaces/default/"

// authority issues certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T, name string) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	of := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, of, of, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{t, cert, key}
}

func (a *authority) pem() string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw}))
}

func (a *authority) issue(name string) *tls.Certificate {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	of := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, of, a.cert, key.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// rig is a server with an API server of objects in memory, and guests in memory.
type rig struct {
	t       *testing.T
	addr    string
	client  client.Client
	guests  *fakeGuests
	uploads *fakeUploads
	server  *Server
	metrics *prometheus.Registry
	proxy   *tls.Certificate // of the API server's proxy
	other   *tls.Certificate // of the same authority, with a name that is not allowed
	foreign *tls.Certificate // of another authority
	stop    func()

	mu      sync.Mutex
	reviews []authv1.SubjectAccessReviewSpec
	graces  []string // of deletions, in seconds
	hooks   interceptor.Funcs
}

func (r *rig) grace() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.graces, ",")
}

func start(t *testing.T, objects ...client.Object) *rig {
	t.Helper()
	front := newAuthority(t, "front")
	r := &rig{t: t, guests: &fakeGuests{}, uploads: &fakeUploads{}, proxy: front.issue("front-proxy-client"), other: front.issue("kubelet"), foreign: newAuthority(t, "cluster").issue("front-proxy-client")}
	kube := fake.NewClientset(&corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: proxyConfiguration},
		Data: map[string]string{
			"requestheader-client-ca-file": front.pem(), "requestheader-allowed-names": `["front-proxy-client"]`,
			"requestheader-username-headers": `["X-Remote-User"]`, "requestheader-group-headers": `["X-Remote-Group"]`,
			"requestheader-extra-headers-prefix": `["X-Remote-Extra-"]`,
		},
	})
	a, err := newFrontProxy(kube, r.cluster())
	if err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), kubevirt.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	r.client = fakeclient.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&v1.VirtualMachine{}).WithObjects(objects...).
		WithInterceptorFuncs(interceptor.Funcs{
			Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
				if r.hooks.Get != nil {
					return r.hooks.Get(ctx, c, key, o, opts...)
				}
				return c.Get(ctx, key, o, opts...)
			},
			Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
				if r.hooks.Patch != nil {
					return r.hooks.Patch(ctx, c, o, p, opts...)
				}
				return c.Patch(ctx, o, p, opts...)
			},
			Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
				var of client.DeleteOptions
				of.ApplyOptions(opts)
				if len(of.DryRun) == 0 && of.GracePeriodSeconds != nil {
					r.mu.Lock()
					r.graces = append(r.graces, fmt.Sprint(*of.GracePeriodSeconds))
					r.mu.Unlock()
				}
				return c.Delete(ctx, o, opts...)
			},
		}).Build()
	r.metrics = prometheus.NewRegistry()
	serving := front.issue("manager")
	r.server = newServer(Options{Certificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return serving, nil }, Client: r.client, Uploads: r.uploads, Metrics: NewMetrics(r.metrics), Log: slog.New(slog.DiscardHandler)}, a, r.guests)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = l.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { a.run(ctx) })
	all.Go(func() {
		if err := r.server.serve(ctx, l); err != nil {
			t.Error(err)
		}
	})
	r.stop = sync.OnceFunc(func() { cancel(); all.Wait() })
	t.Cleanup(r.stop)
	eventually(t, "the certificates of the proxy are known", func() bool { return r.server.Ready() == nil })
	return r
}

// cluster answers SubjectAccessReviews: alice may do everything.
func (r *rig) cluster() authorizationv1.AuthorizationV1Interface {
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		var review authv1.SubjectAccessReview
		if err := json.NewDecoder(req.Body).Decode(&review); err != nil || review.Spec.User == "broken" {
			http.Error(w, "no answer", http.StatusBadRequest)
			return
		}
		r.mu.Lock()
		r.reviews = append(r.reviews, review.Spec)
		r.mu.Unlock()
		review.Kind, review.APIVersion = "SubjectAccessReview", "authorization.k8s.io/v1"
		review.Status.Allowed = review.Spec.User == "alice"
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(review)
	}))
	r.t.Cleanup(api.Close)
	config := &rest.Config{Host: api.URL, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json"}}
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		r.t.Fatal(err)
	}
	return kube.AuthorizationV1()
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(10 * time.Second)
	for !holds() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("timed out: %s", what)
		}
	}
}

// call is one request.
type call struct {
	method, path, body string
	user               string // "": alice; "-": none
	cert               *tls.Certificate
	header             http.Header
}

// whole reports whether the answer to a request reaches its end.
func (r *rig) whole(path string) bool {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodGet, "https://"+r.addr+path, http.NoBody)
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("X-Remote-User", "alice")
	tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{*r.proxy}}, DisableKeepAlives: true}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err == nil
}

func (r *rig) do(c call) (code int, body string, header http.Header) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), c.method, "https://"+r.addr, strings.NewReader(c.body))
	if err != nil {
		r.t.Fatal(err)
	}
	req.URL.Opaque = "//" + r.addr + c.path // exactly as written
	for k, v := range c.header {
		req.Header[k] = v
	}
	if c.user != "-" {
		req.Header.Set("X-Remote-User", cmpOr(c.user, "alice"))
		req.Header.Set("X-Remote-Group", "system:authenticated")
	}
	config := &tls.Config{InsecureSkipVerify: true}
	if c.cert != nil {
		config.Certificates = []tls.Certificate{*c.cert}
	}
	tr := &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	all, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.StatusCode, string(all), resp.Header
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// put is a PUT of alice; the answer is "CODE MESSAGE".
func (r *rig) put(path, body string) string {
	r.t.Helper()
	code, text, _ := r.do(call{method: http.MethodPut, path: prefix + path, body: body, cert: r.proxy})
	return strings.TrimSpace(fmt.Sprint(code, " ", message(text)))
}

func (r *rig) vm() *v1.VirtualMachine {
	r.t.Helper()
	vm := &v1.VirtualMachine{}
	if err := r.client.Get(r.t.Context(), types.NamespacedName{Namespace: "default", Name: "web"}, vm); err != nil {
		r.t.Fatal(err)
	}
	return vm
}

// A frame is one message of a websocket. kind is its opcode.
type frame struct {
	kind byte
	data string
}

const (
	binaryFrame = 2
	closeFrame  = 8
	pingFrame   = 9
)

// wire is the client's end of a websocket.
type wire struct {
	net.Conn
	in *bufio.Reader
}

// websocket upgrades a request of alice. An answer that is no upgrade is returned as "CODE MESSAGE".
func (r *rig) websocket(path string) (*wire, string) {
	r.t.Helper()
	c, err := tls.Dial("tcp", r.addr, &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{*r.proxy}})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	fmt.Fprintf(c, "GET %s%s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"+
		"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: plain.kubevirt.io\r\nX-Remote-User: alice\r\nX-Remote-Group: a\r\n\r\n", prefix, path)
	w := &wire{c, bufio.NewReader(c)}
	resp, err := http.ReadResponse(w.in, nil) //nolint:bodyclose // the body of an upgrade is the websocket
	if err != nil {
		r.t.Fatal(err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		text, _ := io.ReadAll(resp.Body)
		return nil, fmt.Sprint(resp.StatusCode, " ", message(string(text)))
	}
	if got := resp.Header.Get("Sec-WebSocket-Protocol"); got != "plain.kubevirt.io" {
		r.t.Errorf("the protocol is %q", got)
	}
	return w, ""
}

func (w *wire) send(kind byte, data string) {
	mask := []byte{1, 2, 3, 4}
	head := []byte{0x80 | kind}
	if len(data) < 126 {
		head = append(head, 0x80|byte(len(data)))
	} else {
		head = binary.BigEndian.AppendUint16(append(head, 0x80|126), uint16(len(data)))
	}
	body := []byte(data)
	for i := range body {
		body[i] ^= mask[i%4]
	}
	_, _ = w.Write(slices.Concat(head, mask, body))
}

func (w *wire) receive() (frame, error) {
	var head [2]byte
	if _, err := io.ReadFull(w.in, head[:]); err != nil {
		return frame{}, err
	}
	length := int64(head[1] & 0x7f)
	switch length {
	case 126:
		var l [2]byte
		_, _ = io.ReadFull(w.in, l[:])
		length = int64(binary.BigEndian.Uint16(l[:]))
	case 127:
		var l [8]byte
		_, _ = io.ReadFull(w.in, l[:])
		length = int64(binary.BigEndian.Uint64(l[:]))
	}
	data := make([]byte, length)
	_, err := io.ReadFull(w.in, data)
	return frame{head[0] & 0xf, string(data)}, err
}

// expect reads until the data of binary frames is want.
func (w *wire) expect(t *testing.T, want string) {
	t.Helper()
	got := ""
	for len(got) < len(want) {
		f, err := w.receive()
		if err != nil || f.kind == closeFrame {
			t.Fatalf("%q, then %v %v", got, f, err)
		}
		if f.kind == binaryFrame {
			got += f.data
		}
	}
	if got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// end reads the close frame and returns its code and reason.
func (w *wire) end(t *testing.T) (code uint16, reason string) {
	t.Helper()
	for {
		f, err := w.receive()
		if err != nil {
			t.Fatal(err)
		}
		if f.kind == closeFrame {
			return binary.BigEndian.Uint16([]byte(f.data)), f.data[2:]
		}
	}
}
