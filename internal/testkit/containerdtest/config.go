package containerdtest

import (
	"fmt"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/app/kubeletnode"
)

// plugins is the folder of CNI plugins.
const plugins = "/usr/lib/cni"

// runtime returns the paths of a containerd in a folder. Nothing of a test outlives a crash of the machine.
func runtime(dir, programs string) kubeletnode.Runtime {
	return kubeletnode.Runtime{
		Root: filepath.Join(dir, "root"), State: dir, Programs: programs, Plugins: plugins, Networks: filepath.Join(dir, "cni"),
		Sandbox: sandbox, Mirrors: filepath.Join(dir, "certs.d"), Volatile: true,
	}
}

// hosts sends all pulls to one registry.
func hosts(url string) string {
	return fmt.Sprintf("server = %q\n[host.%q]\ncapabilities = [\"pull\", \"resolve\"]\n", url, url)
}

// Pods is the name of the pods' network.
const Pods = "pods"

// bridge is the link of the host in the pods' network.
const bridge = "pods0"

// network is the pods' network: a bridge with addresses, access to what the host reaches, and ports of the host.
func network(dir string) kubeletnode.Network {
	return kubeletnode.Network{Name: Pods, Bridge: bridge, Subnet: "10.88.0.0/16", NAT: true, IPAM: filepath.Join(dir, "ipam")}
}
