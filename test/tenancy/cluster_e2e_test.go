//go:build e2e

package tenancy

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/port"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestTenancyMatrixOnACluster runs the cells as a service account that may edit one namespace, on a cluster with real guests.
// With the webhooks it runs all cells; without them only those whose pods are refused, wait or fail: the others are not affected.
// A short run has every third cell. The quick version has all of them, without a cluster.
func TestTenancyMatrixOnACluster(t *testing.T) {
	c := newCluster(t)
	began := time.Now()
	Build(c, false)
	t.Logf("the scene stands after %s", time.Since(began).Round(time.Second))
	var on, off []Case
	for i, one := range Cases() {
		if one.Row.Quick != "" || testing.Short() && i%3 != 0 {
			continue
		}
		on = append(on, one)
		if s := one.Cell.Node.State; one.Cell.Refused != "" || s == Waits {
			off = append(off, one)
		}
	}
	c.front = true
	c.matrix(on)
	t.Logf("with admission after %s", time.Since(began).Round(time.Second))
	if t.Failed() {
		return
	}
	c.admin.Kubectl(t, "", "delete", "validatingwebhookconfigurations,mutatingwebhookconfigurations", "--all")
	c.front = false
	c.matrix(off)
	t.Logf("without admission after %s", time.Since(began).Round(time.Second))
}

// cluster is a world with a control plane, a registry, a node with guests and a pod author.
type cluster struct {
	*stage
	admin *kubetest.Cluster
	thief kubernetes.Interface // may edit Dev
	token string               // the thief's
	dir   string
	vk    *exec.Cmd
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	dir, err := os.MkdirTemp("", "tenancy-") // short, because it holds sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	c := &cluster{dir: dir}
	c.stage = &stage{
		t: t, world: c, listed: filepath.Join(dir, "listed"), other: filepath.Join(dir, "other"), kept: filepath.Join(dir, "e", "snapshots"),
		image: "cocoon/demo:latest", network: "default", pace: 250 * time.Millisecond,
		hub: newHub(t, demo(t)), images: map[Whose]image.Image{},
	}
	for _, d := range []string{c.listed, c.other} {
		c.check(os.Mkdir(d, 0o755))
	}
	t.Setenv("CLONE_DIRS", c.listed) // for the manager
	c.admin = kubetest.Up(t, "--with", "epoch,manager")
	c.client, err = kubernetes.NewForConfig(c.admin.Config)
	c.check(err)
	token, err := os.ReadFile(filepath.Join(c.admin.Dir, "etc", "epoch-tokens"))
	c.check(err)
	c.stage.token, c.url = strings.TrimSpace(string(token)), fmt.Sprintf("http://127.0.0.1:%d", c.setting("epochPort"))
	c.startNode()
	for _, ns := range []string{Dev, Prod} {
		_, err := c.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, metav1.CreateOptions{})
		c.check(err)
	}
	for _, ns := range []string{Dev, Prod} {
		c.until("pods can be made in "+ns, func() string {
			_, err := c.client.CoreV1().ServiceAccounts(ns).Get(t.Context(), "default", metav1.GetOptions{})
			return text(err)
		})
	}
	c.account()
	return c
}

// demo is the image that the guests of the tests boot.
func demo(t *testing.T) v1.Image {
	t.Helper()
	dir := t.TempDir()
	file, err := os.Open(program("demo.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for tr := tar.NewReader(file); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil && h.Typeflag == tar.TypeReg {
			path := filepath.Join(dir, filepath.Clean("/"+h.Name))
			var data []byte
			if data, err = io.ReadAll(tr); err == nil {
				err = errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, data, 0o600))
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	list, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	img, err := index.Image(list.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// setting reads a number from up.json.
func (c *cluster) setting(key string) int {
	c.t.Helper()
	data, err := os.ReadFile(filepath.Join(c.admin.Dir, "up.json"))
	c.check(err)
	all := map[string]any{}
	c.check(json.Unmarshal(data, &all))
	n, _ := all[key].(float64)
	return int(n)
}

// account creates the service account that may edit Dev, and nothing else.
func (c *cluster) account() {
	c.t.Helper()
	ctx := c.t.Context()
	_, err := c.client.CoreV1().ServiceAccounts(Dev).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "author"}}, metav1.CreateOptions{})
	c.check(err)
	_, err = c.client.RbacV1().RoleBindings(Dev).Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "author"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "edit"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: Dev, Name: "author"}},
	}, metav1.CreateOptions{})
	c.check(err)
	req, err := c.client.CoreV1().ServiceAccounts(Dev).CreateToken(ctx, "author", &authv1.TokenRequest{Spec: authv1.TokenRequestSpec{ExpirationSeconds: new(int64(7200))}}, metav1.CreateOptions{})
	c.check(err)
	c.token = req.Status.Token
	config := rest.AnonymousClientConfig(c.admin.Config)
	config.BearerToken, config.QPS, config.Burst, config.WarningHandler = c.token, 1000, 1000, rest.NoWarnings{}
	config.Wrap(kubetest.Patient)
	c.thief, err = kubernetes.NewForConfig(config)
	c.check(err)
	c.until("the author may make pods", func() string {
		_, err := c.thief.CoreV1().Pods(Dev).List(ctx, metav1.ListOptions{})
		return text(err)
	})
	if _, err := c.thief.CoreV1().Pods(Prod).List(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		c.t.Fatalf("the author sees pods of %s: %v", Prod, err)
	}
}

// program is the path of a program that `make build` built.
func program(name string) string {
	path, err := filepath.Abs(filepath.Join("..", "..", "bin", name))
	if err != nil {
		panic(err)
	}
	return path
}

// startNode starts a daemon with the operator's settings, and a virtual node that uses it.
func (c *cluster) startNode() {
	c.t.Helper()
	config := filepath.Join(c.dir, "engine.yaml")
	c.check(os.WriteFile(config, fmt.Appendf(nil, "stateDir: %[1]s/e\nrunDir: %[1]s/r\nsocket: %[1]s/d.sock\ncloneDirs: [%[2]s]\nimages: {allow: [127.0.0.1]}\nnetwork: {instance: e2eten, bridge: cce2eten}\nqemu: {cgroup: cocoon-e2eten, uidBase: 750000}\n", c.dir, c.listed), 0o600))
	c.t.Cleanup(func() {
		if out, err := exec.Command(program("cocoond"), "shutdown", "--config", config).CombinedOutput(); err != nil {
			c.t.Errorf("shutdown: %v\n%s", err, out)
		}
	})
	c.spawn(nil, "cocoond", "--config", config)
	client, err := nodeclient.Dial(filepath.Join(c.dir, "d.sock"))
	c.check(err)
	c.t.Cleanup(func() { client.Close() })
	c.machine = client
	c.until("the daemon answers", func() string { return text(second(client.List(c.t.Context()))) })
	image, err := os.Open(program("demo.tar"))
	c.check(err)
	defer image.Close()
	_, err = client.ImportImage(c.t.Context(), "cocoon/demo", image, func(int64) {})
	c.check(err)
	c.startVirtual()
}

// startVirtual starts the virtual node.
func (c *cluster) startVirtual() {
	c.t.Helper()
	addr, err := port.Free()
	c.check(err)
	_, kubelet, err := net.SplitHostPort(addr)
	c.check(err)
	env := []string{
		"KUBECONFIG=" + filepath.Join(c.admin.Dir, "kubeconfig"), "COCOON_SOCKET=" + filepath.Join(c.dir, "d.sock"), "VK_NODE_NAME=" + NodeName,
		"VK_KUBELET_PORT=" + kubelet, "VK_NODE_IP=127.0.0.1", "VK_BIND_ADDRESS=127.0.0.1", "VK_METRICS_ADDR=", "COCOON_ROOT_DIR=" + filepath.Join(c.dir, "e"),
		"VK_LEASES_PATH=" + filepath.Join(c.dir, "e", "net", "leases.json"), "EPOCH_URL=" + c.url, "VK_EPOCH_TOKEN_FILE=" + filepath.Join(c.admin.Dir, "etc", "epoch-tokens"),
		"VK_PUBLIC_REPOSITORIES=" + PublicRepositories, "VK_STATIC_FORWARD_NETWORKS=192.0.2.0/24", "VK_NODE_MEM=200Gi", "VK_NODE_CPU=500",
	}
	for name, file := range map[string]string{"VK_CLIENT_CA": "ca.crt", "VK_TLS_CERT": "kubelet.crt", "VK_TLS_KEY": "kubelet.key"} {
		if path := filepath.Join(c.admin.Dir, "pki", file); exists(path) {
			env = append(env, name+"="+path)
		}
	}
	c.vk = c.spawn(env, "vk-cocoon")
	c.until("the node is ready", func() string {
		n, err := c.client.CoreV1().Nodes().Get(c.t.Context(), NodeName, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		for _, cond := range n.Status.Conditions {
			if cond.Type == corev1.NodeReady && cond.Status == corev1.ConditionTrue {
				return ""
			}
		}
		return "it is not"
	})
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// spawn starts a program that runs until the test ends. If the program ends earlier, its log says why.
func (c *cluster) spawn(env []string, name string, args ...string) *exec.Cmd {
	c.t.Helper()
	log, err := os.OpenFile(filepath.Join(c.dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	c.check(err)
	defer log.Close()
	cmd := exec.Command(program(name), args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), env...), log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.check(cmd.Start())
	c.t.Cleanup(func() {
		end(cmd, syscall.SIGTERM)
		if data, err := os.ReadFile(log.Name()); err == nil && c.t.Failed() {
			c.t.Logf("%s:\n%s", name, data[max(0, len(data)-3000):])
		}
	})
	return cmd
}

// end ends a program, unless it has already ended.
func end(cmd *exec.Cmd, with syscall.Signal) {
	if cmd.ProcessState == nil {
		_ = cmd.Process.Signal(with)
		_ = cmd.Wait()
	}
}

// create implements world.
func (c *cluster) create(p *corev1.Pod) {
	c.t.Helper()
	p.Spec.NodeName = NodeName
	c.check(c.createAs(c.client, p))
}

// createAs creates a pod, which may exist already: the API server answers Timeout to a request that it may still carry out, and the client repeats it.
func (c *cluster) createAs(who kubernetes.Interface, p *corev1.Pod) error {
	_, err := who.CoreV1().Pods(p.Namespace).Create(c.t.Context(), p, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// author implements world.
func (c *cluster) author(p *corev1.Pod) (why string) {
	c.t.Helper()
	p.Spec.NodeName = NodeName
	return text(c.createAs(c.thief, p))
}

// change implements world.
func (c *cluster) change(namespace, name string, f func(*corev1.Pod)) {
	c.t.Helper()
	c.until("change of "+namespace+"/"+name, func() string { // the node may have changed the pod meanwhile
		p := c.get(namespace, name)
		if p.Annotations == nil {
			p.Annotations = map[string]string{}
		}
		f(p)
		return text(second(c.client.CoreV1().Pods(namespace).Update(c.t.Context(), p, metav1.UpdateOptions{})))
	})
}

// remove implements world.
func (c *cluster) remove(namespace, name string) {
	c.t.Helper()
	c.check(c.client.CoreV1().Pods(namespace).Delete(c.t.Context(), name, metav1.DeleteOptions{}))
}

// remembers implements world: it looks into the guest.
func (c *cluster) remembers(rec vm.Record) (secret, boot string) {
	if rec.State != vm.StateRunning || !rec.AgentReady {
		return "", ""
	}
	ctx, cancel := context.WithTimeout(c.t.Context(), 30*time.Second)
	defer cancel()
	var out bytes.Buffer
	_, err := c.machine.Exec(ctx, string(rec.ID), guest.Exec{Command: []string{"sh", "-c", "cat /proc/sys/kernel/random/boot_id " + secretFile}}, guest.Streams{Stdout: &out})
	if err != nil {
		return "", ""
	}
	boot, secret, _ = strings.Cut(strings.TrimSpace(out.String()), "\n")
	return secret, boot
}

// again implements world: the virtual node is killed, and another one adopts its VMs.
func (c *cluster) again() {
	c.t.Helper()
	end(c.vk, syscall.SIGKILL)
	c.startVirtual()
}

// closed implements world. It does nothing: the quick version tests the kubelet API of the node for static machines.
func (c *cluster) closed([]Case) {}
