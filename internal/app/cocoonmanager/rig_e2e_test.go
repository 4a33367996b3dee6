//go:build e2e

package cocoonmanager_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/port"
)

// rig is a control plane with the content of deploy/, a registry and a node whose VMs exist only as records. Managers
// and nodes have the shipped rights and no others.
type rig struct {
	*kubetest.Cluster
	api   client.Client
	kube  *kubernetes.Clientset
	epoch *process
	url   string // of the registry
	token string // path
	node  *fakenode.Node
}

func newRig(t *testing.T) *rig {
	t.Helper()
	// A node counts as away after 24 s without a report, not after 50. Nodes report every 10 s; a busy machine may delay a report.
	r := &rig{Cluster: kubetest.Up(t, "--extra-config", "controllerManager.node-monitor-grace-period=24s", "--extra-config", "controllerManager.node-monitor-period=500ms")}
	r.Install(t)
	scheme := runtime.NewScheme()
	_, _, _ = clientgoscheme.AddToScheme(scheme), v1.AddToScheme(scheme), kubevirt.AddToScheme(scheme)
	var err, kubeErr error
	r.api, err = client.New(r.Config, client.Options{Scheme: scheme})
	r.kube, kubeErr = kubernetes.NewForConfig(r.Config)
	if err != nil || kubeErr != nil {
		t.Fatal(err, kubeErr)
	}
	dir := t.TempDir()
	r.token = filepath.Join(dir, "token")
	if err := os.WriteFile(r.token, []byte("sesame\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	addr := freeAddr(t)
	r.url = "http://" + addr
	r.epoch = newProcess(t, "epoch", "serve", "--addr", addr, "--data", filepath.Join(dir, "epoch"), "--token-file", r.token)
	r.epoch.start(t)
	r.node = r.startNode(t, "one", "")
	return r
}

// startNode runs a node until the test ends. Then its Node object is removed too: a cluster in which most nodes are
// away evicts no pods.
func (r *rig) startNode(t *testing.T, name, pool string) *fakenode.Node {
	t.Helper()
	t.Cleanup(func() {
		if err := r.kube.CoreV1().Nodes().Delete(context.Background(), name, metav1.DeleteOptions{}); client.IgnoreNotFound(err) != nil {
			t.Errorf("node %s: %v", name, err)
		}
	})
	n := fakenode.Start(t, fakenode.Options{Name: name, Pool: pool, Identity: r.Identity(t, name), EpochURL: r.url, EpochTokenFile: r.token})
	kubetest.Eventually(t, "node "+name+" is Ready", func() string { return r.nodeReady(t, name) }, "True")
	return n
}

func (r *rig) nodeReady(t *testing.T, name string) string {
	t.Helper()
	n, err := r.kube.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		return err.Error()
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return string(c.Status)
		}
	}
	return ""
}

// manager is a process that is not started yet. It reaches the API server through via, if via is not nil.
func (r *rig) manager(t *testing.T, via *httptest.Server, flags ...string) *process {
	t.Helper()
	return newProcess(t, "cocoon-manager", append([]string{
		"--kubeconfig", r.ServiceAccount(t, "cocoon-manager", via), "--namespace", kubetest.Namespace, "--metrics-addr", "0",
		"--epoch-url", r.url, "--epoch-token-file", r.token,
	}, flags...)...)
}

// namespace makes a namespace in which pods can be created.
func (r *rig) namespace(t *testing.T, name string) {
	t.Helper()
	if err := r.api.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, name+" has its account", func() string {
		_, err := r.kube.CoreV1().ServiceAccounts(name).Get(t.Context(), "default", metav1.GetOptions{})
		return fmt.Sprint(err)
	}, "<nil>")
}

func (r *rig) create(t *testing.T, ns, name string, spec v1.CocoonSetSpec) {
	t.Helper()
	spec.Agent.Image, spec.Agent.Mode = fakenode.Image, "run"
	if err := r.api.Create(t.Context(), &v1.CocoonSet{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}, Spec: spec}); err != nil {
		t.Fatal(err)
	}
}

// patch merges text into the set.
func (r *rig) patch(t *testing.T, ns, name, text string) {
	t.Helper()
	set := &v1.CocoonSet{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
	if err := r.api.Patch(t.Context(), set, client.RawPatch("application/merge-patch+json", []byte(text))); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) set(t *testing.T, ns, name string) *v1.CocoonSet {
	t.Helper()
	set := &v1.CocoonSet{}
	if err := r.api.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: name}, set); err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	return set
}

// state waits until the set is in a phase with the given numbers of ready agents and toolboxes, as in "Running 2/2
// 1/1".
func (r *rig) state(t *testing.T, ns, name, want string) {
	t.Helper()
	defer func() {
		if t.Failed() {
			out, _ := r.TryKubectl(t, "", "get", "cocoonsets,pods,events", "-n", ns, "-o", "wide")
			t.Log(out)
		}
	}()
	kubetest.Eventually(t, ns+"/"+name, func() string {
		set := r.set(t, ns, name)
		s := set.Status
		if s.ObservedGeneration != set.Generation || set.Generation == 0 {
			return fmt.Sprintf("%s of generation %d, not %d", s.Phase, s.ObservedGeneration, set.Generation)
		}
		return fmt.Sprintf("%s %d/%d %d/%d", s.Phase, s.ReadyAgents, s.DesiredAgents, s.ReadyToolboxes, s.DesiredToolboxes)
	}, want)
}

func (r *rig) pods(t *testing.T, ns string) map[string]corev1.Pod {
	t.Helper()
	var list corev1.PodList
	if err := r.api.List(t.Context(), &list, client.InNamespace(ns)); err != nil {
		t.Fatal(err)
	}
	pods := map[string]corev1.Pod{}
	for _, p := range list.Items {
		pods[p.Name] = p
	}
	return pods
}

// boot is the boot id of a pod's guest: it changes with every boot, and only then.
func boot(t *testing.T, n *fakenode.Node, ns, pod string) string {
	t.Helper()
	g := n.Guest(contract.VMName(ns, pod))
	if g == nil || g.BootID == "" {
		t.Fatalf("the guest of %s does not run", pod)
	}
	return g.BootID
}

// tag is the HTTP status of the registry for a tag of a VM.
func (r *rig) tag(t *testing.T, repo, tag string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodHead, r.url+"/v2/"+repo+"/manifests/"+tag, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer sesame")
	status := 0
	kubetest.Eventually(t, "the answer of the registry, which other tests may restart", func() string {
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err.Error()
		}
		resp.Body.Close()
		status = resp.StatusCode
		return "an answer"
	}, "an answer")
	return status
}

var forbidden = regexp.MustCompile(`(?m)^apiserver_request_total\{code="403",(.*)\} (\S+)$`)

// early matches requests of a node about a pod that the Node authorizer does not know yet, or knows as removed: the
// node retries.
var early = regexp.MustCompile(`resource="serviceaccounts",.*subresource="token"|resource="(secrets|configmaps)",.*verb="(GET|WATCH)"`)

// denied counts the requests that the API server rejected for lack of rights, by kind. Early requests of nodes do not
// count.
func (r *rig) denied(t *testing.T) map[string]int {
	t.Helper()
	text, err := r.kube.RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]int{}
	for _, m := range forbidden.FindAllStringSubmatch(string(text), -1) {
		n, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			t.Fatal(err)
		}
		if !early.MatchString(m[1]) {
			all[m[1]] = int(n)
		}
	}
	return all
}

func freeAddr(t *testing.T) string {
	t.Helper()
	addr, err := port.Free()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

// process is one of our programs; it can be killed and restarted.
type process struct {
	name, path string
	args       []string
	log        *os.File

	mu    sync.Mutex
	cmd   *exec.Cmd
	ended chan struct{}
}

func newProcess(t *testing.T, name string, args ...string) *process {
	t.Helper()
	p := &process{name: name, path: need.Built(t, "bin/"+name, "make binaries")}
	if name == "cocoon-manager" { // its health address is its own choice
		args = append(args, "--probe-addr", freeAddr(t))
	}
	p.args = args
	var err error
	if p.log, err = os.Create(filepath.Join(t.TempDir(), name+".log")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.kill()
		text, _ := os.ReadFile(p.log.Name())
		if t.Failed() {
			t.Logf("%s:\n%s", name, text[max(0, len(text)-6000):])
		}
		if bytes.Contains(text, []byte("sesame")) {
			t.Errorf("the log of %s has the registry's token", name)
		}
		p.log.Close()
	})
	return p
}

func (p *process) start(t testing.TB) {
	t.Helper()
	if err := p.run(); err != nil {
		t.Fatal(err)
	}
}

func (p *process) run() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	cmd, ended := exec.Command(p.path, p.args...), make(chan struct{})
	cmd.Stdout, cmd.Stderr = p.log, p.log
	if err := cmd.Start(); err != nil {
		return err
	}
	p.cmd, p.ended = cmd, ended
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	return nil
}

// kill is kill -9. It returns when the process has ended.
func (p *process) kill() {
	p.mu.Lock()
	cmd, ended := p.cmd, p.ended
	p.mu.Unlock()
	if cmd != nil {
		_ = cmd.Process.Kill()
		<-ended
	}
}

// over reports whether the process has ended.
func (p *process) over() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// led counts how often the process became the leader, according to its log.
func (p *process) led() int {
	log, _ := os.ReadFile(p.log.Name())
	return strings.Count(string(log), "Successfully acquired lease")
}
