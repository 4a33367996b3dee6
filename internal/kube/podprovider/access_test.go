package podprovider

import (
	"bytes"
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// both is both directions of a forwarded connection.
type both struct {
	io.Reader
	said bytes.Buffer
}

func (b *both) Write(p []byte) (int, error) { return b.said.Write(p) }

func TestAttachAndForward(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		attach := func(container string, s guest.Streams) (string, error) {
			var out bytes.Buffer
			s.Stdout = &out
			err := w.p.Attach(t.Context(), "default", "web", container, guest.Attach{}, s)
			return out.String(), err
		}
		forward := func(port int) (string, error) {
			s := &both{Reader: strings.NewReader("in")}
			err := w.p.Forward(t.Context(), "default", "web", port, s)
			return s.said.String(), err
		}
		if _, err := attach("c", guest.Streams{}); !errdefs.IsNotFound(err) {
			t.Errorf("a pod that does not exist: %v", err)
		}
		w.engine.boot = time.Hour
		w.create(pod())
		w.after(time.Second)
		if _, err := attach("c", guest.Streams{}); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("a guest that boots: %v", err)
		}
		w.after(2 * time.Hour)
		if out, err := attach("c", guest.Streams{Stdin: strings.NewReader("")}); err != nil || out != "attached " {
			t.Errorf("%q, %v", out, err)
		}
		if _, err := attach("other", guest.Streams{}); !errdefs.IsNotFound(err) {
			t.Errorf("a container that does not exist: %v", err)
		}
		if out, err := forward(80); err != nil || out != "in" {
			t.Errorf("%q, %v", out, err)
		}
		if _, err := forward(81); !errdefs.IsUnavailable(err) {
			t.Errorf("no listener: %v", err)
		}
		rec, err := w.engine.Inspect(t.Context(), vmName)
		if err != nil {
			t.Fatal(err)
		}
		w.engine.change(rec.ID, func(r *vm.Record) { r.ImageType = vm.ImageDisk })
		w.after(time.Second)
		if out, err := attach("c", guest.Streams{}); err != nil || out != "line\n" {
			t.Errorf("the console of a guest that boots itself: %q, %v", out, err)
		}
		if _, err := attach("c", guest.Streams{Stdin: strings.NewReader("")}); !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("with input, while another program has the console: %v", err)
		}
		var far net.Conn
		w.engine.consoleAs = func() io.ReadWriteCloser {
			near, other := net.Pipe()
			far = other
			go func() { _, _ = io.Copy(other, other); other.Close() }()
			return near
		}
		if _, err := w.p.Display(t.Context(), "default", "web", "c", true); !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("the screen, while somebody is connected: %v", err)
		}
		if c, err := w.p.Display(t.Context(), "default", "web", "c", false); err != nil {
			t.Errorf("the screen: %v", err)
		} else {
			c.Close()
		}
		if png, err := w.p.Screenshot(t.Context(), "default", "web", "c", true); err != nil || string(png) != "woken: true" {
			t.Errorf("a picture: %q, %v", png, err)
		}
		if _, err := w.p.Screenshot(t.Context(), "default", "web", "other", true); !errdefs.IsNotFound(err) {
			t.Errorf("a picture of no container: %v", err)
		}
		if d, err := w.p.Describe(t.Context(), "default", "web", "c"); err != nil || d.Hostname != "web" {
			t.Errorf("its description: %+v, %v", d, err)
		}
		if err := w.p.Freeze(t.Context(), "default", "web", "c", time.Second); err != nil {
			t.Error(err)
		}
		if held, err := w.p.Thaw(t.Context(), "default", "web", "c"); err != nil || !held {
			t.Error(held, err)
		}
		if _, err := w.p.Describe(t.Context(), "default", "web", "other"); !errdefs.IsNotFound(err) {
			t.Errorf("the description of no container: %v", err)
		}
		in, typed := io.Pipe()
		go func() { _, _ = typed.Write([]byte("ls")); synctest.Wait(); far.Close() }()
		if out, err := attach("c", guest.Streams{Stdin: in}); err != nil || out != "line\nls" {
			t.Errorf("with input: %q, %v", out, err)
		}
		typed.Close()
	})
}

// A port is forwarded to the guest's address if the guest has no agent, or an older agent.
func TestForwardFromOutside(t *testing.T) {
	for name, c := range map[string]struct {
		image vm.ImageType
		older bool
	}{"none": {vm.ImageDisk, false}, "older": {vm.ImageOCI, true}} {
		t.Run(name, func(t *testing.T) {
			e := newEngine()
			e.older = c.older
			forwardFromOutside(t, e, c.image)
		})
	}
}

func forwardFromOutside(t *testing.T, e *engine, image vm.ImageType) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_, _ = io.Copy(c, c)
		c.Close()
	}()
	s := &podState{facts: facts{pod: &corev1.Pod{}, rec: &vm.Record{
		ID: vm.NewID(), State: vm.StateRunning, ImageType: image, AgentReady: true, NICs: []vm.NIC{{IP: "127.0.0.1"}},
	}}}
	s.pod.Namespace, s.pod.Name = "default", "web"
	s.tenant = (&common{node: operator{runtime: e}}).on(ownerOf(s.pod))
	d := &door{pods: &index{pods: map[string]*podState{"default/web": s}}}
	stream := &both{Reader: strings.NewReader("in")}
	if err := d.Forward(t.Context(), "default", "web", l.Addr().(*net.TCPAddr).Port, stream); err != nil || stream.said.String() != "in" {
		t.Errorf("%q, %v", stream.said.String(), err)
	}
	l.Close()
	if err := d.Forward(t.Context(), "default", "web", l.Addr().(*net.TCPAddr).Port, stream); !errdefs.IsUnavailable(err) {
		t.Errorf("no listener: %v", err)
	}
}

// Exec into a Windows guest that has no agent says how to reach it.
func TestExecInWindows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod(func(p *corev1.Pod) { p.Annotations = map[string]string{contract.KeyOS: "windows"} }))
		w.after(time.Second)
		rec, err := w.engine.Inspect(t.Context(), vmName)
		if err != nil {
			t.Fatal(err)
		}
		exec := func() (int, error) {
			return w.p.Exec(t.Context(), "default", "web", "c", guest.Exec{Command: []string{"ver"}}, guest.Streams{Stdout: io.Discard})
		}
		w.engine.execAs = func(context.Context, string) (int, error) { return 0, errdefs.Unavailablef("no agent answers") }
		if _, err := exec(); !errdefs.IsUnavailable(err) {
			t.Errorf("a guest whose agent answered before: %v", err)
		}
		w.engine.change(rec.ID, func(r *vm.Record) { r.ImageType, r.AgentReady = vm.ImageDisk, false })
		w.after(time.Second)
		_, err = exec()
		for _, want := range []string{"mstsc /v:" + rec.NICs[0].IP, "SAC", "kubectl attach -it -n default web"} {
			if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), want) {
				t.Errorf("without an agent: %v, which lacks %q", err, want)
			}
		}
		w.engine.execAs = nil
		if code, err := exec(); code != 7 || err != nil {
			t.Errorf("with an agent: %d, %v", code, err)
		}
	})
}
