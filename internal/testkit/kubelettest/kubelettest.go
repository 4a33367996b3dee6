// Package kubelettest makes a real kubelet a node of a test's cluster, on a container runtime that the test has started.
//
// The kubelet is the unmodified one in bin/cocoon-up. A test must run in network and mount namespaces of its own, as for the runtime.
// The package starts no runtime and no control plane.
package kubelettest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/app/kubeletnode"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// Name and Addr are the node's. Cgroup is that of its pods.
const (
	Name   = "cocoon-kubelet-0"
	Addr   = "10.99.0.1"
	Cgroup = "cocoon-kubelet"
)

const (
	link     = "kubelet0"
	patience = 2 * time.Minute
)

// Node is a kubelet. Its methods are for the goroutine of the test.
type Node struct {
	kubeletnode.Kubelet

	t       *testing.T
	cluster *kubetest.Cluster
	program string
	dir     string
	process *exec.Cmd
}

// Start makes a node of the cluster, whose pods the runtime behind the socket runs, and waits until it is Ready. dir is a folder for its
// files that containers can reach. At the end of the test all pods of the node are deleted and the kubelet ends.
func Start(t *testing.T, c *kubetest.Cluster, socket, dir string) *Node {
	t.Helper()
	n := &Node{t: t, cluster: c, dir: dir, program: need.Built(t, "bin/cocoon-up", "make control-plane")}
	n.address()
	for _, fixed := range kubeletnode.Fixed {
		containerdtest.Hide(t, fixed)
	}
	n.certificates()
	n.Kubelet = kubeletnode.Kubelet{
		Name: Name, Address: Addr, Socket: socket, Dir: dir, Kubeconfig: c.Identity(t, Name), Cgroup: Cgroup,
		CA: filepath.Join(dir, "ca.crt"), Cert: filepath.Join(dir, "node.crt"), Key: filepath.Join(dir, "node.key"),
	}
	for _, folder := range n.Folders() {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	config, err := yaml.Marshal(n.Config(nil))
	if err != nil {
		t.Fatal(err)
	}
	n.write("kubelet.yaml", string(config))
	if err := kubeletnode.MakeCgroup(Cgroup); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.clean)
	n.Start()
	kubetest.Eventually(t, "the node's condition Ready", func() string {
		out, _ := c.TryKubectl(t, "", "get", "node", Name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		return out
	}, "True")
	return n
}

// address gives the node an address, and a route that says so.
func (n *Node) address() {
	n.t.Helper()
	for _, args := range []string{
		"link add " + link + " type veth peer name " + link + "p", "addr add " + Addr + "/24 dev " + link, "link set " + link + " up", "link set " + link + "p up",
	} {
		if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			n.t.Fatalf("ip %s: %v\n%s", args, err, out)
		}
	}
	n.t.Cleanup(func() { _ = exec.Command("ip", "link", "del", link).Run() })
}

// certificates writes what the kubelet shows to clients, and the authority that signs them and it.
func (n *Node) certificates() {
	n.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		n.t.Fatal(err)
	}
	authority := n.cluster.Authority(n.t)
	ca, err := x509.ParseCertificate(authority.Certificate[0])
	if err != nil {
		n.t.Fatal(err)
	}
	cert, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      pkix.Name{CommonName: "system:node:" + Name},
		NotBefore:    time.Now().Add(-time.Minute), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{Name}, IPAddresses: []net.IP{net.ParseIP(Addr)},
	}, ca, key.Public(), authority.PrivateKey)
	if err != nil {
		n.t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		n.t.Fatal(err)
	}
	n.write("ca.crt", block("CERTIFICATE", authority.Certificate[0]))
	n.write("node.crt", block("CERTIFICATE", cert))
	n.write("node.key", block("PRIVATE KEY", secret))
}

// Start starts the kubelet again after Kill. Its pods are as they were.
func (n *Node) Start() {
	n.t.Helper()
	log, err := os.OpenFile(n.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		n.t.Fatal(err)
	}
	defer log.Close()
	n.process = exec.Command(n.program, n.Args(filepath.Join(n.dir, "kubelet.yaml"), filepath.Join(n.dir, "root"))...)
	n.process.Stdout, n.process.Stderr = log, log
	if err := n.process.Start(); err != nil {
		n.t.Fatal(err)
	}
}

// Kill ends the kubelet at once; pods go on. It does nothing if the kubelet does not run.
func (n *Node) Kill() { n.end(syscall.SIGKILL) }

func (n *Node) end(how syscall.Signal) {
	if n.process == nil {
		return
	}
	_ = n.process.Process.Signal(how)
	_ = n.process.Wait()
	n.process = nil
}

// Log returns what the kubelet has logged.
func (n *Node) Log() string {
	text, _ := os.ReadFile(n.logFile())
	return string(text)
}

func (n *Node) logFile() string { return filepath.Join(n.dir, "kubelet.log") }

// clean deletes the node's pods while the kubelet can still remove them, and then everything else.
func (n *Node) clean() {
	if n.t.Failed() {
		n.t.Logf("what the kubelet complained of:\n%s", complaints(n.Log()))
	}
	if n.process != nil {
		pods, err := n.cluster.TryKubectl(n.t, "", "delete", "pods", "--all-namespaces", "--field-selector", "spec.nodeName="+Name, "--grace-period=1", "--timeout="+patience.String())
		if err != nil {
			n.t.Errorf("delete the node's pods: %v: %s", err, pods)
		}
	}
	n.end(syscall.SIGTERM)
	for _, path := range proc.MountsBelow(n.dir) {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			n.t.Errorf("unmount %s: %v", path, err)
		}
	}
	if err := kubeletnode.RemoveCgroup(Cgroup); err != nil {
		n.t.Error(err)
	}
}

// complaints returns the last errors and warnings of a log of klog.
func complaints(log string) string {
	const most = 50
	lines := slices.DeleteFunc(strings.Split(strings.TrimSpace(log), "\n"), func(line string) bool { return strings.HasPrefix(line, "I") })
	return strings.Join(lines[max(0, len(lines)-most):], "\n")
}

func (n *Node) write(name, text string) {
	n.t.Helper()
	if err := os.WriteFile(filepath.Join(n.dir, name), []byte(text), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

func block(kind string, data []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data}))
}
