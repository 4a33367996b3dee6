package up

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"

	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/app/assets"
	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hostdir"
)

// object is a YAML document under construction.
type object = map[string]any

// writeYAML writes v to path, readable by the owner only: configurations may contain secrets.
func writeYAML(path string, v any) error {
	data, err := yaml.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", path, err)
	}
	return atomicfile.WriteFile(path, data, 0o600)
}

// writeKubeconfig writes a self-contained kubeconfig, so that the single file can be copied elsewhere.
func writeKubeconfig(path string, p pki, s Settings, user string) error {
	var b64 [3]string
	for i, f := range []string{p.crt("ca"), p.crt(user), p.key(user)} {
		data, err := os.ReadFile(f)
		if err != nil {
			return fmt.Errorf("write kubeconfig of %s: %w", user, err)
		}
		b64[i] = base64.StdEncoding.EncodeToString(data)
	}
	return writeYAML(path, object{
		"apiVersion":      "v1",
		"kind":            "Config",
		"current-context": "cocoon",
		"clusters": []object{{"name": "cocoon", "cluster": object{
			"server":                     fmt.Sprintf("https://%s:%d", nodeIP, s.APIPort),
			"certificate-authority-data": b64[0],
		}}},
		"users": []object{{"name": user, "user": object{
			"client-certificate-data": b64[1],
			"client-key-data":         b64[2],
		}}},
		"contexts": []object{{"name": "cocoon", "context": object{"cluster": "cocoon", "user": user}}},
	})
}

// controlPlaneConfig is the file of `cocoon-up control-plane`; its keys are documented there (package config).
func controlPlaneConfig(l layout, p pki, s Settings) object {
	pair := func(name string) object { return object{"cert": p.crt(name), "key": p.key(name)} }
	return object{
		"dataDir":     l.join("control-plane"),
		"bindAddress": nodeIP,
		"securePort":  s.APIPort,
		"serviceCIDR": serviceCIDR,
		"pki": object{
			"servingCA":     p.crt("ca"),
			"serving":       pair("apiserver"),
			"clientCA":      p.crt("ca"),
			"kubeletCA":     p.crt("ca"),
			"kubeletClient": pair("apiserver-kubelet-client"),
			"frontProxy":    object{"ca": p.crt("front-proxy-ca"), "client": pair("front-proxy-client")},
			"serviceAccount": object{
				"key":        p.key("sa"),
				"publicKeys": []string{p.join("sa.pub")},
			},
			"signing": pair("ca"),
		},
		"etcd":              object{"extraArgs": s.extraArgs("etcd")},
		"apiServer":         object{"extraArgs": s.extraArgs("apiServer")},
		"controllerManager": object{"kubeconfig": l.config("controller-manager.kubeconfig"), "extraArgs": s.extraArgs("controllerManager")},
		"scheduler":         object{"kubeconfig": l.config("scheduler.kubeconfig"), "extraArgs": s.extraArgs("scheduler")},
		"externalScheduler": s.with(partScheduler),
	}
}

// instanceID distinguishes the nodes of one machine in names of links, tables and cgroups.
func instanceID(n nodeLayout) string {
	id := fnv.New32a()
	_, _ = id.Write([]byte(filepath.Dir(n.folder("state")))) // never fails
	return fmt.Sprintf("%06x", id.Sum32()&0xffffff)
}

func bridgeName(n nodeLayout) string { return "cocoon" + instanceID(n) }

// cocoondConfig is the file of a node's cocoond; its keys are documented in `cocoond --help`. services says that the instance
// serves Services.
func cocoondConfig(n nodeLayout, p pki, s Settings, a Assets, services bool) object {
	instance := instanceID(n)
	var ports NodeSettings
	network := object{"instance": instance, "bridge": bridgeName(n)}
	var peers []string
	for i, node := range s.Nodes {
		if node.Name == n.name {
			ports = node
		} else {
			peers = append(peers, bridgeName(n.node(s, i)))
		}
	}
	if s.Kubelet != nil {
		peers = append(peers, n.kubelet().link())
	}
	if len(peers) > 0 {
		network["peers"] = peers
	}
	virtualNode := object{
		"kubeconfig":     n.kubeconfig(),
		"nodeName":       n.name,
		"nodeIP":         "bridge", // the API server forwards nothing to loopback
		"noRole":         true,     // see labelNode
		"reservePercent": 20,
		"cpuOvercommit":  cmp.Or(s.CPUOvercommit, defaultOvercommit),
		"bindAddress":    "bridge",
		"kubeletPort":    ports.Port,
		"metricsAddr":    fmt.Sprintf("%s:%d", nodeIP, ports.MetricsPort),
		"tlsCert":        p.crt(n.suffixed("kubelet")),
		"tlsKey":         p.key(n.suffixed("kubelet")),
		"clientCA":       p.crt("ca"),
		// The instance is ours alone: if a pod was deleted while the instance was down, nobody else can remove its VM.
		"orphans": "destroy",
	}
	if services {
		network["services"] = []string{serviceIP + ":443", dnsIP + ":53"}
		virtualNode["clusterDNS"] = dnsIP
	}
	images := object{"mappings": n.mappings()}
	if len(s.AllowImages) > 0 {
		images["allow"] = s.AllowImages
	}
	if s.with(partEpoch) {
		images["registries"] = object{fmt.Sprintf("%s:%d", nodeIP, s.EpochPort): object{}}
		virtualNode["epochURL"] = s.epochURL()
		virtualNode["epochTokenFile"] = n.epochTokens()
	}
	config := object{
		"stateDir":    n.folder("state"),
		"runDir":      n.folder("run"),
		"socket":      n.socket(),
		"guest":       object{"kernel": a.Kernel, "initramfs": a.Initramfs},
		"network":     network,
		"qemu":        object{"cgroup": "cocoon-" + instance},
		"images":      images,
		"virtualNode": virtualNode,
	}
	if len(s.HostPaths) > 0 {
		config[hostdir.Setting] = s.HostPaths
	}
	if s.CNIConfDir != "" {
		network["cni"] = object{"confDir": s.CNIConfDir}
	}
	if s.CSIPlugins != "" {
		config["csiPlugins"], config["csiDir"] = s.CSIPlugins, n.folder("csi")
	}
	return config
}

// Assets are the files that an instance needs.
type Assets struct {
	ControlPlane string // cocoon-up, which also is kubectl
	Daemon       string // cocoond
	Epoch        string
	Manager      string
	Kernel       string
	Initramfs    string
	DemoImage    string
	DemoDisk     string // an image with a disk

	// For a node with a kubelet:
	Containerd string // beside the other programs of the runtime
	CNIPlugins string // folder, "" if there is none
	Pause      string // image of pods' sandboxes
}

// FindAssets returns the files of this installation. Callers check where needed that they exist.
func FindAssets() Assets {
	return Assets{
		ControlPlane: assets.Path("cocoon-up"),
		Daemon:       assets.Path("cocoond"),
		Epoch:        assets.Path("epoch"),
		Manager:      assets.Path("cocoon-manager"),
		Kernel:       assets.Path("guest/vmlinux"),
		Initramfs:    assets.Path("guest/initramfs"),
		DemoImage:    assets.Path("demo.tar"),
		DemoDisk:     assets.Path("disk-demo.tar"),
		Containerd:   assets.Path("containerd/containerd"),
		CNIPlugins:   findPlugins(),
		Pause:        assets.Path("pause.tar"),
	}
}

// check returns a FailedPrecondition error that names the first missing file.
func (a Assets) check() error {
	for _, p := range []string{a.ControlPlane, a.Daemon, a.Epoch, a.Manager, a.Kernel, a.Initramfs, a.DemoImage, a.DemoDisk} {
		if !assets.Exists(p) {
			return errdefs.Preconditionf("%s is missing; run `make build` to create it", p)
		}
	}
	return nil
}
