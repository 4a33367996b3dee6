//go:build e2e

package aggregated

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	deploy "cocoonstack.io/cocoon/deploy/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/kubelet"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// signed is a serving certificate of the cluster's authority.
func signed(t *testing.T, c *kubetest.Cluster, name, ip string) tls.Certificate {
	t.Helper()
	ca := c.Authority(t)
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name}, IPAddresses: []net.IP{net.ParseIP(ip)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, ca.Leaf, k.Public(), ca.PrivateKey.(crypto.Signer))
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: k}
}

// echoes is backend whose ports echo, also while their client still sends.
type echoes struct{ backend }

func (echoes) Forward(_ context.Context, _, _ string, _ int, stream io.ReadWriter) error {
	_, err := io.Copy(stream, stream)
	return err
}

// background runs f until the test ends, and waits for it.
func background(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

const registration = `
apiVersion: v1
kind: Service
metadata: {name: virt-api, namespace: default}
spec:
  ports: [{name: https, port: 443, targetPort: %[2]d}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: virt-api, namespace: default, labels: {kubernetes.io/service-name: virt-api}}
addressType: IPv4
ports: [{name: https, port: %[2]d, protocol: TCP}]
endpoints: [{addresses: [%[1]q], conditions: {ready: true}}]
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.subresources.kubevirt.io}
spec: {group: subresources.kubevirt.io, version: v1, groupPriorityMinimum: 1000, versionPriority: 15, caBundle: %[3]s, service: {name: virt-api, namespace: default}}
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1alpha3.subresources.kubevirt.io}
spec: {group: subresources.kubevirt.io, version: v1alpha3, groupPriorityMinimum: 1000, versionPriority: 15, caBundle: %[3]s, service: {name: virt-api, namespace: default}}
---
apiVersion: v1
kind: Node
metadata: {name: node}
---
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: web, namespace: default}
spec:
  runStrategy: Halted
  template:
    spec: {domain: {devices: {}}}
`

// KubeVirt's own client, a real API server, its proxy, and the kubelet API of a node with guests in memory. The controllers of
// VirtualMachines do not run: the test makes what they would make.
func TestVirtctl(t *testing.T) {
	virtctl, err := filepath.Abs("../../../bin/virtctl")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(virtctl); err != nil {
		need.Missing(t, "bin/virtctl is needed: make build")
		return
	}
	netns.Own(t)
	const ip = "10.77.0.1" // API servers reach aggregated APIs at no address of loopback
	c := kubetest.Up(t)
	for _, text := range append(deploy.Kinds(), deploy.Rights) {
		c.Kubectl(t, string(text), "apply", "--server-side", "-f", "-")
	}
	c.Kubectl(t, "", "wait", "--for=condition=Established", "--timeout=240s", "crd/virtualmachines.kubevirt.io", "crd/virtualmachineinstances.kubevirt.io")

	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), kubevirt.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	live, err := client.New(c.Config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", ip+":0") // a port that is free
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	own := signed(t, c, "virt-api.default.svc", ip)
	api, err := New(Options{Addr: l.Addr().String(), Certificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &own, nil }, Config: c.Config, Client: live, Uploads: &fakeUploads{}, Metrics: NewMetrics(prometheus.NewRegistry()), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	background(t, api.Start)

	serving := signed(t, c, "node", ip)
	port, err := net.Listen("tcp", ip+":0")
	if err != nil {
		t.Fatal(err)
	}
	node, err := kubelet.New(kubelet.Config{Addr: port.Addr().String(), TLS: &tls.Config{Certificates: []tls.Certificate{serving}}, Auth: everybody(), Backend: echoes{}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	background(t, func(ctx context.Context) error { return node.Run(ctx, port) })

	ca := base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Authority(t).Certificate[0]}))
	c.Kubectl(t, fmt.Sprintf(registration, ip, l.Addr().(*net.TCPAddr).Port, ca), "apply", "--server-side", "-f", "-")
	c.Kubectl(t, "", "patch", "node", "node", "--subresource=status", "--type=merge", "-p",
		fmt.Sprintf(`{"status":{"addresses":[{"type":"InternalIP","address":%q}],"daemonEndpoints":{"kubeletEndpoint":{"Port":%d}}}}`, ip, port.Addr().(*net.TCPAddr).Port))
	c.Kubectl(t, "", "wait", "--for=condition=Available", "--timeout=240s", "apiservice/v1.subresources.kubevirt.io", "apiservice/v1alpha3.subresources.kubevirt.io")

	command := func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), virtctl, args...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+filepath.Join(c.Dir, "kubeconfig"))
		return cmd
	}
	run := func(want string, args ...string) {
		t.Helper()
		out, _ := command(args...).CombinedOutput()
		if !strings.Contains(string(out), want) {
			t.Errorf("virtctl %v: %s\nwant %s", args, out, want)
		}
	}
	get := func(of, path string) string {
		t.Helper()
		return strings.TrimSpace(c.Kubectl(t, "", "get", of, "-o", "jsonpath={"+path+"}"))
	}

	run(`Server Version: version.Info{GitVersion:"v1.9.0"`, "version")
	if out := c.Kubectl(t, "", "api-resources", "--api-group=subresources.kubevirt.io"); strings.Contains(out, "virtualmachine") {
		t.Errorf("kubectl takes subresources for objects: %s", out)
	}
	run("VM web was scheduled to start", "start", "web")
	if got := get("vm/web", ".spec.runStrategy"); got != "Always" {
		t.Errorf("the strategy is %s", got)
	}
	run("Always does not support manual start requests", "start", "web")
	run(`virtualmachine.kubevirt.io "nobody" not found`, "start", "nobody")
	run("cannot update resource", "stop", "web", "--as", "mallory")
	run("VM is not running", "restart", "web")

	c.Kubectl(t, fmt.Sprintf(`
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata:
  name: web
  namespace: default
  ownerReferences: [{apiVersion: kubevirt.io/v1, kind: VirtualMachine, name: web, uid: %s, controller: true}]
spec: {domain: {devices: {}}}
status: {phase: Running}
`, get("vm/web", ".metadata.uid")), "create", "-f", "-")
	c.Kubectl(t, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata:
  name: web
  namespace: default
  labels: {kubevirt.io/created-by: %[1]s}
  ownerReferences: [{apiVersion: kubevirt.io/v1, kind: VirtualMachineInstance, name: web, uid: %[1]s, controller: true}]
spec: {nodeName: node, containers: [{name: compute, image: none, stdin: true, tty: true}]}
`, get("vmi/web", ".metadata.uid")), "create", "-f", "-")
	c.Kubectl(t, "", "patch", "pod", "web", "--subresource=status", "--type=merge", "-p", `{"status":{"phase":"Running"}}`)
	run("VM is already running", "start", "web")
	run("VM web was scheduled to restart", "restart", "web")
	if got := get("vm/web", ".status.stateChangeRequests[*].action"); got != "Stop Start" {
		t.Errorf("the requests are %s", got)
	}
	run("stop/start already underway", "restart", "web")
	run("VMI is not paused", "unpause", "vm", "web")
	run("Cocoon does not offer live migration yet", "migrate", "web")
	run("PersistentVolumeClaim data does not exist", "memory-dump", "get", "web", "--claim-name", "data")
	run("no association found", "memory-dump", "remove", "web")
	run("a VirtualMachineExport is not offered", "vmexport", "create", "out", "--vm", "web")
	run("the server reported a conflict", "guestosinfo", "web") // of a GET, virtctl prints no reason

	// The console, again after it was left.
	for range 2 {
		console := command("console", "web")
		in, err := console.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := console.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := console.Start(); err != nil {
			t.Fatal(err)
		}
		_, _ = in.Write([]byte("whoami\n"))
		got := make([]byte, 7)
		if _, err := io.ReadFull(out, got); err != nil || string(got) != "WHOAMI\n" {
			t.Errorf("%q, %v", got, err)
		}
		_, _ = in.Write([]byte{29}) // the escape key
		if err := console.Wait(); err != nil {
			t.Errorf("the console ended: %v", err)
		}
	}

	local, err := net.Listen("tcp", "127.0.0.1:0") // a port that is free
	if err != nil {
		t.Fatal(err)
	}
	local.Close()
	forward := command("port-forward", "vm/web", fmt.Sprintf("%d:80", local.Addr().(*net.TCPAddr).Port))
	var said bytes.Buffer
	forward.Stdout, forward.Stderr = &said, &said
	if err := forward.Start(); err != nil {
		t.Fatal(err)
	}
	var conn net.Conn
	eventually(t, "virtctl listens", func() bool { conn, err = net.Dial("tcp", local.Addr().String()); return err == nil })
	large := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	go func() { _, _ = conn.Write(large) }()
	got := make([]byte, len(large))
	if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, large) {
		t.Errorf("not all that was sent came back: %v", err)
	}
	conn.Close()
	_ = forward.Process.Kill()
	_ = forward.Wait()
	if t.Failed() {
		t.Log(said.String())
	}

	// By force: the pod has a second.
	run("VM web was scheduled to stop", "stop", "web", "--force", "--grace-period=0")
	if got := get("pod/web", ".metadata.deletionGracePeriodSeconds") + " " + get("vm/web", ".spec.runStrategy"); got != "1 Halted" {
		t.Errorf("grace and strategy are %s", got)
	}
	c.Kubectl(t, "", "create", "namespace", "short")
	c.Kubectl(t, "", "delete", "namespace", "short", "--timeout=240s")
}
