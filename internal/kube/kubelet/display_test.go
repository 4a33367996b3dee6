package kubelet

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

func (g *guests) Display(_ context.Context, _, pod, container string, keep bool) (io.ReadWriteCloser, error) {
	g.shown <- fmt.Sprint(pod, " ", container, " ", keep)
	switch {
	case pod != "web":
		return nil, errdefs.NotFoundf("pod %q not found on this node", pod)
	case keep:
		return nil, errdefs.Conflictf("somebody is connected to its screen")
	}
	return g.screen, nil
}

func (g *guests) Screenshot(_ context.Context, _, pod, _ string, wake bool) ([]byte, error) {
	if pod != "web" {
		return nil, errdefs.Unsupportedf("vm %s has no graphics", pod)
	}
	return fmt.Appendf(bytes.Repeat([]byte("pixels"), 1<<18), "woken: %v", wake), nil
}

// look attaches to the screen of a pod as how says.
func (n *node) look(t *testing.T, pod, how string, o remotecommand.StreamOptions) error {
	t.Helper()
	return n.ask(t, pod, contract.HeaderDisplay, how, o)
}

// ask attaches to a pod with a header.
func (n *node) ask(t *testing.T, pod, header, value string, o remotecommand.StreamOptions) error {
	t.Helper()
	q := url.Values{}
	for key, on := range map[string]bool{"input": o.Stdin != nil, "output": o.Stdout != nil, "tty": o.Tty} {
		if on {
			q.Set(key, "1")
		}
	}
	u, err := url.Parse(n.addr + "/attach/default/" + pod + "/c?" + q.Encode())
	if err != nil {
		t.Fatal(err)
	}
	cfg := &rest.Config{Host: n.addr, BearerToken: "good", TLSClientConfig: rest.TLSClientConfig{CAData: n.caPEM()}}
	cfg.Wrap(func(rt http.RoundTripper) http.RoundTripper { return asking{rt, header, value, &n.answered} })
	to, err := remotecommand.NewSPDYExecutor(cfg, http.MethodPost, u)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	return to.StreamWithContext(ctx, o)
}

type asking struct {
	http.RoundTripper
	header, value string
	code          *int // of the answer
}

func (a asking) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set(a.header, a.value)
	resp, err := a.RoundTripper.RoundTrip(r)
	if err == nil {
		*a.code = resp.StatusCode
	}
	return resp, err
}

// The screen is connected with the streams. The session ends with the client's input, and with the screen.
func TestDisplay(t *testing.T) {
	for name, end := range map[string]func(typed *io.PipeWriter, server net.Conn){
		"the viewer leaves": func(typed *io.PipeWriter, _ net.Conn) { typed.Close() },
		"the VM ends":       func(_ *io.PipeWriter, server net.Conn) { server.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			n := serve(t)
			var server net.Conn
			n.backend.screen, server = net.Pipe()
			in, typed := io.Pipe()
			seen, out := io.Pipe()
			done := make(chan error, 1)
			go func() {
				done <- n.look(t, "web", string(contract.DisplayOpen), remotecommand.StreamOptions{Stdin: in, Stdout: out})
			}()
			go func() { _, _ = server.Write([]byte("RFB ")) }()
			buf := make([]byte, 4)
			if _, err := io.ReadFull(seen, buf); err != nil || string(buf) != "RFB " {
				t.Fatalf("%q, %v", buf, err)
			}
			go func() { _, _ = typed.Write([]byte("key!")) }()
			if _, err := io.ReadFull(server, buf); err != nil || string(buf) != "key!" {
				t.Fatalf("%q, %v", buf, err)
			}
			end(typed, server)
			if err := <-done; err != nil {
				t.Error(err)
			}
			if _, err := server.Read(buf); err == nil {
				t.Error("the screen is still connected")
			}
			typed.Close()
			if got := <-n.backend.shown; got != "web c false" {
				t.Error(got)
			}
		})
	}
}

func TestPicture(t *testing.T) {
	n := serve(t)
	for how, want := range map[contract.Display]string{contract.DisplayPicture: "pixelswoken: false", contract.DisplayPictureWake: "pixelswoken: true"} {
		var out bytes.Buffer
		if err := n.look(t, "web", string(how), remotecommand.StreamOptions{Stdout: &out}); err != nil {
			t.Fatal(err)
		}
		if got := out.String(); !strings.HasSuffix(got, want) || out.Len() < 6<<18 {
			t.Errorf("%s: %d bytes end in %.40q", how, out.Len(), got[max(0, len(got)-40):])
		}
	}
}

// An error comes before the upgrade, so that it has a status.
func TestDisplayRefused(t *testing.T) {
	n := serve(t)
	both := remotecommand.StreamOptions{Stdin: strings.NewReader(""), Stdout: io.Discard}
	one := remotecommand.StreamOptions{Stdout: io.Discard}
	terminal := both
	terminal.Tty = true
	for _, c := range []struct {
		name, pod, how string
		o              remotecommand.StreamOptions
		code           int
		text           string
	}{
		{"somebody is connected", "web", "keep", both, http.StatusConflict, "somebody is connected to its screen"},
		{"no pod", "other", "open", both, http.StatusNotFound, `pod "other" not found`},
		{"no graphics", "other", "picture", one, http.StatusBadRequest, "has no graphics"},
		{"another word", "web", "film", both, http.StatusBadRequest, contract.HeaderDisplay},
		{"no input", "web", "open", one, http.StatusBadRequest, "needs stdin and stdout"},
		{"input for a picture", "web", "picture", both, http.StatusBadRequest, "needs stdin and stdout"},
		{"a terminal", "web", "open", terminal, http.StatusBadRequest, "needs stdin and stdout"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := n.look(t, c.pod, c.how, c.o)
			if err == nil || n.answered != c.code || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%d, %v, want %d and %q", n.answered, err, c.code, c.text)
			}
		})
	}
}
