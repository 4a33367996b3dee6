package probe

import (
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"cocoonstack.io/cocoon/internal/probing"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

// Probes and hooks cannot reach the node's own services. They can reach the guest's own address, which is a loopback address
// in this test.
func TestProbesDoNotReachTheNode(t *testing.T) {
	netns.Own(t)
	l, err := net.Listen("tcp", "0.0.0.0:0") //nolint:noctx,gosec // a server of this test
	if err != nil {
		t.Fatal(err)
	}
	var asked int
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/away" {
			http.Redirect(w, r, "http://10.77.0.2:"+r.URL.Query().Get("port")+"/", http.StatusFound)
			return
		}
		asked++
	}))
	s.Listener = l
	s.Start()
	defer s.Close()
	port := intstr.FromInt(l.Addr().(*net.TCPAddr).Port)
	guest := Target{IP: "127.0.0.1", Container: &corev1.Container{}}
	for _, host := range []string{"10.77.0.1", "127.0.0.2", "localhost", "::ffff:10.77.0.2"} {
		for what, h := range map[string]corev1.ProbeHandler{
			"tcp":  {TCPSocket: &corev1.TCPSocketAction{Host: host, Port: port}},
			"http": {HTTPGet: &corev1.HTTPGetAction{Host: host, Port: port}},
		} {
			got, why, err := guest.Probe(t.Context(), &corev1.Probe{TimeoutSeconds: 5, ProbeHandler: h})
			if err != nil || got != probing.Failure || !strings.Contains(why, "the node does not connect to") {
				t.Errorf("%s of %s: %d %q %v", what, host, got, why, err)
			}
		}
	}
	hook := corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/away?port=" + port.String(), Port: port}}
	if err := guest.Hook(t.Context(), &hook); err == nil || !strings.Contains(err.Error(), "an address of the node itself") {
		t.Errorf("a hook with an address of the node: %v", err)
	}
	if asked != 0 {
		t.Errorf("the node got %d requests, want none", asked)
	}
	if got, why, err := guest.Probe(t.Context(), &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: port}}}); got != probing.Success || err != nil {
		t.Errorf("the guest itself: %d %q %v", got, why, err)
	}
}
