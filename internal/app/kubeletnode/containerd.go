package kubeletnode

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
)

// Runtime are the paths of a containerd. All are absolute, and none is shared with another containerd.
type Runtime struct {
	Root     string // images and snapshots, kept when the machine stops
	State    string // what runs, its sockets and its namespaces; short, because shims have sockets in it
	Programs string // folder of containerd, containerd-shim-runc-v2 and runc
	Plugins  string // folder of the CNI plugins
	Networks string // folder of the pods' conflist
	Sandbox  string // image of the sandboxes of pods
	Mirrors  string // folder with a hosts.toml for registries, "" for none
	Volatile bool   // nothing has to outlive a crash of the machine
}

// Socket is the path of the socket that containerd serves.
func (r Runtime) Socket() string { return filepath.Join(r.State, "c.sock") }

// Program returns the path of one of the programs.
func (r Runtime) Program(name string) string { return filepath.Join(r.Programs, name) }

// Config returns containerd's configuration file. It sets restrict_oom_score_adj, because containerd may run without CAP_SYS_RESOURCE, and
// then cannot lower the score of a container.
func (r Runtime) Config() string {
	return strings.NewReplacer(
		"ROOT", r.Root, "STATE", r.State, "SOCKET", r.Socket(), "PROGRAMS", r.Programs, "PLUGINS", r.Plugins, "NETWORKS", r.Networks,
		"SANDBOX", r.Sandbox, "MIRRORS", r.Mirrors, "VOLATILE", fmt.Sprint(r.Volatile),
	).Replace(`version = 4
root = 'ROOT'
state = 'STATE/state'
disabled_plugins = ['io.containerd.nri.v1.nri']
imports = []

[plugins.'io.containerd.server.v1.grpc']
address = 'SOCKET'

[plugins.'io.containerd.server.v1.ttrpc']
address = 'SOCKET.ttrpc'

[plugins.'io.containerd.internal.v1.opt']
path = 'ROOT/opt'

[plugins.'io.containerd.shim.v1.manager']
socket_dir = 'STATE/s'

[plugins.'io.containerd.metadata.v1.bolt']
no_sync = VOLATILE

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = 'SANDBOX'

[plugins.'io.containerd.cri.v1.images'.registry]
config_path = 'MIRRORS'

[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
cdi_spec_dirs = ['STATE/cdi']
ignore_deprecation_warnings = ['io.containerd.deprecation/cgroup-v1']

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ['PLUGINS']
conf_dir = 'NETWORKS'

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
runtime_path = 'PROGRAMS/containerd-shim-runc-v2'

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = 'PROGRAMS/runc'
Root = 'STATE/runc'
SystemdCgroup = false
`)
}

// Network is the network of a node's pods: a bridge with addresses, access to what the node reaches, and ports of the node.
type Network struct {
	Name   string // of the conflist
	Bridge string // name of the link
	Subnet string // CIDR
	NAT    bool   // pods reach other networks with the node's address
	IPAM   string // folder that remembers addresses; it must not outlive the pods
}

// Conflist returns the CNI configuration of the network.
func (n Network) Conflist() ([]byte, error) {
	type object = map[string]any
	return json.MarshalIndent(object{
		"cniVersion": "1.0.0",
		"name":       n.Name,
		"plugins": []object{
			{
				"type": "bridge", "bridge": n.Bridge, "isGateway": true, "ipMasq": n.NAT, "promiscMode": true,
				"ipam": object{"type": "host-local", "dataDir": n.IPAM, "ranges": [][]object{{{"subnet": n.Subnet}}}, "routes": []object{{"dst": "0.0.0.0/0"}}},
			},
			{"type": "portmap", "capabilities": object{"portMappings": true}},
		},
	}, "", "  ")
}

// Door returns the sections of cocoond's file of configuration by which it serves CRI at socket, in front of the containerd, and gives
// VM pods the network of the others.
func (r Runtime) Door(socket, network string) map[string]any {
	return map[string]any{
		"cri":     map[string]any{"socket": socket, "containerd": r.Socket()},
		"network": map[string]any{"mode": "cni", "cni": map[string]any{"confDir": r.Networks, "binDirs": []string{r.Plugins}, "default": network}},
	}
}
