package up

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// taken occupies a TCP port on loopback until the test ends.
func taken(t *testing.T) int {
	t.Helper()
	ln, err := net.Listen("tcp", net.JoinHostPort(nodeIP, "0"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln.Addr().(*net.TCPAddr).Port
}

// free returns a port that was free a moment ago.
func free(t *testing.T) int {
	t.Helper()
	ln, err := net.Listen("tcp", net.JoinHostPort(nodeIP, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}

func TestSettle(t *testing.T) {
	l := layout{t.TempDir()}
	api, node := free(t), free(t)
	var p ports
	s, err := settle(l, Options{APIPort: api, NodePort: node}, &p)
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	if want := (Settings{NodeName: defaultNodeName, APIPort: api, NodePort: node}); s != want {
		t.Errorf("got %+v, want %+v", s, want)
	}
	// What was chosen once stays, until something else is asked for.
	again, err := settle(l, Options{NodeName: "other"}, &p)
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	if want := (Settings{NodeName: "other", APIPort: api, NodePort: node}); again != want {
		t.Errorf("got %+v, want %+v", again, want)
	}
	if fi, err := os.Stat(l.settings()); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
}

func TestSettleRefuses(t *testing.T) {
	busy := taken(t)
	for _, c := range []struct {
		name  string
		o     Options
		kept  string
		class errdefs.Class
		says  string
	}{
		{"name in upper case", Options{NodeName: "Node"}, "", errdefs.InvalidArgument, `"Node"`},
		{"name with a slash", Options{NodeName: "a/b"}, "", errdefs.InvalidArgument, `"a/b"`},
		{"long name", Options{NodeName: strings.Repeat("a", 64)}, "", errdefs.InvalidArgument, "63"},
		{"negative port", Options{APIPort: -1}, "", errdefs.InvalidArgument, "-1"},
		{"large port", Options{NodePort: 65536}, "", errdefs.InvalidArgument, "65536"},
		{"port taken", Options{APIPort: busy}, "", errdefs.ResourceExhausted, "--api-port"},
		{"node port taken", Options{NodePort: busy}, "", errdefs.ResourceExhausted, "--node-port"},
		{"damaged file", Options{}, "{", errdefs.DataLoss, "up.json"},
		{"changed by hand", Options{}, `{"nodeName":"A","apiPort":1}`, errdefs.DataLoss, "up.json"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := layout{t.TempDir()}
			if c.kept != "" {
				if err := os.WriteFile(l.settings(), []byte(c.kept), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			var p ports
			defer p.Close()
			err := c.o.check()
			if err == nil {
				_, err = settle(l, c.o, &p)
			}
			if !errdefs.Is(err, c.class) || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("got %v (%v), want %v that says %s", err, errdefs.ClassOf(err), c.class, c.says)
			}
			if data, err := os.ReadFile(l.settings()); string(data) != c.kept {
				t.Errorf("settings are %q (%v) after a refusal", data, err)
			}
		})
	}
}

func TestPortsOfTwoInstances(t *testing.T) {
	usual := free(t)
	var first, second ports
	defer second.Close()
	a, err := first.choose("API server", "--api-port", 0, 0, usual)
	if err != nil {
		t.Fatal(err)
	}
	// Nobody listens on the first's port yet, and still it is not given twice.
	b, err := second.choose("API server", "--api-port", 0, 0, usual)
	if err != nil {
		t.Fatal(err)
	}
	if a == b {
		t.Fatalf("both got port %d", a)
	}
	if _, err := second.choose("API server", "--api-port", a, 0, usual); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("a port of another instance: %v", err)
	}
	first.Close()
	if got, err := second.choose("API server", "--api-port", a, 0, usual); err != nil || got != a {
		t.Errorf("after its end: %d, %v", got, err)
	}
}

func TestPortsRunOut(t *testing.T) {
	// Above 65535 there are none.
	ln, err := net.Listen("tcp", net.JoinHostPort(nodeIP, "65535"))
	if err == nil {
		defer ln.Close()
	}
	var p ports
	defer p.Close()
	if _, err := p.choose("API server", "--api-port", 0, 0, 65535); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("got %v", err)
	}
}

func TestPreflight(t *testing.T) {
	if err := haveTun(filepath.Join(t.TempDir(), "tun")); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "modprobe tun") {
		t.Errorf("without the device: %v", err)
	}
	if err := haveTun(t.TempDir()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("with a folder in its place: %v", err)
	}
	if err := (Assets{ControlPlane: "/nonexistent/cocoon-up"}).check(); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "make build") {
		t.Errorf("without a build: %v", err)
	}
}
