package aggregated

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/client-go/rest"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/kube/kubelet"
)

// anyone is the authentication of a node that answers everybody.
type anyone struct{ authorizer.Authorizer }

func (anyone) AuthenticateRequest(*http.Request) (*authenticator.Response, bool, error) {
	return &authenticator.Response{User: &user.DefaultInfo{Name: "apiserver"}}, true, nil
}

func everybody() kubelet.Auth { return anyone{authorizerfactory.NewAlwaysAllowAuthorizer()} }

func (anyone) NodeName() string { return "node" }

// backend is the pods of a node: they echo, in capitals.
type backend struct{ kubelet.Backend }

func (backend) GetPods(context.Context) ([]*corev1.Pod, error) { return nil, nil }

func (backend) Attach(ctx context.Context, namespace, pod, of string, _ guest.Attach, s guest.Streams) error {
	if namespace+"/"+pod+"/"+of != "default/web/compute" {
		return errdefs.NotFoundf("no pod %s/%s with a container %s", namespace, pod, of)
	}
	buf := make([]byte, 100)
	for ctx.Err() == nil {
		n, err := s.Stdin.Read(buf)
		if err != nil || string(buf[:n]) == "poweroff" {
			return nil //nolint:nilerr // the client has left
		}
		if _, err := s.Stdout.Write(bytes.ToUpper(buf[:n])); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func (backend) Display(_ context.Context, namespace, pod, of string, keep bool) (io.ReadWriteCloser, error) {
	switch {
	case namespace+"/"+pod+"/"+of != "default/web/compute":
		return nil, errdefs.NotFoundf("no pod %s/%s with a container %s", namespace, pod, of)
	case keep:
		return nil, errdefs.Conflictf("somebody is connected to its screen")
	}
	near, far := net.Pipe()
	go func() {
		_, _ = far.Write([]byte("RFB "))
		_, _ = io.Copy(far, far)
		far.Close()
	}()
	return near, nil
}

func (backend) Screenshot(_ context.Context, _, pod, _ string, wake bool) ([]byte, error) {
	if pod != "web" {
		return nil, errdefs.Unsupportedf("vm %s has no graphics", pod)
	}
	return fmt.Append(nil, "woken: ", wake), nil
}

func (backend) Forward(_ context.Context, _, _ string, port int, stream io.ReadWriter) error {
	if port != 22 {
		return errdefs.Unavailablef("connect to port %d: connection refused", port)
	}
	all, err := io.ReadAll(stream) // until the client has closed its side
	if err != nil {
		return err
	}
	_, err = stream.Write(bytes.ToUpper(all))
	return err
}

// apiServer passes attach and port-forward of pods on to a kubelet API, without its authorization.
func apiServer(t *testing.T, sockets bool) *rest.Config {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	node, err := kubelet.New(kubelet.Config{
		Addr: "127.0.0.1:0", TLS: &tls.Config{Certificates: []tls.Certificate{*newAuthority(t, "node").issue("node")}}, Auth: everybody(), Backend: backend{}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() {
		if err := node.Run(ctx, l); err != nil {
			t.Error(err)
		}
	})
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host = "https", l.Addr().String()
			parts := strings.Split(r.In.URL.Path, "/") // /api/v1/namespaces/NAMESPACE/pods/POD/SUBRESOURCE
			switch parts[7] {
			case "attach":
				r.Out.URL.Path = "/attach/" + parts[4] + "/" + parts[6] + "/" + r.In.URL.Query().Get("container")
				q := r.In.URL.Query()
				for from, to := range map[string]string{"stdin": "input", "stdout": "output", "stderr": "error"} {
					q.Set(to, q.Get(from))
				}
				r.Out.URL.RawQuery = q.Encode()
			case "portforward":
				r.Out.URL.Path = "/portForward/" + parts[4] + "/" + parts[6]
			}
		},
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
		ErrorLog:  slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
	}
	api := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !sockets && strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
			http.Error(w, "no websockets", http.StatusBadRequest)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(func() { cancel(); api.CloseClientConnections(); api.Close(); all.Wait() })
	return &rest.Config{Host: api.URL, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
}

func TestAttachToPod(t *testing.T) {
	for name, sockets := range map[string]bool{"websocket": true, "SPDY": false} {
		t.Run(name, func(t *testing.T) {
			p := podStreams{config: apiServer(t, sockets)}
			in, typed := io.Pipe()
			shown, out := io.Pipe()
			ended := make(chan error, 1)
			pod := types.NamespacedName{Namespace: "default", Name: "web"}
			go func() { ended <- p.attach(t.Context(), pod, in, out); in.Close(); out.Close() }()
			_, _ = typed.Write([]byte("whoami"))
			got := make([]byte, 6)
			if _, err := io.ReadFull(shown, got); err != nil || string(got) != "WHOAMI" {
				t.Errorf("%q, %v", got, err)
			}
			_, _ = typed.Write([]byte("poweroff"))
			if err := <-ended; err != nil {
				t.Errorf("the end of the console: %v", err)
			}
			typed.Close()

			// A client that leaves.
			ctx, cancel := context.WithCancel(t.Context())
			left, leaving := io.Pipe() // others, because the first client may still close its own
			go func() { ended <- p.attach(ctx, pod, left, io.Discard); left.Close() }()
			_, _ = leaving.Write([]byte("x"))
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("a client that leaves: %v", err)
			}
			leaving.Close()

			if !sockets { // the library may lose the last message of a SPDY connection
				return
			}
			err := p.attach(t.Context(), types.NamespacedName{Namespace: "default", Name: "none"}, strings.NewReader(""), io.Discard)
			if err == nil || !strings.Contains(err.Error(), "no pod default/none with a container compute") {
				t.Errorf("no such pod: %v", err)
			}
		})
	}
}

// The screen of a pod, a picture of it, and the status of what its node refuses.
func TestDisplayOfPod(t *testing.T) {
	p := podStreams{config: apiServer(t, true)}
	pod := types.NamespacedName{Namespace: "default", Name: "web"}
	in, typed := io.Pipe()
	shown, out := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- p.display(t.Context(), pod, contract.DisplayOpen, in, out); in.Close(); out.Close() }()
	got := make([]byte, 4)
	for _, want := range []string{"RFB ", "key!"} {
		if _, err := io.ReadFull(shown, got); err != nil || string(got) != want {
			t.Errorf("%q, %v", got, err)
		}
		_, _ = typed.Write([]byte("key!"))
	}
	go func() { _, _ = io.Copy(io.Discard, shown) }()
	typed.Close()
	if err := <-ended; err != nil {
		t.Errorf("the viewer has left: %v", err)
	}
	for how, want := range map[contract.Display]string{contract.DisplayPicture: "woken: false", contract.DisplayPictureWake: "woken: true"} {
		var picture bytes.Buffer
		if err := p.display(t.Context(), pod, how, nil, &picture); err != nil || picture.String() != want {
			t.Errorf("%s: %q, %v", how, picture.String(), err)
		}
	}
	none := types.NamespacedName{Namespace: "default", Name: "none"}
	for _, c := range []struct {
		pod  types.NamespacedName
		how  contract.Display
		in   io.Reader
		code int32
		text string
	}{
		{pod, contract.DisplayKeep, strings.NewReader(""), http.StatusConflict, "somebody is connected to its screen"},
		{none, contract.DisplayOpen, strings.NewReader(""), http.StatusNotFound, "no pod default/none"},
		{none, contract.DisplayPicture, nil, http.StatusBadRequest, "has no graphics"},
	} {
		err := p.display(t.Context(), c.pod, c.how, c.in, io.Discard)
		if status := statusOf(err); status.Code != c.code || !strings.Contains(status.Message, c.text) {
			t.Errorf("%s of %s: %d %s", c.how, c.pod, status.Code, status.Message)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	left, leaving := io.Pipe()
	go func() { ended <- p.display(ctx, pod, contract.DisplayOpen, left, io.Discard); left.Close() }()
	_, _ = leaving.Write([]byte("x"))
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("a client that leaves: %v", err)
	}
	leaving.Close()
}

func (backend) Describe(_ context.Context, namespace, pod, of string) (guest.Description, error) {
	if namespace+"/"+pod+"/"+of != "default/web/compute" {
		return guest.Description{}, errdefs.Unavailablef("no agent answers in the guest of pod %s", pod)
	}
	return described, nil
}

func (backend) Freeze(_ context.Context, _, pod, _ string, most time.Duration) error {
	if pod != "web" || most != time.Minute {
		return errdefs.Unsupportedf("the guest of pod %s is not frozen", pod)
	}
	return nil
}

func (backend) Thaw(_ context.Context, _, pod, _ string) (bool, error) { return pod == "web", nil }

// A node freezes and thaws, and tells whether that lasted.
func TestFreezePod(t *testing.T) {
	f := NewFreezer(apiServer(t, true))
	web, none := types.NamespacedName{Namespace: "default", Name: "web"}, types.NamespacedName{Namespace: "default", Name: "none"}
	if err := f.Freeze(t.Context(), web, time.Minute); err != nil {
		t.Error(err)
	}
	if held, err := f.Thaw(t.Context(), web); err != nil || !held {
		t.Error(held, err)
	}
	if held, err := f.Thaw(t.Context(), none); err != nil || held {
		t.Error(held, err)
	}
	if err := f.Freeze(t.Context(), none, time.Minute); err == nil || !strings.Contains(statusOf(err).Message, "is not frozen") {
		t.Error(err)
	}
}

// What a guest tells comes whole, and the status of what its node refuses.
func TestDescribePod(t *testing.T) {
	p := podStreams{config: apiServer(t, true)}
	got, err := p.describe(t.Context(), types.NamespacedName{Namespace: "default", Name: "web"})
	if err != nil {
		t.Fatal(err)
	}
	want, _ := json.Marshal(described)
	if text, _ := json.Marshal(got); compact(t, string(text)) != compact(t, string(want)) {
		t.Errorf("%s, want %s", text, want)
	}
	_, err = p.describe(t.Context(), types.NamespacedName{Namespace: "default", Name: "none"})
	if status := statusOf(err); status.Code != http.StatusServiceUnavailable || !strings.Contains(status.Message, "no agent answers") {
		t.Errorf("%d %s", status.Code, status.Message)
	}
}

func TestForwardToPod(t *testing.T) {
	p := podStreams{config: apiServer(t, false)}
	pod := types.NamespacedName{Namespace: "default", Name: "web"}
	c, err := p.forward(t.Context(), pod, 22)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Write([]byte("half "))
	_, _ = c.Write([]byte("closed"))
	if err := c.CloseWrite(); err != nil {
		t.Error(err)
	}
	if got, err := io.ReadAll(c); err != nil || string(got) != "HALF CLOSED" {
		t.Errorf("%q, %v", got, err)
	}
	if err := c.Result(); err != nil {
		t.Error(err)
	}
	c.Close()

	c, err = p.forward(t.Context(), pod, 23)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); err != nil || len(got) != 0 {
		t.Errorf("%q, %v", got, err)
	}
	if err := c.Result(); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("no listener: %v", err)
	}
	c.Close()

	ctx, cancel := context.WithCancel(t.Context())
	if c, err = p.forward(ctx, pod, 22); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := io.ReadAll(c); err != nil {
		t.Logf("the connection ended: %v", err)
	}
	c.Close()
}

// A node that accepts and says nothing holds nobody longer than its caller waits.
func TestForwardToSilence(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := podStreams{config: &rest.Config{Host: "http://" + l.Addr().String()}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := p.forward(ctx, types.NamespacedName{Namespace: "default", Name: "web"}, 22)
		ended <- err
	}()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
