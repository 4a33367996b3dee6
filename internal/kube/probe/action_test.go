package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/probing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// site starts a test server and returns its port and scheme.
func site(t *testing.T, secure bool) (port int, scheme corev1.URIScheme) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/ok", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s|%s|%s|%s|%s", r.Host, r.UserAgent(), r.Header.Get("Accept"), r.Header["X"], r.URL.RawQuery)
	})
	mux.HandleFunc("/bad", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "secret", http.StatusTeapot) })
	mux.Handle("/here", http.RedirectHandler("/ok", http.StatusFound))
	mux.Handle("/there", http.RedirectHandler("http://192.0.2.1/", http.StatusFound))
	mux.Handle("/round", http.RedirectHandler("/round", http.StatusFound))
	mux.HandleFunc("/slow", func(_ http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		panic(http.ErrAbortHandler) // no answer: it could reach the client that is hanging up
	})
	var s *httptest.Server
	if secure {
		s, scheme = httptest.NewTLSServer(mux), corev1.URISchemeHTTPS
	} else {
		s = httptest.NewServer(mux)
	}
	t.Cleanup(s.Close)
	return s.Listener.Addr().(*net.TCPAddr).Port, scheme
}

func TestHTTPGet(t *testing.T) {
	for _, secure := range []bool{false, true} {
		port, scheme := site(t, secure)
		target := Target{IP: "127.0.0.1", Container: &corev1.Container{Name: "c", Ports: []corev1.ContainerPort{{Name: "web", ContainerPort: int32(port)}}}}
		for name, tc := range map[string]struct {
			path   string
			change func(*corev1.HTTPGetAction)
			want   probing.Result
			why    string
		}{
			"ok": {path: "/ok?a=b", want: probing.Success, why: fmt.Sprintf("127.0.0.1:%d|kube-probe/1.37|*/*|[]|a=b", port)},
			"headers": {path: "/ok", change: func(a *corev1.HTTPGetAction) {
				a.HTTPHeaders = []corev1.HTTPHeader{{Name: "X", Value: "1"}, {Name: "x", Value: "2"}, {Name: "Host", Value: "example"}, {Name: "User-Agent", Value: "me"}, {Name: "Accept", Value: ""}}
			}, want: probing.Success, why: "example|me||[1 2]|"},
			"named port":     {path: "/ok", change: func(a *corev1.HTTPGetAction) { a.Port = intstr.FromString("web") }, want: probing.Success},
			"host":           {path: "/ok", change: func(a *corev1.HTTPGetAction) { a.Host = "127.0.0.2" }, want: probing.Failure, why: "the node's loopback"},
			"status":         {path: "/bad", want: probing.Failure, why: "HTTP probe failed with statuscode: 418"},
			"redirect here":  {path: "/here", want: probing.Success},
			"redirect there": {path: "/there", want: probing.Warning, why: "Probe terminated redirects"},
			"redirect round": {path: "/round", want: probing.Failure, why: "stopped after 10 redirects"},
			"timeout":        {path: "/slow", want: probing.Failure, why: "context deadline exceeded"},
			"no such port":   {path: "/ok", change: func(a *corev1.HTTPGetAction) { a.Port = intstr.FromString("db") }, want: probing.Unknown, why: `container "c" has no port db`},
			"invalid path":   {path: "%zz", want: probing.Failure, why: ""},
		} {
			a := &corev1.HTTPGetAction{Path: tc.path, Port: intstr.FromInt(port), Scheme: scheme}
			if tc.change != nil {
				tc.change(a)
			}
			got, why, err := target.Probe(t.Context(), &corev1.Probe{TimeoutSeconds: 1, ProbeHandler: corev1.ProbeHandler{HTTPGet: a}})
			if err != nil {
				why = err.Error()
			}
			if got != tc.want || !strings.Contains(why, tc.why) || strings.Contains(why, "secret") {
				t.Errorf("%s, TLS %v: %d %q, want %d %q", name, secure, got, why, tc.want, tc.why)
			}
		}
		if err := target.Hook(t.Context(), &corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/bad", Port: intstr.FromInt(port), Scheme: corev1.URISchemeHTTPS}}); err != nil {
			t.Errorf("hook, TLS %v: %v", secure, err) // any answer counts as success, also over plain HTTP
		}
	}
	unknown := Target{Container: &corev1.Container{}}
	if got, _, err := unknown.Probe(t.Context(), &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt(80)}}}); got != probing.Unknown || err == nil {
		t.Errorf("without an address: %d %v", got, err)
	}
}

func TestTCPSocket(t *testing.T) {
	port, _ := site(t, false)
	target := Target{IP: "127.0.0.1", Container: &corev1.Container{}}
	try := func(host string) (probing.Result, string) {
		got, why, err := target.Probe(t.Context(), &corev1.Probe{TimeoutSeconds: 1, ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Host: host, Port: intstr.FromInt(port)}}})
		if err != nil {
			t.Error(err)
		}
		return got, why
	}
	if got, why := try(""); got != probing.Success {
		t.Errorf("%d %q", got, why)
	}
	if got, why := try("127.0.0.2"); got != probing.Failure || !strings.Contains(why, "the node's loopback") {
		t.Errorf("%d %q", got, why)
	}
}

func TestGRPC(t *testing.T) {
	serve := func(register func(*grpc.Server)) int32 {
		l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // a server of this test
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		register(s)
		go func() { _ = s.Serve(l) }()
		t.Cleanup(s.Stop)
		return int32(l.Addr().(*net.TCPAddr).Port)
	}
	h := health.NewServer()
	h.SetServingStatus("db", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	healthy := serve(func(s *grpc.Server) { grpc_health_v1.RegisterHealthServer(s, h) })
	silent := serve(func(*grpc.Server) {})
	target := Target{IP: "127.0.0.1", Container: &corev1.Container{}}
	for name, tc := range map[string]struct {
		port    int32
		service string
		want    probing.Result
		why     string
	}{
		"serving":     {healthy, "", probing.Success, ""},
		"not serving": {healthy, "db", probing.Failure, `service unhealthy (responded with "NOT_SERVING")`},
		"no service":  {healthy, "cache", probing.Failure, "health rpc probe failed"},
		"no protocol": {silent, "", probing.Failure, "does not implement the grpc health protocol"},
		"no listener": {1, "", probing.Failure, "error: health rpc probe failed"},
	} {
		got, why, err := target.Probe(t.Context(), &corev1.Probe{TimeoutSeconds: 2, ProbeHandler: corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: tc.port, Service: &tc.service}}})
		if err != nil || got != tc.want || !strings.Contains(why, tc.why) {
			t.Errorf("%s: %d %q %v", name, got, why, err)
		}
	}
}

func TestExec(t *testing.T) {
	away := errors.New("the agent is unavailable")
	for name, tc := range map[string]struct {
		exec Exec
		want probing.Result
		why  string
		err  error
	}{
		"success": {func(context.Context, []string) (string, int, error) { return "fine", 0, nil }, probing.Success, "fine", nil},
		"failure": {func(context.Context, []string) (string, int, error) { return "ill", 2, nil }, probing.Failure, "ill", nil},
		"timeout": {func(ctx context.Context, _ []string) (string, int, error) { <-ctx.Done(); return "", 0, ctx.Err() }, probing.Failure, `command timed out: "a b" timed out after 1s`, nil},
		"away":    {func(context.Context, []string) (string, int, error) { return "", 0, away }, probing.Unknown, "", away},
	} {
		target := Target{Exec: tc.exec}
		got, why, err := target.Probe(t.Context(), &corev1.Probe{TimeoutSeconds: 1, ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"a", "b"}}}})
		if got != tc.want || why != tc.why || !errors.Is(err, tc.err) {
			t.Errorf("%s: %d %q %v", name, got, why, err)
		}
		hooked, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		if err := target.Hook(hooked, &corev1.LifecycleHandler{Exec: &corev1.ExecAction{}}); (err == nil) != (tc.want == probing.Success) {
			t.Errorf("%s as a hook: %v", name, err)
		}
		cancel()
	}
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := (Target{}).Hook(short, &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 60}}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("sleep: %v", err)
	}
	if err := (Target{}).Hook(t.Context(), &corev1.LifecycleHandler{TCPSocket: &corev1.TCPSocketAction{}}); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("by tcpSocket: %v", err)
	}
	if err := (Target{}).Hook(t.Context(), &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{}}); err != nil {
		t.Errorf("no sleep: %v", err)
	}
}
