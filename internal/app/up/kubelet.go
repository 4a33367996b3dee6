package up

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/deploy/runtimeclass"
	"cocoonstack.io/cocoon/internal/app/assets"
	"cocoonstack.io/cocoon/internal/app/kubeletnode"
	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// The node of the kubelet is a small machine: it has its own processes, mounts and network, and this machine's kernel. Its process 1
// is a child of the supervisor (kubeletinit.go). When that ends, for any reason, the kernel ends everything in it: the kubelet,
// containerd, cocoond, containers and VMs. Its images, disks and volumes stay in the folder of the instance. Outside of it are only its
// cgroups, a link, rules, and empty folders as places of its mounts; sweepKubelet removes them.

const (
	kubeletName    = "cocoon-kubelet-0"
	partKubelet    = "kubelet-node" // name of the child and of the hidden verb
	kubeletNetwork = "pods"
	pauseImage     = "localhost/cocoon/pause:latest"
	stopKubelet    = 80 * time.Second // VMs and containers of the node stop meanwhile
	userRoot       = "/var/lib/kubelet"
	kubeletLabels  = contract.LabelCRI + "=true"
)

// KubeletSettings are the choices of the node with a kubelet.
type KubeletSettings struct {
	Subnet string `json:"subnet"` // of the node and its pods, a /24
}

// The addresses of a subnet: this machine and the node are at both ends of a link, the pods' bridge is a router of the rest.
func (s KubeletSettings) machine() netip.Addr { return s.prefix().Addr().Next() }
func (s KubeletSettings) node() netip.Addr    { return s.machine().Next() }
func (s KubeletSettings) pods() netip.Prefix {
	b := s.prefix().Addr().As4()
	b[3] = 128
	return netip.PrefixFrom(netip.AddrFrom4(b), 25)
}

func (s KubeletSettings) prefix() netip.Prefix {
	p, _ := netip.ParsePrefix(s.Subnet) // checked
	return p
}

func (s KubeletSettings) check() error {
	p, err := netip.ParsePrefix(s.Subnet)
	if err != nil || !p.Addr().Is4() || p.Bits() != 24 || p != p.Masked() {
		return errdefs.Invalidf("the subnet of %s is %q, which is no IPv4 network of 24 bits", kubeletName, s.Subnet)
	}
	return nil
}

// settleKubelet decides whether there is a node with a kubelet, and its subnet. Preconditions: the names of nodes are not settled yet.
// Errors: as those of checkKubelet; ResourceExhausted without a free subnet.
func (s *Settings) settleKubelet(l layout, o Options) error {
	if o.Kubelet != nil && !*o.Kubelet {
		s.Kubelet = nil
	}
	if s.Kubelet == nil && (o.Kubelet == nil || !*o.Kubelet) {
		return nil
	}
	if len(s.Nodes) == 0 {
		return errdefs.Invalidf("--kubelet needs a virtual node beside it, which routes for it; use --nodes 1 or more, or --kubelet=false")
	}
	for i := range s.Nodes {
		if nodeName(cmp.Or(o.NodeName, s.Nodes[0].Name, defaultNodeName), i) == kubeletName {
			return errdefs.Invalidf("--kubelet makes a node of the name %s, which is that of a virtual node; give that one another with --node-name", kubeletName)
		}
	}
	if err := checkKubelet(l, o.Assets); err != nil {
		return err
	}
	var kept string
	if s.Kubelet != nil {
		kept = s.Kubelet.Subnet
	}
	subnet, err := kubeletSubnet(kept, l)
	if err == nil {
		s.Kubelet = &KubeletSettings{Subnet: subnet}
	}
	return err
}

// kubelet is the layout of the node with a kubelet.
type kubeletLayout struct{ nodeLayout }

func (l layout) kubelet() kubeletLayout {
	return kubeletLayout{nodeLayout{layout: l, name: kubeletName}}
}

func (k kubeletLayout) lockFile() string  { return k.folder("lock") }
func (k kubeletLayout) madeFile() string  { return k.folder("made") }
func (k kubeletLayout) rulesFile() string { return k.config("kubelet.nft") }
func (k kubeletLayout) link() string      { return "klet" + instanceID(k.nodeLayout) }
func (k kubeletLayout) table() string     { return "cocoon_kubelet_" + instanceID(k.nodeLayout) }
func (k kubeletLayout) podCgroup() string { return "cocoon-kubelet-" + instanceID(k.nodeLayout) }
func (k kubeletLayout) vmCgroup() string  { return "cocoon-" + instanceID(k.nodeLayout) }

// Sockets are in the node's own /run.
func (k kubeletLayout) criSocket() string { return "/run/cocoon/cri.sock" }

// pluginFolders are where CNI plugins may be.
var pluginFolders = []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"}

// runtime returns the paths of the node's containerd.
func (k kubeletLayout) runtime(a Assets) kubeletnode.Runtime {
	return kubeletnode.Runtime{
		Root: k.folder("containerd"), State: "/run/containerd", Programs: filepath.Dir(a.Containerd), Plugins: a.CNIPlugins, Networks: k.folder("cni"),
		Sandbox: pauseImage, Mirrors: k.config("certs.d"),
	}
}

func (k kubeletLayout) daemonConfig() string  { return k.config("kubelet-cocoond.yaml") } // not one of those that a shutdown reads
func (k kubeletLayout) kubeletConfig() string { return k.config("kubelet.yaml") }
func (k kubeletLayout) runtimeConfig() string { return k.config("kubelet-containerd.toml") }

func (k kubeletLayout) program(p pki, s Settings) kubeletnode.Kubelet {
	return kubeletnode.Kubelet{
		Name: k.name, Address: s.Kubelet.node().String(), Socket: k.criSocket(), Dir: k.folder("kubelet-files"), Kubeconfig: k.kubeconfig(),
		CA: p.crt("ca"), Cert: p.crt(k.suffixed("kubelet")), Key: p.key(k.suffixed("kubelet")), Cgroup: k.podCgroup(),
	}
}

// findPlugins returns the folder that has the CNI plugins of the node's pods, "" if there is none.
func findPlugins() string {
	for _, dir := range pluginFolders {
		all := true
		for _, name := range []string{"bridge", "host-local", "loopback", "portmap"} {
			all = all && assets.Exists(filepath.Join(dir, name))
		}
		if all {
			return dir
		}
	}
	return ""
}

// checkKubelet says what this machine lacks for a node with a kubelet, before anything is started.
// Errors: FailedPrecondition, InvalidArgument.
func checkKubelet(l layout, a Assets) error {
	programs := filepath.Dir(a.Containerd)
	for _, name := range []string{"containerd", "containerd-shim-runc-v2", "ctr", "runc"} {
		if path := filepath.Join(programs, name); !assets.Exists(path) {
			return errdefs.Preconditionf("--kubelet needs containerd and runc, and %s is missing; run `make containerd` to build them, which takes about seven minutes the first time", path)
		}
	}
	if !assets.Exists(a.Pause) {
		return errdefs.Preconditionf("--kubelet needs %s, which is missing; run `make demo-image` to create it", a.Pause)
	}
	if a.CNIPlugins == "" {
		return errdefs.Preconditionf("--kubelet needs the CNI plugins bridge, host-local, loopback and portmap in one of %s; install the package containernetworking-plugins", strings.Join(pluginFolders, ", "))
	}
	if _, err := exec.LookPath("nft"); err != nil {
		return errdefs.Preconditionf("--kubelet needs the program nft; install the package nftables")
	}
	for _, hidden := range append([]string{"/run", "/proc"}, kubeletnode.Fixed...) {
		if dir, err := filepath.EvalSymlinks(l.dir); err == nil && strings.HasPrefix(dir+"/", hidden+"/") {
			return errdefs.Invalidf("--kubelet: the node has a %s of its own, so the folder of the cluster must not be in it: %s", hidden, l.dir)
		}
	}
	return nil
}

// prepareKubelet writes the node's files. It is idempotent.
func (in *instance) prepareKubelet(ctx context.Context) error {
	k := in.kubelet()
	if err := sweepKubelet(ctx, k); err != nil { // of an earlier start that was killed
		return err
	}
	if in.settings.Kubelet == nil {
		return nil
	}
	kubelet, run := k.program(in.pki, in.settings), k.runtime(in.opts.Assets)
	for _, dir := range append([]string{k.folder("run"), k.folder("state"), k.folder("kubelet"), run.Root, run.Networks, run.Mirrors}, kubelet.Folders()...) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("create folder of node %s: %w", k.name, err)
		}
	}
	conflist, err := kubeletnode.Network{
		Name: kubeletNetwork, Bridge: "pods0", Subnet: in.settings.Kubelet.pods().String(), IPAM: "/run/cni",
	}.Conflist()
	if err != nil {
		return fmt.Errorf("encode network of node %s: %w", k.name, err)
	}
	return errors.Join(
		writeKubeconfig(k.kubeconfig(), in.pki, in.settings, k.suffixed("node")),
		atomicfile.WriteFile(filepath.Join(run.Networks, "10-pods.conflist"), conflist, 0o600),
		atomicfile.WriteFile(k.runtimeConfig(), []byte(run.Config()), 0o600),
		atomicfile.WriteFile(k.rulesFile(), kubeletRules(k, in.settings), 0o600),
		writeYAML(k.kubeletConfig(), kubelet.Config(kubeletExtra(in.services))),
		writeYAML(k.daemonConfig(), doorConfig(k, in.settings, in.opts.Assets)))
}

// kubeletExtra is what the kubelet of an instance has beside the usual: a taint, so that pods come only if they ask for it, and the
// cluster's DNS. It collects no images: nobody could fetch those of the demo again.
func kubeletExtra(services bool) object {
	extra := object{
		"registerWithTaints":          []object{{"key": contract.LabelCRI, "value": "true", "effect": "NoSchedule"}},
		"imageGCHighThresholdPercent": 100,
		"featureGates":                object{"RuntimeClassInImageCriApi": true},
	}
	if services {
		extra["clusterDNS"], extra["clusterDomain"] = []string{dnsIP}, clusterDomain
	}
	return extra
}

// doorConfig is the file of the cocoond between the kubelet and containerd.
func doorConfig(k kubeletLayout, s Settings, a Assets) object {
	c := k.runtime(a).Door(k.criSocket(), kubeletNetwork)
	c["stateDir"], c["runDir"], c["socket"] = k.folder("state"), k.folder("run"), k.socket()
	c["guest"] = object{"kernel": a.Kernel, "initramfs": a.Initramfs}
	c["qemu"] = object{"cgroup": k.vmCgroup()}
	images := object{"mappings": k.mappings()}
	if len(s.AllowImages) > 0 {
		images["allow"] = s.AllowImages
	}
	c["images"] = images
	return c
}

//go:embed kubelet.yaml
var kubeletManifest []byte

// kubeletManifests are the RuntimeClasses of the node.
func kubeletManifests() ([]manifest, error) {
	return manifests(bytes.ReplaceAll(runtimeclass.Cocoon, []byte("\n  labels:\n"), []byte("\n  labels:\n    app.kubernetes.io/managed-by: cocoon-up\n")), kubeletManifest)
}

// runKubelet starts the node with a kubelet and waits until it is Ready, or removes what an earlier start has registered.
func (in *instance) runKubelet(ctx context.Context, launch func(child) <-chan error) error {
	list, err := kubeletManifests()
	if err != nil {
		return err
	}
	node := "/api/v1/nodes/" + kubeletName
	if in.settings.Kubelet == nil {
		for _, m := range list {
			if err := in.api.remove(ctx, m.path); err != nil {
				return err
			}
		}
		return in.api.remove(ctx, node)
	}
	began := time.Now()
	since := began.Truncate(time.Second)
	if err := in.install(ctx, list, in.controlPlane(), nil); err != nil {
		return err
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("locate the cocoon binary: %w", err)
	}
	c := child{
		name: partKubelet, path: exe, args: []string{partKubelet, "--dir", in.dir}, log: in.layout.log(partKubelet), stop: stopKubelet,
		own: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS,
	}
	k := in.kubelet()
	if err := k.makePlaces(); err != nil {
		return err
	}
	ended := launch(c)
	if err := in.await(ctx, c, ended, func(ctx context.Context) bool {
		return in.api.nodeReady(ctx, kubeletName, since) && in.api.hasDefaultServiceAccount(ctx)
	}); err != nil {
		return err
	}
	if err := in.api.patchNode(ctx, kubeletName, `{"metadata":{"labels":{"app.kubernetes.io/managed-by":"cocoon-up"}}}`); err != nil {
		return err
	}
	in.report("node "+kubeletName+" is Ready", time.Since(began))
	return nil
}

// makePlaces makes the folders of this machine over which the node mounts its own, and remembers which were missing.
func (k kubeletLayout) makePlaces() error {
	var missing []string
	for _, dir := range kubeletnode.Fixed {
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			missing = append(missing, dir)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	if err := atomicfile.WriteFile(k.madeFile(), []byte(strings.Join(missing, "\n")+"\n"), 0o600); err != nil {
		return err
	}
	for _, dir := range missing {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make a place for a mount of node %s: %w", k.name, err)
		}
	}
	return nil
}

// sweepKubelet ends the node if its supervisor was killed, and removes what the node has left outside of its namespaces. It is no error
// if there is nothing. Preconditions: no supervisor of the instance runs, or it is the caller.
func sweepKubelet(ctx context.Context, k kubeletLayout) error {
	if !exists(k.folder("")) {
		return nil
	}
	pid, err := lockHolder(k.lockFile())
	if err != nil {
		return err
	}
	if pid != 0 {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopKubelet)
		defer cancel()
		mine := func() bool { p, err := lockHolder(k.lockFile()); return err == nil && p == pid }
		if err := endProcess(ctx, pid, unix.SIGTERM, mine); errdefs.IsUnavailable(err) {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopPart)
			defer cancel()
			if err := endProcess(ctx, pid, unix.SIGKILL, mine); err != nil {
				return fmt.Errorf("kill node %s: %w", k.name, err)
			}
		} else if err != nil {
			return fmt.Errorf("end node %s: %w", k.name, err)
		}
	}
	failed := errors.Join(kubeletnode.RemoveCgroup(k.podCgroup()), kubeletnode.RemoveCgroup(k.vmCgroup()), k.removeLink(), k.removeRules())
	made, err := os.ReadFile(k.madeFile())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		failed = errors.Join(failed, fmt.Errorf("read what the node %s has made: %w", k.name, err))
	}
	for dir := range strings.Lines(string(made)) {
		_ = unix.Rmdir(strings.TrimSpace(dir)) // unless others have put something there
	}
	if failed != nil {
		return failed
	}
	if err := os.Remove(k.madeFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forget what the node %s has made: %w", k.name, err)
	}
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
