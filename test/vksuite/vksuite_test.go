//go:build e2e

// Package vksuite runs the end-to-end suite that virtual-kubelet exports for its providers against our virtual node, on a
// real control plane. The node's engine is also real. The guests are those of enginetest, which need no hypervisor.
//
// It needs root and `make build`.
package vksuite

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/test/e2e"
	"github.com/vishvananda/netlink"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/app/vkcocoon"
	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

const (
	nodeName  = "suite"
	nodeIP    = "192.0.2.1" // of the loopback link: the API server connects to no loopback address
	nodePort  = 11250
	namespace = "default"
)

func TestVirtualKubelet(t *testing.T) {
	netns.Require(t)
	address(t)
	config := kubetest.Start(t)
	kubeconfig, client := save(t, config), must(kubernetes.NewForConfig(config))(t)
	run(t, func(ctx context.Context) error { return sign(ctx, client) })
	serve(t, kubeconfig, guests(t))
	until(t, "the kubelet API answers by way of the API server", func() error {
		return client.CoreV1().RESTClient().Get().Resource("nodes").Name(nodeName).SubResource("proxy").Suffix("healthz").Do(t.Context()).Error()
	})
	front(t, config, client)
	name(t, client)
	e2e.NewEndToEndTestSuite(e2e.EndToEndTestSuiteConfig{
		Kubeconfig: kubeconfig, Namespace: namespace, NodeName: nodeName, WatchTimeout: 4 * time.Minute,
	}).Run(t)
}

func address(t *testing.T) {
	t.Helper()
	lo := must(netlink.LinkByName("lo"))(t)
	if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(nodeIP), Mask: net.CIDRMask(32, 32)}}); err != nil {
		t.Fatal(err)
	}
}

// save writes the credentials for the cluster as a kubeconfig.
func save(t *testing.T, c *rest.Config) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	file := clientcmdapi.NewConfig()
	file.Clusters["c"] = &clientcmdapi.Cluster{Server: c.Host, CertificateAuthority: c.CAFile, CertificateAuthorityData: c.CAData}
	file.AuthInfos["u"] = &clientcmdapi.AuthInfo{
		ClientCertificate: c.CertFile, ClientCertificateData: c.CertData, ClientKey: c.KeyFile, ClientKeyData: c.KeyData, Token: c.BearerToken,
	}
	file.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	file.CurrentContext = "x"
	if err := clientcmd.WriteToFile(*file, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// images contains every image.
type images struct{ enginetest.Images }

func (images) Get(_ context.Context, ref string) (image.Image, error) {
	return image.Image{ID: "sha256:demo", Name: ref, Type: vm.ImageOCI, Config: vm.Process{Entrypoint: []string{"/init"}}}, nil
}

// runtime is an engine that already has all images.
type runtime struct {
	*engine.Engine
	images
}

func (r runtime) Pull(ctx context.Context, p image.PullRequest, _ func(image.Progress)) (image.Image, error) {
	return r.Get(ctx, p.Name)
}

func (r runtime) List(ctx context.Context) ([]vm.Record, error) { return r.Engine.List(ctx) }

func (r runtime) Remove(ctx context.Context, ref string, force bool) error {
	return r.Engine.Remove(ctx, ref, force)
}

// guests runs an engine whose guests answer pings and whose hypervisors are processes that can be measured.
func guests(t *testing.T) vkcocoon.Runtime {
	t.Helper()
	dir := t.TempDir()
	w := must(enginetest.New(filepath.Join(dir, "world")))(t)
	w.Net, w.Ready = 127, true
	w.Process = func(p hypervisor.Plan) int { return process(t, string(p.ID)) }
	if err := os.MkdirAll(filepath.Join(dir, "state"), 0o700); err != nil {
		t.Fatal(err)
	}
	j := must(sqlite.Open(t.Context(), sqlite.Config{Path: filepath.Join(dir, "state", "journal.db")}))(t)
	t.Cleanup(func() { _ = j.Close() })
	store := images{w.Images()}
	e := must(engine.New(engine.Config{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), DefaultDriver: "fake", DefaultNetwork: "net", Kernel: "/k", Initrd: "/i",
	}, engine.Deps{
		Journal: j, Drivers: map[string]hypervisor.Driver{"fake": w.Driver()}, Images: store,
		Networks: network.Fixed{"net": w.Network()}, Agents: w.Agents(),
	}))(t)
	run(t, e.Run)
	return runtime{e, store}
}

// process starts a process that has a name and waits until the test ends it.
func process(t *testing.T, name string) int {
	cmd := exec.Command("sh", "-c", "read end", name)
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Error(err)
		return 0
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}

// run runs f until the test ends, and waits for it.
func run(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// serve runs the virtual node.
func serve(t *testing.T, kubeconfig string, r vkcocoon.Runtime) {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	n := must(vkcocoon.New(vkcocoon.Config{
		Kubeconfig: kubeconfig, NodeName: nodeName, NodeIP: nodeIP, BindAddress: nodeIP, KubeletPort: nodePort, Pods: 100, RootDir: t.TempDir(),
		CertDir: t.TempDir(), ServingCSR: true,
	}, r, log))(t)
	run(t, n.Run)
}

// sign signs the node's serving certificate, which an administrator does otherwise.
func sign(ctx context.Context, client kubernetes.Interface) error {
	api := client.CertificatesV1().CertificateSigningRequests()
	for {
		list, err := api.List(ctx, metav1.ListOptions{})
		if err != nil {
			list = &certificatesv1.CertificateSigningRequestList{}
		}
		for i := range list.Items {
			csr := &list.Items[i]
			if len(csr.Status.Conditions) > 0 {
				continue
			}
			csr.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test"}}
			_, _ = api.UpdateApproval(ctx, csr.Name, csr, metav1.UpdateOptions{}) // on failure, the next round retries
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// name gives the suite's pods VM names from their generateName: vk-default- plus a pod's name of 60 characters would be
// too long for a VM's name.
func name(t *testing.T, client kubernetes.Interface) {
	t.Helper()
	admission := client.AdmissionregistrationV1()
	fail, never := admissionv1.Fail, admissionv1.NeverReinvocationPolicy
	meta := metav1.ObjectMeta{Name: "vm-names"}
	must(admission.MutatingAdmissionPolicies().Create(t.Context(), &admissionv1.MutatingAdmissionPolicy{ObjectMeta: meta, Spec: admissionv1.MutatingAdmissionPolicySpec{
		MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Create},
			Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
		}}}},
		MatchConditions: []admissionv1.MatchCondition{{Name: "generated", Expression: "has(object.metadata.generateName)"}},
		FailurePolicy:   &fail, ReinvocationPolicy: never,
		Mutations: []admissionv1.Mutation{{PatchType: admissionv1.PatchTypeApplyConfiguration, ApplyConfiguration: &admissionv1.ApplyConfiguration{
			Expression: fmt.Sprintf("Object{metadata: Object.metadata{annotations: {%q: object.metadata.generateName.substring(0, size(object.metadata.generateName) - 1)}}}", contract.KeyName),
		}}},
	}}, metav1.CreateOptions{}))(t)
	must(admission.MutatingAdmissionPolicyBindings().Create(t.Context(), &admissionv1.MutatingAdmissionPolicyBinding{
		ObjectMeta: meta, Spec: admissionv1.MutatingAdmissionPolicyBindingSpec{PolicyName: meta.Name},
	}, metav1.CreateOptions{}))(t)
	until(t, "pods are given VM names", func() error {
		pod, err := client.CoreV1().Pods(namespace).Create(t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "try-"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "a", Image: "a"}}},
		}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil && pod.Annotations[contract.KeyName] != "try" {
			err = fmt.Errorf("annotations are %v", pod.Annotations)
		}
		return err
	})
}

// until calls ok until it returns no error.
func until(t *testing.T, what string, ok func() error) {
	t.Helper()
	deadline := time.Now().Add(4 * time.Minute)
	for {
		err := ok()
		switch {
		case err == nil:
			return
		case time.Now().After(deadline):
			t.Fatalf("%s: %v", what, err)
		}
		<-time.After(50 * time.Millisecond)
	}
}

// front creates what the suite expects as a virtual kubelet: a pod with the node's name that serves the kubelet API on port
// 10250 to any client of the API server's proxy. Our node rejects anonymous clients, so a proxy of the test forwards the requests.
func front(t *testing.T, config *rest.Config, client kubernetes.Interface) {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName},
		Spec:       corev1.PodSpec{SchedulerName: "nobody", Containers: []corev1.Container{{Name: "vk", Image: "vk"}}},
	}
	pods := client.CoreV1().Pods(namespace)
	pod = must(pods.Create(t.Context(), pod, metav1.CreateOptions{}))(t)
	pod.Status.PodIP, pod.Status.PodIPs = nodeIP, []corev1.PodIP{{IP: nodeIP}}
	must(pods.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{}))(t)

	admin := must(rest.TLSConfigFor(config))(t)
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "https", Host: net.JoinHostPort(nodeIP, strconv.Itoa(nodePort))})
	transport := &http.Transport{TLSClientConfig: admin}
	t.Cleanup(transport.CloseIdleConnections)
	proxy.Transport = transport
	srv := httptest.NewUnstartedServer(proxy)
	srv.Listener = must(net.Listen("tcp", net.JoinHostPort(nodeIP, "10250")))(t)
	srv.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	srv.StartTLS()
	t.Cleanup(srv.Close)
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}
