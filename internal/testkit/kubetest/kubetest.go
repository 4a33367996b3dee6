// Package kubetest gives a test a real Kubernetes control plane: API server, scheduler and controllers, without a node.
// It starts the output of `make build`, installs the content of deploy/, and contains no product code.
package kubetest

import (
	"context"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"cocoonstack.io/cocoon/deploy/manager"
)

// Namespace is the namespace that deploy/ uses in a cluster.
const Namespace = "cocoon-system"

// Cluster is a control plane.
type Cluster struct {
	Dir    string       // of the instance of `cocoon up`
	Config *rest.Config // an administrator's access
	up     []string     // the arguments it was started with
}

// Start runs a control plane until the test ends and returns an administrator's access to it. The custom resources of
// Cocoon are installed. args are additional arguments of `cocoon up`. It takes about three seconds: start one per
// package and give each test its own namespace.
func Start(t *testing.T, args ...string) *rest.Config {
	t.Helper()
	return Up(t, args...).Config
}

// Up is Start for tests that need the instance too.
func Up(t *testing.T, args ...string) *Cluster {
	t.Helper()
	// Not t.TempDir: the names of unix sockets must stay short.
	dir, err := os.MkdirTemp("", "kubetest-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	// Disks of test machines stop for seconds: nothing here presumes that etcd survives a power cut.
	c := &Cluster{Dir: dir, up: append([]string{"up", "--dir", dir, "--nodes", "0", "--detach", "--extra-config", "etcd.unsafe-no-fsync=true"}, args...)}
	c.Start(t)
	t.Cleanup(func() { c.Stop(t) })
	c.Config, err = clientcmd.BuildConfigFromFlags("", filepath.Join(dir, "kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	c.Config.QPS, c.Config.Burst = 1000, 1000
	c.Config.Wrap(Patient)
	return c
}

// Stop stops the control plane; its objects stay. Stopping twice is no error.
func (c *Cluster) Stop(t *testing.T) {
	t.Helper()
	if out, err := exec.Command(bin(t, "cocoon"), "down", "--dir", c.Dir).CombinedOutput(); err != nil {
		t.Errorf("stop the control plane: %v\n%s", err, out)
	}
}

// Start restarts a stopped control plane at the same address.
func (c *Cluster) Start(t *testing.T) {
	t.Helper()
	if out, err := exec.Command(bin(t, "cocoon"), c.up...).CombinedOutput(); err != nil {
		t.Fatalf("start a control plane (make build makes it): %v\n%s", err, out)
	}
}

// Kubectl runs kubectl as the administrator, with input, and returns what it prints. A failure ends the test.
func (c *Cluster) Kubectl(t *testing.T, input string, args ...string) string {
	t.Helper()
	out, err := c.TryKubectl(t, input, args...)
	if err != nil {
		t.Fatalf("kubectl %v: %v\n%s", args, err, out)
	}
	return out
}

// TryKubectl is Kubectl for commands that may fail. It repeats one that the API server has no time for.
func (c *Cluster) TryKubectl(t *testing.T, input string, args ...string) (string, error) {
	t.Helper()
	for try := 1; ; try++ {
		cmd := exec.Command(bin(t, "kubectl"), append([]string{"--kubeconfig", filepath.Join(c.Dir, "kubeconfig")}, args...)...)
		cmd.Stdin = strings.NewReader(input)
		out, err := cmd.CombinedOutput()
		if err == nil || try == tries || !late(string(out)) {
			return string(out), err
		}
	}
}

// Install applies everything in deploy/. Deployments are scaled to zero, because no node here runs containers. The
// webhooks are not registered, because their Service is unreachable here; see Webhooks.
func (c *Cluster) Install(t *testing.T) {
	t.Helper()
	var shipped []string
	for doc := range strings.SplitSeq(c.Kubectl(t, "", "kustomize", filepath.Join(root(t), "deploy")), "\n---\n") {
		if !strings.Contains("\n"+doc, "WebhookConfiguration\n") {
			shipped = append(shipped, doc)
		}
	}
	c.Kubectl(t, strings.Join(shipped, "\n---\n"), "apply", "--server-side", "--force-conflicts", "-f", "-")
	c.Kubectl(t, "", "scale", "deployment", "--namespace", Namespace, "--all", "--replicas=0")
}

// Webhooks registers the webhooks of a manager at HOST:PORT.
func (c *Cluster) Webhooks(t *testing.T, addr string) {
	t.Helper()
	c.Kubectl(t, string(manager.WebhooksAt("https://"+addr)), "apply", "--server-side", "-f", "-")
}

// ServiceAccount writes a kubeconfig with the rights of a service account in Namespace, and no others, and returns its
// path. If via, a TLS server, is not nil, the kubeconfig reaches the API server through it.
func (c *Cluster) ServiceAccount(t *testing.T, name string, via *httptest.Server) string {
	t.Helper()
	return c.account(t, name, via, nil)
}

// NodeAccount is ServiceAccount with a token bound to a node. It makes the node if it does not exist.
func (c *Cluster) NodeAccount(t *testing.T, name, node string) string {
	t.Helper()
	kube, err := kubernetes.NewForConfig(c.Config)
	if err != nil {
		t.Fatal(err)
	}
	_, err = kube.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	n, err := kube.CoreV1().Nodes().Get(t.Context(), node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return c.account(t, name, nil, &authv1.BoundObjectReference{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID})
}

func (c *Cluster) account(t *testing.T, name string, via *httptest.Server, to *authv1.BoundObjectReference) string {
	t.Helper()
	kube, err := kubernetes.NewForConfig(c.Config)
	if err != nil {
		t.Fatal(err)
	}
	seconds := int64(3600)
	token, err := kube.CoreV1().ServiceAccounts(Namespace).CreateToken(t.Context(), name,
		&authv1.TokenRequest{Spec: authv1.TokenRequestSpec{ExpirationSeconds: &seconds, BoundObjectRef: to}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("get a token for %s: %v", name, err)
	}
	cluster := &clientcmdapi.Cluster{Server: c.Config.Host, CertificateAuthorityData: c.Config.CAData}
	if via != nil {
		cluster.Server, cluster.CertificateAuthorityData = via.URL, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: via.Certificate().Raw})
	}
	return c.kubeconfig(t, name, cluster, &clientcmdapi.AuthInfo{Token: token.Status.Token})
}

func (c *Cluster) kubeconfig(t *testing.T, name string, cluster *clientcmdapi.Cluster, as *clientcmdapi.AuthInfo) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name+".kubeconfig")
	err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": cluster},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": as},
		Contexts:       map[string]*clientcmdapi.Context{"c": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "c",
	}, path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Wide lets nodes join with the service account vk-cocoon, as deploy/vk-cocoon/wide allows.
func (c *Cluster) Wide(t *testing.T) {
	t.Helper()
	for _, args := range [][]string{{"-f", filepath.Join(root(t), "deploy", "namespace.yaml")}, {"-k", filepath.Join(root(t), "deploy", "vk-cocoon", "wide")}} {
		c.Kubectl(t, "", append([]string{"apply", "--server-side", "--force-conflicts"}, args...)...)
	}
}

// patience is the timeout of Eventually: a machine that tests share may be busy.
const patience = 4 * time.Minute

// Eventually waits until get returns want.
func Eventually(t *testing.T, what string, get func() string, want string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		last := get()
		if last == want {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s is %q, want %q", what, last, want)
		}
	}
}

// bin is the path of a program built by `make build`.
func bin(t *testing.T, name string) string {
	t.Helper()
	return filepath.Join(root(t), "bin", name)
}

// root is the folder of the module that the test belongs to.
func root(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	t.Fatal("no go.mod is above the test")
	return ""
}
