// Package kubeletnode knows how a kubelet, a containerd and a cocoond between them are configured so that they share a machine with
// others: all of their paths, cgroups and networks are private. `cocoon up --kubelet` and the tests of the CRI door use it.
//
// It starts nothing. Where a path cannot be configured, whoever starts the programs hides it (see Fixed).
package kubeletnode

import (
	"maps"
	"path/filepath"
)

// Fixed are folders that a kubelet and CNI plugins use whatever their configuration says.
var Fixed = []string{"/var/lib/kubelet", "/var/log/containers", "/var/lib/cni"}

// Kubelet is a kubelet on a machine that it has not for itself.
type Kubelet struct {
	Name       string // of the node
	Address    string // of the node, on a link of its network namespace
	Socket     string // of CRI
	Dir        string // of its files: certificates, plugins, static pods, logs of pods
	Kubeconfig string
	CA         string // path of the authority of clients, PEM
	Cert, Key  string // paths of what it shows to clients, PEM
	Cgroup     string // name of the cgroup of all pods, below the root of each hierarchy
}

// Manifests is the folder of static pods.
func (k Kubelet) Manifests() string { return filepath.Join(k.Dir, "manifests") }

// Folders are the folders that must exist before the kubelet starts.
func (k Kubelet) Folders() []string {
	return []string{k.Manifests(), filepath.Join(k.Dir, "logs"), filepath.Join(k.Dir, "plugins"), filepath.Join(k.Dir, "certs")}
}

// Config returns the kubelet's configuration. more is merged over it.
func (k Kubelet) Config(more map[string]any) map[string]any {
	type object = map[string]any
	c := object{
		"apiVersion":               "kubelet.config.k8s.io/v1beta1",
		"kind":                     "KubeletConfiguration",
		"address":                  k.Address,
		"containerRuntimeEndpoint": "unix://" + k.Socket,
		"authentication":           object{"anonymous": object{"enabled": false}, "x509": object{"clientCAFile": k.CA}},
		"tlsCertFile":              k.Cert,
		"tlsPrivateKeyFile":        k.Key,
		"staticPodPath":            k.Manifests(),
		"podLogsDir":               filepath.Join(k.Dir, "logs"),
		"volumePluginDir":          filepath.Join(k.Dir, "plugins"),
		"cgroupDriver":             "cgroupfs",
		"cgroupRoot":               "/" + k.Cgroup,
		"failCgroupV1":             false, // machines with version 1 work too
		"failSwapOn":               false,
		"oomScoreAdj":              0, // a lower one needs CAP_SYS_RESOURCE
		"makeIPTablesUtilChains":   false,
		"evictionHard":             object{"memory.available": "50Mi", "nodefs.available": "1%"},
		"syncFrequency":            "5s", // of ConfigMaps and Secrets in volumes
	}
	maps.Copy(c, more)
	return c
}

// Args returns the arguments of the program kubelet with a file of that configuration. root is the folder of pods' volumes.
func (k Kubelet) Args(config, root string) []string {
	return []string{
		"kubelet", "--config", config, "--kubeconfig", k.Kubeconfig, "--root-dir", root, "--cert-dir", filepath.Join(k.Dir, "certs"),
		"--hostname-override", k.Name, "--node-ip", k.Address,
	}
}
