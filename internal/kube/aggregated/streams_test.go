package aggregated

import (
	"bytes"
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// open is how many streams the metric counts as open.
func (r *rig) open(subresource string) (n float64) {
	r.t.Helper()
	families, err := r.metrics.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "cocoon_operator_kubevirt_streams" && m.GetLabel()[0].GetValue() == subresource {
				n += m.GetGauge().GetValue()
			}
		}
	}
	return n
}

// running is a VM with everything that a running one has.
func running() []client.Object {
	vmi := instance("web", v1.Running)
	return []client.Object{machine("Always"), vmi, podOf(vmi)}
}

// noStreams waits until nothing of a stream is left: no goroutine, no place and no count.
func (r *rig) noStreams(t *testing.T) {
	t.Helper()
	eventually(t, "the goroutines of the streams end", func() bool {
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		return !bytes.Contains(stacks, []byte("aggregated.(*Server).attach")) && !bytes.Contains(stacks, []byte("aggregated.pipe")) &&
			!bytes.Contains(stacks, []byte("aggregated.socket")) && !bytes.Contains(stacks, []byte("fakeGuests"))
	})
	eventually(t, "no stream is counted as open or holds a place", func() bool { // after its last byte
		return r.open("console") == 0 && r.open("portforward") == 0 && r.open("vnc") == 0 && r.open("vnc/screenshot") == 0 && len(r.server.tokens) == 0
	})
}

func TestConsole(t *testing.T) {
	r := start(t, running()...)
	w, no := r.websocket("virtualmachineinstances/web/console")
	if w == nil {
		t.Fatal(no)
	}
	w.send(binaryFrame, "ls\n")
	w.expect(t, "ls\n")
	large := strings.Repeat("y", 30000)
	w.send(binaryFrame, large)
	w.expect(t, large)
	if f, err := w.receive(); err != nil || f.kind != pingFrame { // while nothing is sent
		t.Errorf("%v %v", f, err)
	}
	if n := r.open("console"); n != 1 {
		t.Errorf("%v consoles are counted as open", n)
	}
	w.send(binaryFrame, "poweroff")
	if code, reason := w.end(t); code != closeNormal || reason != "" {
		t.Errorf("the end of the guest: %d %s", code, reason)
	}
	if got := r.guests.calls(); got != "attach default/virt-launcher-web" {
		t.Error(got)
	}
	r.noStreams(t)
}

// A client may leave with a close frame, or without a word.
func TestConsoleLeft(t *testing.T) {
	r := start(t, running()...)
	for name, leave := range map[string]func(*wire){
		"with a close frame": func(w *wire) { w.send(closeFrame, "\x03\xe8") }, "without": func(w *wire) { w.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			w, no := r.websocket("virtualmachineinstances/web/console")
			if w == nil {
				t.Fatal(no)
			}
			w.send(binaryFrame, "x")
			w.expect(t, "x")
			leave(w)
			r.noStreams(t)
		})
	}
}

// A failure after the upgrade is the reason of the close frame.
func TestConsoleFails(t *testing.T) {
	r := start(t, running()...)
	r.guests.failed = errdefs.Unavailablef("the node is gone%s", strings.Repeat("é", 200))
	w, no := r.websocket("virtualmachineinstances/web/console")
	if w == nil {
		t.Fatal(no)
	}
	w.send(binaryFrame, "poweroff")
	if code, reason := w.end(t); code != closeInternal || !strings.HasPrefix(reason, "the node is gone") || len(reason) > maxReason {
		t.Errorf("%d %s", code, reason)
	}
	r.noStreams(t)
}

func TestStreamsRefused(t *testing.T) {
	off := false
	for _, c := range []struct {
		name   string
		change func(vmi *v1.VirtualMachineInstance, pod *corev1.Pod)
		path   string
		want   string // a prefix
	}{
		{"scheduled", func(vmi *v1.VirtualMachineInstance, _ *corev1.Pod) { vmi.Status.Phase = v1.Scheduled }, "virtualmachineinstances/web/console", "400 VMI is not running"},
		{"failed", func(vmi *v1.VirtualMachineInstance, _ *corev1.Pod) { vmi.Status.Phase = v1.Failed }, "virtualmachineinstances/web/console", "409 "},
		{"without console", func(vmi *v1.VirtualMachineInstance, _ *corev1.Pod) {
			vmi.Spec.Domain.Devices.AutoattachSerialConsole = &off
		}, "virtualmachineinstances/web/console", "400 No serial consoles are present."},
		{"pod pending", func(_ *v1.VirtualMachineInstance, pod *corev1.Pod) { pod.Status.Phase = corev1.PodPending }, "virtualmachineinstances/web/console", "400 VMI is not running"},
		{"pod of nobody", func(_ *v1.VirtualMachineInstance, pod *corev1.Pod) { pod.OwnerReferences = nil }, "virtualmachineinstances/web/console", "400 VMI is not running"},
		{"pod of another", func(_ *v1.VirtualMachineInstance, pod *corev1.Pod) { pod.OwnerReferences[0].UID = "other" }, "virtualmachineinstances/web/portforward/22", "409 "},
		{"missing", func(*v1.VirtualMachineInstance, *corev1.Pod) {}, "virtualmachineinstances/none/console", `404 virtualmachineinstance.kubevirt.io "none" not found`},
		{"missing", func(*v1.VirtualMachineInstance, *corev1.Pod) {}, "virtualmachineinstances/none/portforward/22/tcp", "404 "},
		{"missing", func(*v1.VirtualMachineInstance, *corev1.Pod) {}, "virtualmachines/none/portforward/22/tcp", `404 virtualmachine.kubevirt.io "none" not found`},
		{"paused", func(vmi *v1.VirtualMachineInstance, _ *corev1.Pod) {
			vmi.Status.Conditions = []v1.VirtualMachineInstanceCondition{{Type: v1.VirtualMachineInstancePaused, Status: corev1.ConditionTrue}}
		}, "virtualmachines/web/portforward/22/tcp", `409 Operation cannot be fulfilled on virtualmachine.kubevirt.io "web": VMI is paused`},
		{"scheduled", func(vmi *v1.VirtualMachineInstance, _ *corev1.Pod) { vmi.Status.Phase = v1.Scheduled }, "virtualmachines/web/portforward/22", "409 "},
		{"udp", func(*v1.VirtualMachineInstance, *corev1.Pod) {}, "virtualmachineinstances/web/portforward/22/udp", `400 protocol "udp" is not forwarded, only tcp`},
		{"port 0", func(*v1.VirtualMachineInstance, *corev1.Pod) {}, "virtualmachineinstances/web/portforward/0", "400 port "},
		{"port 65536", func(*v1.VirtualMachineInstance, *corev1.Pod) {}, "virtualmachineinstances/web/portforward/65536", "400 port "},
		{"no port", func(*v1.VirtualMachineInstance, *corev1.Pod) {}, "virtualmachineinstances/web/portforward", "400 the path must end"},
		{"more", func(*v1.VirtualMachineInstance, *corev1.Pod) {}, "virtualmachineinstances/web/portforward/22/tcp/x", "400 the path must end"},
	} {
		t.Run(c.name+" "+c.path, func(t *testing.T) {
			vmi := instance("web", v1.Running)
			pod := podOf(vmi)
			c.change(vmi, pod)
			r := start(t, machine("Always"), vmi, pod)
			if _, got := r.websocket(c.path); !strings.HasPrefix(got, c.want) {
				t.Errorf("got %s\nwant %s", got, c.want)
			}
			if r.guests.calls() != "" {
				t.Error("the guest was connected to")
			}
			r.noStreams(t)
		})
	}
	r := start(t, running()...)
	for _, header := range []http.Header{
		{}, {"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"AAAAAAAAAAAAAAAAAAAAAA=="}, "Sec-Websocket-Protocol": {"v5.channel.k8s.io"}},
	} {
		if code, body, _ := r.do(call{method: http.MethodGet, path: prefix + "virtualmachineinstances/web/console", cert: r.proxy, header: header}); code != http.StatusBadRequest {
			t.Errorf("%d %s", code, body)
		}
	}
}

// A node that does not answer delays nobody else, and nothing is left when the client or the server leaves.
func TestSlowNode(t *testing.T) {
	r := start(t, running()...)
	r.guests.hang = make(chan struct{})
	answers := make(chan string, 2)
	for i, path := range []string{"virtualmachineinstances/web/console", "virtualmachines/web/portforward/22/tcp"} {
		go func() { _, no := r.websocket(path); answers <- no }()
		eventually(t, "the node is asked", func() bool { return strings.Count(r.guests.calls(), ",") == i })
	}
	if got := r.put("virtualmachines/web/stop", ""); got != "202" {
		t.Error(got)
	}
	close(r.guests.hang)
	for range 2 {
		if no := <-answers; no != "" {
			t.Error(no)
		}
	}
	r.stop() // with two streams open
	r.noStreams(t)

	r = start(t, running()...)
	r.guests.fails = errdefs.Unavailablef("the node is away")
	for _, path := range []string{"virtualmachineinstances/web/console", "virtualmachines/web/portforward/22/tcp"} {
		if _, got := r.websocket(path); got != "503 the node is away" {
			t.Error(got)
		}
	}
	r.noStreams(t)
}

func TestTooManyStreams(t *testing.T) {
	r := start(t, running()...)
	for range maxStreams {
		r.server.tokens <- struct{}{}
	}
	if _, got := r.websocket("virtualmachineinstances/web/console"); !strings.HasPrefix(got, "429 ") {
		t.Error(got)
	}
	<-r.server.tokens
	if w, no := r.websocket("virtualmachineinstances/web/console"); w == nil {
		t.Error(no)
	}
}

func TestPortForward(t *testing.T) {
	r := start(t, running()...)
	for i, path := range []string{"virtualmachineinstances/web/portforward/22/tcp", "virtualmachines/web/portforward/22"} {
		w, no := r.websocket(path)
		if w == nil {
			t.Fatal(no)
		}
		w.send(binaryFrame, "SSH-2.0")
		w.expect(t, "SSH-2.0")
		w.send(binaryFrame, "quit") // the guest closes
		if code, reason := w.end(t); code != closeNormal {
			t.Errorf("%d %s", code, reason)
		}
		r.noStreams(t)
		if got := r.guests.calls(); got != strings.TrimSuffix(strings.Repeat("forward default/virt-launcher-web 22,", i+1), ",") {
			t.Error(got)
		}
	}
	w, no := r.websocket("virtualmachineinstances/web/portforward/22/tcp")
	if w == nil {
		t.Fatal(no)
	}
	w.send(binaryFrame, "x")
	w.expect(t, "x")
	w.Close() // the client leaves; the guest's side is closed when it has had time to read
	r.noStreams(t)
	if n := r.guests.closed(); n != 3 {
		t.Errorf("the guest was told %d times that its client had left", n)
	}

	r.guests.failed = fmt.Errorf("connection refused")
	w, no = r.websocket("virtualmachineinstances/web/portforward/23/tcp")
	if w == nil {
		t.Fatal(no)
	}
	w.send(binaryFrame, "quit")
	if code, reason := w.end(t); code != closeInternal || reason != "connection refused" {
		t.Errorf("%d %s", code, reason)
	}
}

// An instance without a VirtualMachine has a console, too.
func TestConsoleWithoutMachine(t *testing.T) {
	vmi := instance("lone", v1.Running)
	vmi.OwnerReferences = []metav1.OwnerReference{}
	r := start(t, vmi, podOf(vmi))
	if w, no := r.websocket("virtualmachineinstances/lone/console"); w == nil {
		t.Error(no)
	}
}
