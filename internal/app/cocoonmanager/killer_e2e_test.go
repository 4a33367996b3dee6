//go:build e2e

package cocoonmanager_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// killer is a proxy between a manager and the API server. After each write of the manager, and before the response
// reaches it, the manager is killed and another one started. So the next steps are those of a manager that does not
// know of the write.
type killer struct {
	server  *httptest.Server
	manager *process
	fail    func(format string, args ...any)
	gone    atomic.Bool // the API server does not answer

	mu    sync.Mutex
	off   bool
	kills map[string]int // by the kind of write
	limit int            // of all kills, until the test comes further
}

func newKiller(t *testing.T, config *rest.Config) *killer {
	t.Helper()
	k := &killer{kills: map[string]int{}, limit: mostKills, fail: t.Errorf}
	proxy := proxyTo(t, config)
	proxy.ModifyResponse = func(r *http.Response) error { k.wrote(r.Request, r.StatusCode); return nil }
	proxy.ErrorHandler = func(w http.ResponseWriter, r *http.Request, err error) {
		if r.Context().Err() == nil && !k.gone.Load() { // its manager is alive
			t.Errorf("%s %s: %v", r.Method, r.URL, err)
		}
		w.WriteHeader(http.StatusBadGateway)
	}
	k.server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if k.gone.Load() {
			panic(http.ErrAbortHandler) // closes the connection
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(k.server.Close)
	return k
}

// proxyTo returns a proxy to an API server. Requests keep their credentials.
func proxyTo(t *testing.T, config *rest.Config) *httputil.ReverseProxy {
	t.Helper()
	transport, err := rest.TransportFor(&rest.Config{Host: config.Host, TLSClientConfig: rest.TLSClientConfig{CAData: config.CAData}})
	if err != nil {
		t.Fatal(err)
	}
	target, err := url.Parse(config.Host)
	if err != nil {
		t.Fatal(err)
	}
	return &httputil.ReverseProxy{
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport: outliving{transport}, FlushInterval: -1,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
	}
}

// absence is how long the API server does not answer, unless COCOON_AWAY says it.
const absence = 15 * time.Second

// away lets the manager find no API server while run runs, and for some time after it. A manager that was just starting has ended then, and is started
// again, as what runs managers does.
func (k *killer) away(t *testing.T, run func()) {
	t.Helper()
	long := absence
	if text := os.Getenv("COCOON_AWAY"); text != "" {
		var err error
		if long, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	k.gone.Store(true)
	k.server.CloseClientConnections()
	run()
	<-time.After(long)
	k.gone.Store(false)
	if k.manager.over() {
		k.manager.start(t)
	}
}

// outliving finishes writes whose manager is killed meanwhile because of another write: the API server may have
// accepted them, which is the case that the test is about.
type outliving struct{ http.RoundTripper }

func (o outliving) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet {
		return o.RoundTripper.RoundTrip(r)
	}
	response, err := o.RoundTripper.RoundTrip(r.WithContext(context.WithoutCancel(r.Context())))
	if response != nil {
		response.Request = r
	}
	return response, err
}

// mostKills stops the endless restart of a manager that makes no progress: it is for one part of a test.
const mostKills = 200

func (k *killer) wrote(r *http.Request, code int) {
	what := r.Method + " " + resource(r.URL.Path)
	if r.Method == http.MethodGet || code >= http.StatusBadRequest || strings.HasSuffix(what, " events") || strings.HasSuffix(what, "subjectaccessreviews") {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.off {
		return
	}
	if k.kills[what]++; k.total() > k.limit {
		k.off = true
		k.fail("the manager was killed %d times and does not come to an end: %v", k.limit, k.kills)
		return
	}
	if r.Context().Err() != nil { // its manager is dead already
		return
	}
	k.manager.kill()
	if err := k.manager.run(); err != nil {
		k.fail("start the next manager: %v", err)
	}
}

// total counts the kills. Preconditions: mu is held.
func (k *killer) total() int {
	n := 0
	for _, m := range k.kills {
		n += m
	}
	return n
}

// part runs the next part of a test. Its manager, too, is killed mostKills times at most.
func (k *killer) part(run func()) {
	k.mu.Lock()
	k.limit = k.total() + mostKills
	k.mu.Unlock()
	run()
}

// stop lets the manager live, and returns the kills so far.
func (k *killer) stop() map[string]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.off = true
	return k.kills
}

// resource is the resource of an API path, with its subresource and without names.
func resource(path string) string {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	if len(parts) > 2 && parts[0] == "apis" {
		parts = parts[3:]
	} else if len(parts) > 1 {
		parts = parts[2:]
	}
	if len(parts) > 2 && parts[0] == "namespaces" {
		parts = parts[2:]
	}
	switch len(parts) {
	case 0: // a path of discovery
		return path
	case 3:
		return parts[0] + "/" + parts[2]
	}
	return parts[0]
}
