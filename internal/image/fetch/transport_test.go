package fetch

import (
	"bytes"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/translate"
)

// secure runs an HTTPS server with cert that serves o until the test ends. configure may be nil.
func secure(t *testing.T, cert tls.Certificate, h http.HandlerFunc, configure func(*tls.Config)) string {
	srv := httptest.NewUnstartedServer(h)
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{cert}}
	if configure != nil {
		configure(srv.TLS)
	}
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	srv.StartTLS()
	t.Cleanup(srv.Close)
	return srv.URL
}

func TestStatement24_WithoutAProfileTheDefaultsOfTheSystemCount(t *testing.T) {
	o := &origin{data: content(10)}
	for _, p := range []*translate.Profile{nil, {}, {TLS: &translate.TLS{}}} {
		if _, _, err := get(t, client(t, quick), Request{URL: serve(t, o.ServeHTTP), Profile: p}); err != nil {
			t.Error(err)
		}
		// The system does not trust our authority.
		_, _, err := get(t, client(t, quick), Request{URL: secure(t, newPKI(t).server(t), o.ServeHTTP, nil), Profile: p})
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "add its CA") {
			t.Error(err)
		}
	}
}

func TestStatement26_TimeoutIsForTheWholeRequest(t *testing.T) {
	for name, h := range map[string]http.HandlerFunc{
		"no answer": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		"no end": func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("ETag", `"a"`)
			_, _ = w.Write(content(1000))
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		},
		"busy for ever": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) },
	} {
		opts := quick
		opts.Attempts = 1 << 30
		_, _, err := get(t, client(t, opts), Request{URL: serve(t, h), Profile: &translate.Profile{Timeout: 50 * time.Millisecond}})
		if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "timeout of its transport") {
			t.Errorf("%s: %v", name, err)
		}
	}
	o := &origin{data: content(10)}
	for _, d := range []time.Duration{0, -1, time.Hour} {
		if _, _, err := get(t, client(t, quick), Request{URL: serve(t, o.ServeHTTP), Profile: &translate.Profile{Timeout: d}}); err != nil {
			t.Errorf("timeout %v: %v", d, err)
		}
	}
}

// redirector redirects as often as its path says.
func redirector(o *origin) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.Atoi(strings.Trim(r.URL.Path, "/"))
		if err != nil || n == 0 {
			o.ServeHTTP(w, r)
			return
		}
		o.seen(r)
		http.Redirect(w, r, fmt.Sprintf("/%d", n-1), []int{301, 302, 303, 307, 308}[n%5])
	}
}

func redirectCases(t *testing.T, limit *int, cases map[int]int) {
	for hops, asked := range cases {
		o := &origin{data: content(10)}
		_, _, err := get(t, client(t, quick), Request{
			URL: fmt.Sprintf("%s/%d", serve(t, redirector(o)), hops), Profile: &translate.Profile{MaxRedirects: limit},
		})
		if ok := asked == hops+1; ok != (err == nil) || err != nil && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "maxRedirects")) {
			t.Errorf("%d redirects: %v", hops, err)
		}
		if n := len(o.asked()); n != asked {
			t.Errorf("%d redirects: asked %d times, want %d", hops, n, asked)
		}
	}
}

func TestStatement27_MaxRedirectsIsTheNumberOfRedirects(t *testing.T) {
	zero, one, five := 0, 1, 5
	redirectCases(t, &zero, map[int]int{0: 1, 1: 1})
	redirectCases(t, &one, map[int]int{1: 2, 2: 2})
	redirectCases(t, &five, map[int]int{5: 6, 10: 6})
}

func TestStatement28_WithoutMaxRedirectsNineAreFollowed(t *testing.T) {
	redirectCases(t, nil, map[int]int{9: 10, 10: 10})
}

func TestBadRedirects(t *testing.T) {
	for name, tc := range map[string]struct{ to, words string }{
		"loop":         {"/loop", "form a loop"},
		"other scheme": {"file:///etc/passwd", "neither http nor https"},
		"no host":      {"http:///x", "neither http nor https"},
		"no location":  {"", "invalid URL"},
		"no URL":       {"http://u:hush@%zz/", "invalid URL"},
	} {
		url := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", tc.to)
			w.WriteHeader(http.StatusFound)
		})
		_, err := client(t, quick).Get(t.Context(), Request{URL: url + "/loop"})
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), tc.words) || strings.Contains(err.Error(), "hush") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestARedirectFromHTTPSToHTTPIsRefused(t *testing.T) {
	o := &origin{data: content(10)}
	plain := serve(t, o.ServeHTTP)
	ca := newPKI(t)
	url := secure(t, ca.server(t), func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, plain, http.StatusFound) }, nil)
	_, err := client(t, quick).Get(t.Context(), Request{URL: url, Profile: trusting(ca)})
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "from https to plain http") || len(o.asked()) != 0 {
		t.Error(err)
	}
}

// proxy is a forward proxy. It sends requests in absolute form to target, whatever their host, and its tunnels go there, too.
type proxy struct {
	origin
	target string // host:port of all destinations
	status int    // status of its refusal, if it refuses
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.seen(r)
	switch {
	case p.status != 0:
		w.WriteHeader(p.status)
	case r.Method == http.MethodConnect:
		up, err := net.Dial("tcp", p.target)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		w.WriteHeader(http.StatusOK)
		down, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		go func() { _, _ = io.Copy(up, down); _ = up.(*net.TCPConn).CloseWrite() }()
		_, _ = io.Copy(down, up)
		_ = errors.Join(up.Close(), down.Close())
	default:
		req := r.Clone(r.Context())
		req.URL.Host, req.RequestURI = p.target, ""
		res, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer res.Body.Close()
		w.WriteHeader(res.StatusCode)
		_, _ = io.Copy(w, res.Body)
	}
}

func hostPort(t *testing.T, raw string) string {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return u.Host
}

func TestStatement29_ProxyOfTheProfileOrOfTheEnvironment(t *testing.T) {
	o := &origin{data: content(1000)}
	ca := newPKI(t)
	plain, tlsURL := serve(t, o.ServeHTTP), secure(t, ca.server(t), o.ServeHTTP, nil)
	for _, tc := range []struct {
		name, profile, env string
	}{
		{"profile", "http://user:hush@%s", "http://192.0.2.1:1"}, // the environment's proxy would not work
		{"profile without scheme", "%s", ""},
		{"environment", "", "http://%s"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := &proxy{target: hostPort(t, plain)}
			addr := hostPort(t, serve(t, p.ServeHTTP))
			at := func(s string) string { return strings.Replace(s, "%s", addr, 1) }
			for _, v := range []string{"HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"} {
				t.Setenv(v, at(tc.env))
			}
			t.Setenv("NO_PROXY", "")
			t.Setenv("no_proxy", "")
			c := client(t, quick)
			profile := trusting(ca)
			profile.Proxy = at(tc.profile)
			got, _, err := get(t, c, Request{URL: "http://images.example.com/a.img", Profile: profile})
			if err != nil || !bytes.Equal(got, o.data) {
				t.Fatal(err)
			}
			if r := p.asked()[0]; r.RequestURI != "http://images.example.com/a.img" {
				t.Errorf("the proxy was asked for %q, not in absolute form", r.RequestURI)
			} else if auth := r.Header.Get("Proxy-Authorization"); (auth != "") != strings.Contains(tc.profile, "@") {
				t.Errorf("the proxy was told %q", auth)
			}
			p.target = hostPort(t, tlsURL)
			got, _, err = get(t, c, Request{URL: "https://example.com/a.img", Profile: profile})
			if err != nil || !bytes.Equal(got, o.data) {
				t.Fatal(err)
			}
			if r := p.asked()[1]; r.Method != http.MethodConnect || r.RequestURI != "example.com:443" {
				t.Errorf("the proxy was asked to %s %s", r.Method, r.RequestURI)
			}
			for status, class := range map[int]errdefs.Class{407: errdefs.FailedPrecondition, 403: errdefs.FailedPrecondition, 502: errdefs.Unavailable} {
				p.status = status
				for _, u := range []string{"http://other.example.com", "https://other.example.com"} {
					_, _, err := get(t, c, Request{URL: u, Profile: profile})
					if !errdefs.Is(err, class) || strings.Contains(err.Error(), "hush") {
						t.Errorf("proxy answers %d to %s: %v", status, u, err)
					}
				}
			}
		})
	}
}

func TestABrokenProxyInTheEnvironmentIsNotRepeated(t *testing.T) {
	t.Setenv("HTTP_PROXY", "http://user:hush@%zz")
	t.Setenv("http_proxy", "http://user:hush@%zz")
	_, err := client(t, quick).Get(t.Context(), Request{URL: "http://images.example.com"})
	if err == nil || strings.Contains(err.Error(), "hush") {
		t.Error(err)
	}
}

func TestStatement30_TimesOfConnecting(t *testing.T) {
	c := client(t, Options{})
	tr, err := c.transport(nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.opts.Dial != 30*time.Second || tr.TLSHandshakeTimeout != 10*time.Second || c.opts.Stall != 30*time.Second {
		t.Errorf("dial %v, handshake %v, stall %v", c.opts.Dial, tr.TLSHandshakeTimeout, c.opts.Stall)
	}
}

func TestStatement31_AuthoritiesAreAddedAndKeysMakeClientCertificates(t *testing.T) {
	ca, stranger := newPKI(t), newPKI(t)
	o := &origin{data: content(10)}
	url := secure(t, ca.server(t), o.ServeHTTP, nil)
	client1 := ca.leaf(t, "client")
	both := &translate.Profile{TLS: &translate.TLS{Certificates: []translate.Certificate{
		{Cert: stranger.rootPEM()}, {Cert: ca.rootPEM()}, {Cert: client1.certPEM()}, // without a key: useless but harmless
	}}}
	if _, _, err := get(t, client(t, quick), Request{URL: url, Profile: both}); err != nil {
		t.Error(err)
	}
	cfg, err := client(t, quick).tlsConfig(both.TLS)
	if err != nil || len(cfg.Certificates) != 0 {
		t.Errorf("%d client certificates, %v", len(cfg.Certificates), err)
	}
	if system := systemPool(); cfg.RootCAs.Equal(system) {
		t.Error("nothing was added to the authorities of the system")
	} else if system.AddCert(stranger.root.cert); true {
		if system.AddCert(ca.root.cert); !cfg.RootCAs.Equal(system) {
			t.Error("the authorities are not those of the system and ours")
		}
	}
	cfg, err = client(t, quick).tlsConfig(&translate.TLS{Certificates: []translate.Certificate{{Cert: client1.certPEM(), Key: client1.keyPEM(t, "pkcs8")}}})
	if err != nil || len(cfg.Certificates) != 1 || cfg.RootCAs != nil {
		t.Errorf("%+v, %v", cfg, err)
	}
	if _, err := client(t, quick).tlsConfig(&translate.TLS{Certificates: []translate.Certificate{{Cert: client1.certPEM(), Key: stranger.leaf(t, "x").keyPEM(t, "pkcs8")}}}); !errdefs.IsInvalid(err) {
		t.Errorf("a key of another certificate: %v", err)
	}
}

func TestStatement32_KeysOfAnyFormAreFoundInKeyAndThenInCert(t *testing.T) {
	ca := newPKI(t)
	garbage := string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("hush")}))
	badCert := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("hush")}))
	ec, rsaLeaf := ca.leaf(t, "ec"), ca.rsaLeaf(t, "rsa")
	other := ca.leaf(t, "other").keyPEM(t, "pkcs8")
	for _, tc := range []struct {
		name string
		pair translate.Certificate
		leaf *entity
		logs int
	}{
		{"PKCS #8 EC", translate.Certificate{Cert: ec.certPEM(), Key: ec.keyPEM(t, "pkcs8")}, ec, 0},
		{"SEC 1 EC", translate.Certificate{Cert: ec.certPEM(), Key: ec.keyPEM(t, "sec1")}, ec, 0},
		{"PKCS #8 RSA", translate.Certificate{Cert: rsaLeaf.certPEM(), Key: rsaLeaf.keyPEM(t, "pkcs8")}, rsaLeaf, 0},
		{"PKCS #1 RSA", translate.Certificate{Cert: rsaLeaf.certPEM(), Key: rsaLeaf.keyPEM(t, "pkcs1")}, rsaLeaf, 0},
		{"in cert", translate.Certificate{Cert: ec.keyPEM(t, "sec1") + ec.certPEM()}, ec, 0},
		{"key before cert", translate.Certificate{Cert: ec.certPEM() + other, Key: ec.keyPEM(t, "sec1")}, ec, 0},
		{"the first one", translate.Certificate{Cert: ec.certPEM(), Key: ec.keyPEM(t, "sec1") + other}, ec, 0},
		{"after a broken one", translate.Certificate{Cert: badCert + ec.certPEM(), Key: garbage + ec.keyPEM(t, "sec1")}, ec, 2},
		{"in cert, after only a broken one", translate.Certificate{Cert: ec.certPEM() + ec.keyPEM(t, "sec1"), Key: garbage}, ec, 1},
		{"after no PEM at all", translate.Certificate{Cert: ec.certPEM() + ec.keyPEM(t, "sec1"), Key: "hush"}, ec, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var log bytes.Buffer
			opts := quick
			opts.Log = slog.New(slog.NewTextHandler(&log, nil))
			cfg, err := client(t, opts).tlsConfig(&translate.TLS{Certificates: []translate.Certificate{tc.pair}})
			if err != nil || len(cfg.Certificates) != 1 || !cfg.Certificates[0].Leaf.Equal(tc.leaf.cert) {
				t.Fatalf("%d certificates, %v", len(cfg.Certificates), err)
			}
			if n := strings.Count(log.String(), "part of a certificate ignored"); n != tc.logs || strings.Contains(log.String(), "hush") {
				t.Errorf("%d lines:\n%s", n, log.String())
			}
		})
	}
}

// demanding runs an HTTPS server that requires a client certificate of ca and knows only its root.
func demanding(t *testing.T, ca *pki, o *origin) string {
	return secure(t, ca.server(t), o.ServeHTTP, func(cfg *tls.Config) {
		cfg.ClientAuth, cfg.ClientCAs = tls.RequireAndVerifyClientCert, ca.pool()
	})
}

func TestStatement33_ClientCertificatesAreSentAsAChain(t *testing.T) {
	ca := newPKI(t)
	o := &origin{data: content(10)}
	url := demanding(t, ca, o)
	leaf := ca.under(t, ca.intermediate, "client")
	for name, cert := range map[string]string{
		"leaf first": leaf.certPEM() + ca.intermediate.certPEM() + ca.rootPEM(),
		"leaf last":  ca.rootPEM() + ca.intermediate.certPEM() + leaf.certPEM(),
	} {
		p := trusting(ca)
		p.TLS.Certificates = append(p.TLS.Certificates, translate.Certificate{Cert: cert, Key: leaf.keyPEM(t, "pkcs8")})
		if _, _, err := get(t, client(t, quick), Request{URL: url, Profile: p}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, r := range o.asked() {
			if n := len(r.TLS.PeerCertificates); n != 2 || r.TLS.PeerCertificates[0].Subject.CommonName != "client" {
				t.Errorf("%s: %d certificates were sent", name, n)
			}
		}
	}
	for name, p := range map[string]*translate.Profile{
		"without": trusting(ca),
		"without the intermediate": {TLS: &translate.TLS{Certificates: []translate.Certificate{
			{Cert: ca.rootPEM()}, {Cert: leaf.certPEM(), Key: leaf.keyPEM(t, "sec1")},
		}}},
	} {
		_, _, err := get(t, client(t, quick), Request{URL: url, Profile: p})
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "client certificate") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestStatement34_ServerNameAndInsecure(t *testing.T) {
	ca := newPKI(t)
	o := &origin{data: content(10)}
	url := secure(t, ca.named(t, "images.example.org"), o.ServeHTTP, nil) // not valid for 127.0.0.1
	if _, _, err := get(t, client(t, quick), Request{URL: url, Profile: trusting(ca)}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "serverName") {
		t.Errorf("another name: %v", err)
	}
	p := trusting(ca)
	p.TLS.ServerName = "images.example.org"
	if _, _, err := get(t, client(t, quick), Request{URL: url, Profile: p}); err != nil {
		t.Errorf("serverName: %v", err)
	}
	if sni := o.asked()[0].TLS.ServerName; sni != "images.example.org" {
		t.Errorf("the server was called %q", sni)
	}
	if _, _, err := get(t, client(t, quick), Request{URL: url, Profile: &translate.Profile{TLS: &translate.TLS{Insecure: true}}}); err != nil {
		t.Errorf("insecure: %v", err)
	}
}

func TestAnExpiredCertificateIsNamed(t *testing.T) {
	ca := newPKI(t)
	o := &origin{}
	for words, cert := range map[string]tls.Certificate{
		"expired on 2001-02-03": ca.valid(t, time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2001, 2, 3, 0, 0, 0, 0, time.UTC)),
		"not valid before 2199": ca.valid(t, time.Date(2199, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC)),
	} {
		_, _, err := get(t, client(t, quick), Request{URL: secure(t, cert, o.ServeHTTP, nil), Profile: trusting(ca)})
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), words) || strings.Contains(err.Error(), "tried") {
			t.Error(err)
		}
	}
}

func TestStatement25_TransportsAreSharedByWhatTheySayOnly(t *testing.T) {
	c := client(t, quick)
	one, err1 := c.transport(&translate.Profile{Proxy: "http://a", Timeout: 1})
	same, err2 := c.transport(&translate.Profile{Proxy: "http://a", Timeout: 2})
	other, err3 := c.transport(&translate.Profile{Proxy: "http://b"})
	if err := errors.Join(err1, err2, err3); err != nil || one != same || one == other {
		t.Errorf("%p %p %p, %v", one, same, other, err)
	}
	for i := range 3 * maxTransports {
		if _, err := c.transport(&translate.Profile{Proxy: fmt.Sprintf("http://p%d", i)}); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(c.transports); n > maxTransports {
		t.Errorf("%d transports are kept", n)
	}
}

func TestConnectionsAreReused(t *testing.T) {
	o := &origin{data: content(1 << 20)}
	c, url := client(t, quick), serve(t, o.ServeHTTP)
	ports := map[string]bool{}
	for range 4 {
		if _, _, err := get(t, c, Request{URL: url}); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range o.asked() {
		ports[r.RemoteAddr] = true
	}
	if len(ports) != 1 {
		t.Errorf("%d connections for four fetches", len(ports))
	}
}
