//go:build e2e

package deploy_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/deploy/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/aggregated"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

const (
	apiAddress = "10.96.0.1" // of the API server's Service, as guests know it
	epochPort  = "5000"      // of the registry, on loopback

	registryAddress = "10.97.0.9" // of the registry; kube-proxy drops what goes to addresses of Services that it does not know
)

// inGuests runs what the chart installs, with the images from `make images`, on virtual nodes: each pod is a VM with the token of
// its service account. A cluster runs the same in containers. The API server reaches the manager, which runs in a guest, by its
// Service.
func inGuests(t *testing.T, k *kubetest.Cluster, helm func(args ...string) string) {
	services(t, k)
	const first, second = "cocoon-node-0", "cocoon-node-1"
	for image, node := range map[string]string{"cocoon-manager": first, "epoch": second, "cocoon-scheduler": second} {
		cli(t, k, node, "image", "import", "cocoonstack.io/"+image+":latest", need.Built(t, "bin/images/"+image+".tar", "make images"))
	}
	token, err := os.ReadFile(filepath.Join(k.Dir, "etc", "epoch-tokens"))
	if err != nil {
		t.Fatal(err)
	}
	values := filepath.Join(t.TempDir(), "values.yaml")
	write(t, values, strings.NewReplacer("FIRST", first, "SECOND", second, "REGISTRY", registryAddress).Replace(`
manager: &first
  replicas: 1
  tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}]
  nodeSelector: {kubernetes.io/hostname: FIRST}
scheduler: {<<: *first, enabled: true, nodeSelector: &second {kubernetes.io/hostname: SECOND}}
kubevirt: {enabled: true}
epoch:
  url: "http://REGISTRY:8080" # that of the nodes
  enabled: true          # and one for itself
  storage: {volume: {emptyDir: {}}}
  tolerations: [{key: virtual-kubelet.io/provider, operator: Exists}]
  nodeSelector: *second
`), 0o600)
	ns := kubetest.Namespace
	k.Kubectl(t, "", "create", "namespace", ns)
	k.Kubectl(t, "", "label", "namespace", ns, "pod-security.kubernetes.io/enforce=restricted")
	secret := strings.TrimSpace(string(token))
	k.Kubectl(t, "", "create", "secret", "generic", "cocoon-epoch", "-n", ns, "--from-literal=token="+secret)
	helm("install", "cocoon", "./chart", "--namespace", ns, "--take-ownership", "--server-side=true", "--force-conflicts", "--values", values)
	for _, what := range []string{"deployment/cocoon-manager", "statefulset/epoch", "deployment/cocoon-scheduler"} {
		if out, err := k.TryKubectl(t, "", "rollout", "status", what, "-n", ns, "--timeout=240s"); err != nil {
			t.Fatalf("%s\n%s\n%s", out, k.Kubectl(t, "", "get", "pods,events", "-n", ns, "-o", "wide"), k.Kubectl(t, "", "logs", what, "-n", ns))
		}
	}

	// The release's registry accepts clients that have the token, and writes to its volume.
	ask := func(token string) int {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+k.Kubectl(t, "", "get", "pod", "epoch-0", "-n", ns, "-o", "jsonpath={.status.podIP}")+":8080/v2/team/app/blobs/uploads/", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if right, wrong := ask(secret), ask("wrong"); right != http.StatusAccepted || wrong != http.StatusUnauthorized {
		t.Errorf("the registry answers %d to its token and %d to another", right, wrong)
	}

	// The API server calls the webhooks in the guest.
	const set = "apiVersion: cocoonset.cocoonstack.io/v1\nkind: CocoonSet\nmetadata: {name: team}\nspec: {agent: {mode: run, image: cocoon/demo:latest, storage: %s}}\n"
	kubetest.Eventually(t, "a set that cannot be", func() string { // the rules of its Service may be a moment behind its pods
		out, err := k.TryKubectl(t, fmt.Sprintf(set, `"-1Gi"`), "apply", "-f", "-")
		switch {
		case err == nil:
			t.Fatalf("a set that cannot be: %s", out)
		case !strings.Contains(out, "must be a positive quantity"):
			return out
		}
		return "refused"
	}, "refused")
	// The manager works with the rights of its token, and reads the settings of the registry from the Secret.
	phase := func(want string) {
		t.Helper()
		kubetest.Eventually(t, "the set", func() string { return k.Kubectl(t, "", "get", "cocoonset", "team", "-o", "jsonpath={.status.phase}") }, want)
	}
	insist(t, k, fmt.Sprintf(set, "1Gi"), "apply", "-f", "-")
	phase("Running")
	insist(t, k, "", "patch", "cocoonset", "team", "--type=merge", "-p", `{"spec":{"suspend":true}}`)
	phase("Suspended")
	k.Kubectl(t, "", "delete", "cocoonset", "team", "--timeout=240s")
	virtualMachines(t, k)
	helm("uninstall", "cocoon", "--namespace", ns)
}

// insist repeats a command until it succeeds. The API server calls webhooks of the manager, whose guest may be too busy to be ready.
func insist(t *testing.T, k *kubetest.Cluster, input string, args ...string) {
	t.Helper()
	kubetest.Eventually(t, "kubectl "+args[0], func() string {
		out, err := k.TryKubectl(t, input, args...)
		if err != nil {
			return out
		}
		return "done"
	}, "done")
}

// virtualMachines shows that the manager in the guest serves KubeVirt's objects: the API server trusts the certificate that it made.
func virtualMachines(t *testing.T, k *kubetest.Cluster) {
	t.Helper()
	virtctl := func(args ...string) string {
		t.Helper()
		out, err := exec.Command(need.Built(t, "bin/virtctl", "make virtctl"), append([]string{"--kubeconfig", filepath.Join(k.Dir, "kubeconfig")}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("virtctl %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	for _, version := range aggregated.Versions {
		k.Kubectl(t, "", "wait", "apiservice", version+"."+aggregated.Group, "--for=condition=Available", "--timeout=240s")
	}
	if out := virtctl("version"); !strings.Contains(out, "Server Version") || !strings.Contains(out, kubevirt.Version) {
		t.Errorf("virtctl version: %s", out)
	}
	kubetest.Eventually(t, "the KubeVirt object", func() string {
		return k.Kubectl(t, "", "get", "kubevirt", "kubevirt", "-n", "kubevirt", "-o", "jsonpath={.status.phase}")
	}, "Deployed")
	insist(t, k, "{apiVersion: kubevirt.io/v1, kind: VirtualMachine, metadata: {name: web}, spec: {runStrategy: Halted, template: {spec: {"+
		"domain: {memory: {guest: 128Mi}, devices: {}}, volumes: [{name: boot, containerDisk: {image: 'cocoon/disk-demo:latest'}}]}}}}", "apply", "-f", "-")
	virtctl("start", "web")
	kubetest.Eventually(t, "the VirtualMachine", func() string { return k.Kubectl(t, "", "get", "vm", "web", "-o", "jsonpath={.status.printableStatus}") }, "Running")
	k.Kubectl(t, "", "delete", "vm", "web", "--timeout=240s")
}

// cli runs cocoon on a node.
func cli(t *testing.T, k *kubetest.Cluster, node string, args ...string) string {
	t.Helper()
	at := []string{"--dir", k.Dir} // the first node
	if other := filepath.Join(k.Dir, "nodes", node, "run", "cocoond.sock"); node != "cocoon-node-0" {
		at = []string{"--socket", other}
	}
	out, err := exec.Command(need.Built(t, "bin/cocoon", "make build"), append(at, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("cocoon %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// services replaces a network with Services for the guests: at apiAddress they reach the API server (443), at registryAddress the registry (8080),
// which listen on loopback here. To guests it is another machine, because a node blocks guests from all of its own ports.
func services(t *testing.T, k *kubetest.Cluster) {
	t.Helper()
	other := netns.New(t)
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "services"}, PeerName: "node"}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(link) })
	peer, err := netlink.LinkByName(link.PeerName)
	if err != nil {
		t.Fatal(err)
	}
	space, err := os.Open(other)
	if err != nil {
		t.Fatal(err)
	}
	defer space.Close()
	if err := netlink.LinkSetNsFd(peer, int(space.Fd())); err != nil {
		t.Fatal(err)
	}
	up := func(name, address string) error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(address)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(l, a); err != nil {
			return err
		}
		return netlink.LinkSetUp(l)
	}
	if err := errors.Join(up("services", "10.96.255.254/16"), up("services", "10.97.0.1/24")); err != nil {
		t.Fatal(err)
	}
	netns.Do(t, other, func() error { return errors.Join(up("node", apiAddress+"/16"), up("node", registryAddress+"/24")) })
	for address, target := range map[string]string{apiAddress + ":443": strings.TrimPrefix(k.Config.Host, "https://"), registryAddress + ":8080": "127.0.0.1:" + epochPort} {
		netns.Do(t, other, func() error {
			l, err := net.Listen("tcp", address)
			if err != nil {
				return err
			}
			t.Cleanup(func() { l.Close() })
			go forward(l, target)
			return nil
		})
	}
}

// forward connects clients of l with target.
func forward(l net.Listener, target string) {
	for {
		in, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer in.Close()
			out, err := net.Dial("tcp", target)
			if err != nil {
				return
			}
			defer out.Close()
			go func() { _, _ = io.Copy(out, in); out.Close() }()
			_, _ = io.Copy(in, out)
		}()
	}
}
