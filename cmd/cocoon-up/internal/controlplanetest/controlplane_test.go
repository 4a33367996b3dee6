package controlplanetest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// stopTime is the limit that the control plane promises.
const stopTime = 10 * time.Second

func TestStateSurvivesKill(t *testing.T) {
	c := newCluster(t)

	p := c.start(t)
	c.eventually(t, "ok", "get", "--raw", "/readyz")
	c.must(t, "create", "namespace", "kept")
	p.signal(t, syscall.SIGKILL)
	p.wait(t, stopTime)

	p = c.start(t)
	c.eventually(t, "ok", "get", "--raw", "/readyz")
	c.must(t, "get", "namespace", "kept")
	// The controller manager works: it creates this account.
	c.eventually(t, "serviceaccount/default", "-n", "kept", "get", "serviceaccount", "default", "-o", "name")

	p.signal(t, syscall.SIGTERM)
	if code := p.wait(t, stopTime); code != 0 {
		t.Errorf("exit code after SIGTERM: %d", code)
	}
}

func TestPodIsScheduledToVirtualNode(t *testing.T) {
	c := newCluster(t)
	c.start(t)
	c.eventually(t, "ok", "get", "--raw", "/readyz")

	c.write(t, "node.yaml", []byte(`{apiVersion: v1, kind: Node, metadata: {name: virtual}}`))
	if out, err := c.kubectl("node", "create", "-f", filepath.Join(c.dir, "node.yaml")); err != nil {
		t.Fatalf("node cannot register itself: %v: %s", err, out)
	}
	status := `{"status": {"capacity": {"cpu": "2", "memory": "1Gi", "pods": "10"}, "conditions": [{"type": "Ready", "status": "True"}]}}`
	if err := c.patch(t, "node", "/api/v1/nodes/virtual/status", status); err != nil {
		t.Fatalf("node cannot write its status: %v", err)
	}
	// A node without a recent heartbeat is tainted as not ready; the pod tolerates that.
	c.write(t, "pod.yaml", []byte(`{apiVersion: v1, kind: Pod, metadata: {name: guest}, spec: {containers: [{name: main, image: none}], tolerations: [{operator: Exists}]}}`))
	c.eventually(t, "serviceaccount/default", "get", "serviceaccount", "default", "-o", "name")
	c.must(t, "create", "-f", filepath.Join(c.dir, "pod.yaml"))
	c.eventually(t, "virtual", "get", "pod", "guest", "-o", "jsonpath={.spec.nodeName}")

	if err := c.patch(t, "node", "/api/v1/namespaces/default/pods/guest/status", `{"status": {"phase": "Running"}}`); err != nil {
		t.Errorf("node cannot write the status of its pod: %v", err)
	}
	if out, err := c.kubectl("node", "delete", "pod", "guest", "--grace-period=0", "--force"); err != nil {
		t.Errorf("node cannot delete its pod: %v: %s", err, out)
	}
	c.write(t, "other.yaml", []byte(`{apiVersion: v1, kind: Node, metadata: {name: other}}`))
	if out, err := c.kubectl("node", "create", "-f", filepath.Join(c.dir, "other.yaml")); err == nil {
		t.Errorf("node may register another node: %s", out)
	}
}

func TestBindsOnlyTheAPIServerPort(t *testing.T) {
	c := newCluster(t)
	p := c.start(t)
	c.eventually(t, "ok", "get", "--raw", "/readyz")
	c.eventually(t, "serviceaccount/default", "get", "serviceaccount", "default", "-o", "name")

	want := []string{netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(c.port)).String()}
	if got := listening(t, p.cmd.Process.Pid); !slices.Equal(got, want) {
		t.Errorf("listens on %q, want %q", got, want)
	}
}

func TestStopsWhileStarting(t *testing.T) {
	c := newCluster(t)
	p := c.start(t)
	// The lock is the first file that it creates. Signals are already handled at that point.
	if !until(stopTime, func() bool {
		_, err := os.Stat(filepath.Join(c.dir, "data", "lock"))
		return err == nil
	}) {
		t.Fatal("not starting")
	}
	p.signal(t, syscall.SIGINT)
	if code := p.wait(t, stopTime); code != 0 {
		t.Errorf("exit code after SIGINT: %d", code)
	}
}

func TestSecondInstanceIsRefused(t *testing.T) {
	c := newCluster(t)
	c.start(t)
	c.eventually(t, "ok", "get", "--raw", "/readyz")
	second := c.start(t)
	if code := second.wait(t, stopTime); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	if !strings.Contains(second.log.String(), "in use by another control plane") {
		t.Errorf("log does not say why:\n%s", second.log)
	}
	c.must(t, "get", "--raw", "/readyz")
}

func TestFailureEndsTheProcess(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(map[string]any)
		code   int
		want   string
	}{
		{"unknown key", func(c map[string]any) { c["extra"] = 1 }, 2, "extra"},
		{"unknown flag", func(c map[string]any) {
			c["apiServer"] = map[string]any{"extraArgs": map[string]string{"no-such-flag": "1"}}
		}, 1, "kube-apiserver flags"},
		{"wrong value for the API server", func(c map[string]any) {
			c["apiServer"] = map[string]any{"extraArgs": map[string]string{"authorization-mode": "Nobody"}}
		}, 1, "kube-apiserver: "},
		{"unknown controller", func(c map[string]any) { c["controllers"] = []string{"no-such"} }, 1, "kube-controller-manager: "},
		{"scheduler configuration missing", func(c map[string]any) {
			c["scheduler"].(map[string]any)["extraArgs"] = map[string]string{"config": "/nonexistent"}
		}, 1, "kube-scheduler: "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCluster(t)
			c.config(t, tt.change)
			p := c.start(t)
			if code := p.wait(t, time.Minute); code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if log := p.log.String(); !strings.Contains(log, tt.want) {
				t.Errorf("log does not mention %q:\n%s", tt.want, log)
			}
		})
	}
}

func TestLogsJSON(t *testing.T) {
	c := newCluster(t)
	c.config(t, func(c map[string]any) { c["logFormat"] = "json" })
	p := c.start(t)
	c.eventually(t, "ok", "get", "--raw", "/readyz")
	p.signal(t, syscall.SIGTERM)
	p.wait(t, stopTime)

	var records int
	for line := range strings.Lines(p.log.String()) {
		if strings.HasPrefix(line, "{") && json.Valid([]byte(line)) {
			records++
			continue
		}
		t.Errorf("not a JSON record: %s", line)
	}
	if records < 10 {
		t.Errorf("only %d records", records)
	}
}

// listening returns the TCP addresses on which process pid listens.
func listening(t *testing.T, pid int) []string {
	t.Helper()
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	must(t, err)
	sockets := map[string]bool{}
	for _, fd := range fds {
		if target, err := os.Readlink(fd); err == nil {
			sockets[target] = true
		}
	}
	var addrs []string
	for _, table := range []string{"tcp", "tcp6"} {
		f, err := os.Open("/proc/net/" + table)
		if os.IsNotExist(err) {
			continue // no IPv6
		}
		must(t, err)
		defer f.Close()
		for s := bufio.NewScanner(f); s.Scan(); {
			const listen = "0A"
			field := strings.Fields(s.Text())
			if len(field) > 9 && field[3] == listen && sockets["socket:["+field[9]+"]"] {
				addrs = append(addrs, address(t, field[1]))
			}
		}
	}
	return addrs
}

// address converts the kernel's "0100007F:1F90" to "127.0.0.1:8080". IPv6
// addresses, which the test does not expect, stay unchanged.
func address(t *testing.T, s string) string {
	t.Helper()
	host, port, _ := strings.Cut(s, ":")
	if len(host) != 8 {
		return s
	}
	n, err := strconv.ParseUint(host, 16, 32)
	must(t, err)
	p, err := strconv.ParseUint(port, 16, 16)
	must(t, err)
	ip := netip.AddrFrom4([4]byte{byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24)})
	return netip.AddrPortFrom(ip, uint16(p)).String()
}
