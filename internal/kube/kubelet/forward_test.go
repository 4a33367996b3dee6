package kubelet

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

// forwarded runs the client of kubectl port-forward with a local port for each port of remote.
func forwarded(t *testing.T, n *node, remote ...int) (addrs []string) {
	t.Helper()
	cfg := &rest.Config{BearerToken: "good", TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	rt, upgrader, err := spdy.RoundTripperFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(n.addr + "/portForward/default/web")
	if err != nil {
		t.Fatal(err)
	}
	var ports []string
	for _, p := range remote {
		ports = append(ports, fmt.Sprintf("0:%d", p))
	}
	stop, ready := make(chan struct{}), make(chan struct{})
	pf, err := portforward.NewOnAddresses(spdy.NewDialer(upgrader, &http.Client{Transport: rt}, http.MethodPost, u), []string{"127.0.0.1"}, ports, stop, ready, io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- pf.ForwardPorts() }()
	t.Cleanup(func() {
		close(stop)
		if err := <-ended; err != nil {
			t.Log("the session ended:", err)
		}
	})
	select {
	case <-ready:
	case err := <-ended:
		ended <- err
		t.Fatal(err)
	}
	got, err := pf.GetPorts()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range got {
		addrs = append(addrs, fmt.Sprintf("127.0.0.1:%d", p.Local))
	}
	return addrs
}

func TestPortForward(t *testing.T) {
	n := serve(t)
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %d", r.URL.Path, len(body))
	}))
	defer web.Close()
	n.backend.server = web.Listener.Addr().String()
	addrs := forwarded(t, n, 80)
	var wg sync.WaitGroup
	for i := range 20 { // connections of one session
		wg.Go(func() {
			client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
			resp, err := client.Post(fmt.Sprintf("http://%s/%d", addrs[0], i), "text/plain", strings.NewReader(strings.Repeat("x", 1<<20)))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if got, err := io.ReadAll(resp.Body); err != nil || string(got) != fmt.Sprintf("/%d %d", i, 1<<20) {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
	wg.Wait()
}

// A port without a listener is reported. The session's other connections continue.
func TestPortForwardWithoutListener(t *testing.T) {
	n := serve(t)
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer echo.Close()
	go func() {
		for {
			c, err := echo.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	n.backend.server = echo.Addr().String()
	addrs := forwarded(t, n, 80, 81)
	c, err := net.Dial("tcp", addrs[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	say := func(text string) {
		t.Helper()
		if _, err := io.WriteString(c, text); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(text))
		if _, err := io.ReadFull(c, got); err != nil || string(got) != text {
			t.Fatalf("%q, %v", got, err)
		}
	}
	say("before")
	dead, err := net.Dial("tcp", addrs[1])
	if err != nil {
		t.Fatal(err)
	}
	defer dead.Close()
	if err := dead.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if n, err := dead.Read(make([]byte, 1)); n > 0 || err == nil {
		t.Errorf("a port without a listener answers: %d, %v", n, err)
	}
}

func TestAttach(t *testing.T) {
	n := serve(t)
	n.backend.attach = func(_ context.Context, container string, s guest.Streams) error {
		if container != "agent" {
			return errdefs.NotFoundf("no container %s", container)
		}
		if s.Stdin == nil {
			fmt.Fprint(s.Stdout, "one")
			fmt.Fprint(s.Stderr, "two")
			return nil
		}
		_, err := io.Copy(s.Stdout, s.Stdin)
		if s.Resize != nil {
			w := <-s.Resize
			fmt.Fprintf(s.Stderr, " %dx%d", w.Cols, w.Rows) // the process has no terminal
		}
		return err
	}
	cfg := &rest.Config{BearerToken: "good", TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	attach := func(container, query string, o remotecommand.StreamOptions) error {
		u, err := url.Parse(n.addr + "/attach/default/web/" + container + "?" + query)
		if err != nil {
			t.Fatal(err)
		}
		x, err := remotecommand.NewSPDYExecutor(cfg, http.MethodPost, u)
		if err != nil {
			t.Fatal(err)
		}
		return x.StreamWithContext(t.Context(), o)
	}
	var out, errs bytes.Buffer
	if err := attach("agent", "output=1&error=1", remotecommand.StreamOptions{Stdout: &out, Stderr: &errs}); err != nil || out.String() != "one" || errs.String() != "two" {
		t.Errorf("%q, %q, %v", out.String(), errs.String(), err)
	}
	out.Reset()
	if err := attach("agent", "input=1&output=1", remotecommand.StreamOptions{Stdin: strings.NewReader("typed"), Stdout: &out}); err != nil || out.String() != "typed" {
		t.Errorf("with input: %q, %v", out.String(), err)
	}
	out.Reset()
	o := remotecommand.StreamOptions{
		Stdin: strings.NewReader("typed"), Stdout: &out, Tty: true,
		TerminalSizeQueue: &window{sizes: []remotecommand.TerminalSize{{Width: 80, Height: 24}}},
	}
	if err := attach("agent", "input=1&output=1&tty=1", o); err != nil || out.String() != "typed 80x24" {
		t.Errorf("with a terminal: %q, %v", out.String(), err)
	}
	err := attach("none", "output=1", remotecommand.StreamOptions{Stdout: &out})
	if err == nil || !strings.Contains(err.Error(), "error attaching to container: no container none") {
		t.Errorf("a failure: %v", err)
	}
}

// A server that shuts down does not wait for connected clients.
func TestPortForwardEndsWithTheServer(t *testing.T) {
	t.Run("server", func(inner *testing.T) {
		n := serve(inner)
		forwarded(t, n, 80) // the client disconnects after the server has stopped
	})
}
