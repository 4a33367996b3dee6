//go:build e2e

package admission_test

import (
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/port"
)

// rig is a control plane with the manifests of deploy/, a registry, and two fake nodes, whose VMs are only records. Two
// managers with the shipped permissions share one address and answer only the API server.
type rig struct {
	*kubetest.Cluster
	kube     *kubernetes.Clientset
	managers [2]*replica
	access   access
	nodes    map[string]*fakenode.Node
}

// replica is one process of the manager.
type replica struct {
	args                  []string
	webhooks, probe, stat string // addresses
	mu                    sync.Mutex
	cmd                   *exec.Cmd
}

func newRig(t *testing.T) *rig {
	t.Helper()
	known := newAccess(t)
	r := &rig{
		Cluster: kubetest.Up(t, "--with", "epoch", "--extra-config", "apiServer.admission-control-config-file="+filepath.Join(known.dir, "admission.yaml")),
		access:  known, nodes: map[string]*fakenode.Node{},
	}
	r.Install(t)
	var err error
	if r.kube, err = kubernetes.NewForConfig(r.Config); err != nil {
		t.Fatal(err)
	}
	token := filepath.Join(r.Dir, "etc", "epoch-tokens")
	epoch := "http://127.0.0.1:" + setting(t, r.Dir, "epochPort")
	for i := range r.managers {
		m := &replica{webhooks: freeAddr(t), probe: freeAddr(t), stat: freeAddr(t)}
		m.args = []string{
			"--kubeconfig", r.ServiceAccount(t, "cocoon-manager", nil), "--namespace", kubetest.Namespace, "--metrics-addr", m.stat, "--probe-addr", m.probe,
			"--epoch-url", epoch, "--epoch-token-file", token, "--webhook-addr", m.webhooks, "--webhook-hosts", "127.0.0.1",
			"--client-ca-file", filepath.Join(known.dir, "ca.crt"), "--client-allowed-names", "somebody," + asking,
		}
		r.managers[i] = m
		t.Cleanup(func() { m.kill(t) })
		m.start(t)
	}
	// The managers must not be ready yet, because the API server does not call them yet.
	for _, m := range r.managers {
		kubetest.Eventually(t, "the reason why a manager is not ready", func() string {
			if _, text := get(t, "http://"+m.probe+"/readyz?verbose"); strings.Contains(text, "[+]webhook-server ok") && strings.Contains(text, "[-]webhook-certificate failed") {
				return "certificate"
			}
			return ""
		}, "certificate")
	}
	r.Webhooks(t, r.balance(t))
	for _, m := range r.managers {
		m.ready(t)
	}
	for _, name := range []string{"a", "b"} {
		r.nodes[name] = fakenode.Start(t, fakenode.Options{Name: name, Identity: r.Identity(t, name), EpochURL: epoch, EpochTokenFile: token})
	}
	kubetest.Eventually(t, "the nodes are Ready", func() string {
		return strings.Join(strings.Fields(r.Kubectl(t, "", "get", "nodes", "-o", `jsonpath={range .items[*]}{.status.conditions[?(@.type=="Ready")].status} {end}`)), " ")
	}, "True True")
	kubetest.Eventually(t, "pods can be created", func() string {
		_, err := r.kube.CoreV1().ServiceAccounts("default").Get(t.Context(), "default", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		return ""
	}, "")
	return r
}

func (m *replica) start(t *testing.T) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	dir, err := filepath.Abs("../../../bin")
	if err != nil {
		t.Fatal(err)
	}
	m.cmd = exec.Command(filepath.Join(dir, "cocoon-manager"), m.args...)
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Getenv("MANAGER_LOG") != "" {
		m.cmd.Stderr = os.Stderr
	}
	if err := m.cmd.Start(); err != nil {
		t.Fatal(err)
	}
}

func (m *replica) kill(t *testing.T) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cmd != nil {
		_ = m.cmd.Process.Kill()
		_ = m.cmd.Wait()
		m.cmd = nil
	}
}

func (m *replica) ready(t *testing.T) {
	t.Helper()
	kubetest.Eventually(t, "the manager is ready", func() string {
		status, text := get(t, "http://"+m.probe+"/readyz?verbose")
		if status == http.StatusOK {
			return ""
		}
		return text
	}, "")
}

// balance returns an address that, like a Service, forwards each connection to a manager that accepts it.
func (r *rig) balance(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for n := 0; ; n++ {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out := r.dial(n)
			if out == nil {
				in.Close()
				continue
			}
			go func() { _, _ = io.Copy(out, in); out.Close() }()
			go func() { _, _ = io.Copy(in, out); in.Close() }()
		}
	}()
	return l.Addr().String()
}

// dial connects to the nth manager, or to the next one that accepts the connection. nil: no manager does.
func (r *rig) dial(n int) net.Conn {
	for i := range r.managers {
		if c, err := net.Dial("tcp", r.managers[(n+i)%len(r.managers)].webhooks); err == nil {
			return c
		}
	}
	return nil
}

func freeAddr(t *testing.T) string {
	t.Helper()
	addr, err := port.Free()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(text)
}

// setting returns a number from up.json.
func setting(t *testing.T, dir, key string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "up.json"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(text), `"`+key+`": `)
	if !ok {
		t.Fatalf("%s is not in %s", key, text)
	}
	return rest[:strings.IndexAny(rest, ",\n}")]
}

func (r *rig) mainPod(t *testing.T) *corev1.Pod {
	t.Helper()
	pod, err := r.kube.CoreV1().Pods("default").Get(t.Context(), "team-0", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pod
}
