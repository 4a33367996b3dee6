package aggregated

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

func (g *fakeGuests) display(ctx context.Context, pod types.NamespacedName, how contract.Display, in io.Reader, out io.Writer) error {
	g.note(fmt.Sprintf("display %s %s", pod, how))
	if in != nil {
		return g.echo(ctx, in, out)
	}
	if err := g.connect(ctx); err != nil {
		return err
	}
	for _, part := range g.picture {
		if _, err := out.Write(part); err != nil {
			return err
		}
	}
	return g.failed
}

const screenPath = "virtualmachineinstances/web/vnc"

func TestVNC(t *testing.T) {
	r := start(t, running()...)
	for i, c := range []struct {
		query string
		want  contract.Display
	}{
		{"", contract.DisplayOpen},
		{"?preserveSession=false", contract.DisplayOpen},
		{"?preserveSession=perhaps", contract.DisplayOpen},
		{"?preserveSession=true", contract.DisplayKeep},
	} {
		w, no := r.websocket(screenPath + c.query)
		if w == nil {
			t.Fatal(no)
		}
		w.send(binaryFrame, "RFB 003.008\n")
		w.expect(t, "RFB 003.008\n")
		if n := r.open("vnc"); n != 1 {
			t.Errorf("%v screens are counted as open", n)
		}
		w.send(binaryFrame, "poweroff") // the VM ends, or somebody else connects
		if code, reason := w.end(t); code != closeNormal || reason != "" {
			t.Errorf("the end of the guest: %d %s", code, reason)
		}
		r.noStreams(t)
		if got := strings.Split(r.guests.calls(), ",")[i]; got != "display default/virt-launcher-web "+string(c.want) {
			t.Errorf("%s: %s", c.query, got)
		}
	}
	w, no := r.websocket(screenPath)
	if w == nil {
		t.Fatal(no)
	}
	w.Close()
	r.noStreams(t)
}

func TestVNCRefused(t *testing.T) {
	taken := &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusConflict, Reason: metav1.StatusReasonConflict, Message: "somebody"}}
	off := false
	for _, c := range []struct {
		name   string
		change func(vmi *v1.VirtualMachineInstance, pod *corev1.Pod)
		fails  error
		want   string // a prefix, for both subresources unless fails is given
	}{
		{"scheduled", func(vmi *v1.VirtualMachineInstance, _ *corev1.Pod) { vmi.Status.Phase = v1.Scheduled }, nil, "400 VMI is not running"},
		{"failed", func(vmi *v1.VirtualMachineInstance, _ *corev1.Pod) { vmi.Status.Phase = v1.Failed }, nil, "409 "},
		{"without graphics", func(vmi *v1.VirtualMachineInstance, _ *corev1.Pod) {
			vmi.Spec.Domain.Devices.AutoattachGraphicsDevice = &off
		}, nil, "400 No graphics devices are present."},
		{"pod pending", func(_ *v1.VirtualMachineInstance, pod *corev1.Pod) { pod.Status.Phase = corev1.PodPending }, nil, "400 VMI is not running"},
		{"pod of another", func(_ *v1.VirtualMachineInstance, pod *corev1.Pod) { pod.OwnerReferences[0].UID = "other" }, nil, "400 VMI is not running"},
		{"somebody is connected", func(*v1.VirtualMachineInstance, *corev1.Pod) {}, fmt.Errorf("open the screen: %w", taken), `409 Operation cannot be fulfilled on virtualmachineinstance.kubevirt.io "web": Active VNC connection. Request denied.`},
		{"the node is away", func(*v1.VirtualMachineInstance, *corev1.Pod) {}, errdefs.Unavailablef("the node is away"), "503 the node is away"},
	} {
		t.Run(c.name, func(t *testing.T) {
			vmi := instance("web", v1.Running)
			pod := podOf(vmi)
			c.change(vmi, pod)
			r := start(t, machine("Always"), vmi, pod)
			r.guests.fails = c.fails
			if _, got := r.websocket(screenPath + "?preserveSession=true"); !strings.HasPrefix(got, c.want) {
				t.Errorf("got %s\nwant %s", got, c.want)
			}
			if c.fails == nil {
				if r.guests.calls() != "" {
					t.Error("the guest was connected to")
				}
				if code, body, _ := r.do(call{method: http.MethodGet, path: prefix + screenPath + "/screenshot", cert: r.proxy}); fmt.Sprint(code) != c.want[:3] {
					t.Errorf("a picture: %d %s", code, body)
				}
			}
			r.noStreams(t)
		})
	}
	r := start(t, running()...)
	for path, want := range map[string]string{
		"virtualmachineinstances/none/vnc": `404 virtualmachineinstance.kubevirt.io "none" not found`, "virtualmachines/web/vnc": "404 ",
		screenPath + "/film": "404 ", screenPath + "/screenshot/x": "404 ",
	} {
		if _, got := r.websocket(path); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s", path, got)
		}
	}
	if code, body, _ := r.do(call{method: http.MethodGet, path: prefix + screenPath, cert: r.proxy}); code != http.StatusBadRequest {
		t.Errorf("without an upgrade: %d %s", code, body)
	}
}

func TestScreenshot(t *testing.T) {
	r := start(t, running()...)
	large := bytes.Repeat([]byte("pixels"), 1<<20)
	r.guests.picture = [][]byte{[]byte("\x89PNG"), large, []byte(endOfPicture[:3]), []byte(endOfPicture[3:])}
	for query, how := range map[string]contract.Display{"": contract.DisplayPicture, "?moveCursor=true": contract.DisplayPictureWake} {
		code, body, header := r.do(call{method: http.MethodGet, path: prefix + screenPath + "/screenshot" + query, cert: r.proxy})
		if code != http.StatusOK || body != "\x89PNG"+string(large)+endOfPicture || header.Get("Content-Type") != "image/png" || header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%d, %d bytes, %v", code, len(body), header)
		}
		if got := r.guests.calls(); !strings.HasSuffix(got, "display default/virt-launcher-web "+string(how)) {
			t.Error(got)
		}
	}
	r.guests.picture = nil
	if code, body, _ := r.do(call{method: http.MethodGet, path: prefix + screenPath + "/screenshot", cert: r.proxy}); code != http.StatusServiceUnavailable {
		t.Errorf("no picture: %d %s", code, body)
	}
	r.guests.fails = errdefs.Unsupportedf("vm web has no graphics")
	if code, body, header := r.do(call{method: http.MethodGet, path: prefix + screenPath + "/screenshot", cert: r.proxy}); code != http.StatusConflict || header.Get("Content-Type") != "application/json" {
		t.Errorf("a VM without graphics: %d %s", code, body)
	}
	r.noStreams(t)
}

// An answer that ends in the middle does not look like a whole one.
func TestScreenshotBreaks(t *testing.T) {
	gone := errdefs.Unavailablef("the node is gone")
	for name, c := range map[string]struct {
		picture [][]byte
		failed  error
	}{
		"the node":       {[][]byte{[]byte("\x89PNG")}, gone},
		"the connection": {[][]byte{[]byte("\x89PNG"), []byte(endOfPicture[:5])}, nil},
		"the limit":      {[][]byte{make([]byte, maxPicture), []byte(endOfPicture)}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, running()...)
			r.guests.picture, r.guests.failed = c.picture, c.failed
			if whole := r.whole(prefix + screenPath + "/screenshot"); whole {
				t.Error("the client takes the answer for a whole one")
			}
			r.noStreams(t)
		})
	}
}

// The right to a picture is a right of its own.
func TestScreenRights(t *testing.T) {
	r := start(t, running()...)
	r.guests.picture = [][]byte{[]byte("\x89PNG")}
	for _, c := range []struct{ path, subresource string }{{screenPath, "vnc"}, {screenPath + "/screenshot", "vnc/screenshot"}} {
		code, body, _ := r.do(call{method: http.MethodGet, path: prefix + c.path, cert: r.proxy, user: "bob"})
		if code != http.StatusForbidden || !strings.Contains(body, "virtualmachineinstances/"+c.subresource) {
			t.Errorf("%d %s", code, body)
		}
		r.mu.Lock()
		last := r.reviews[len(r.reviews)-1].ResourceAttributes
		r.mu.Unlock()
		if last.Subresource != c.subresource || last.Verb != "get" || last.Name != "web" || last.Namespace != "default" {
			t.Errorf("asked for %+v", last)
		}
	}
	if r.guests.calls() != "" {
		t.Error("the guest was connected to")
	}
}
