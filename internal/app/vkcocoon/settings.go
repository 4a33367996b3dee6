package vkcocoon

import (
	"io"
	"strconv"

	"cocoonstack.io/cocoon/internal/nodecli"
	"cocoonstack.io/cocoon/internal/settings"
)

// options are the settings of the vk-cocoon binary beyond a Config.
type options struct {
	Config

	Socket    string
	Runtime   string // auto, api, cli
	CocoonBin string // the cocoon binary
	LogLevel  string
	LogFormat string
}

// settings are all settings of vk-cocoon. The keys are those of Config.
func (o *options) settings() []settings.Setting {
	return []settings.Setting{
		{Env: "KUBECONFIG", Flag: "kubeconfig", Key: "kubeconfig", Value: settings.Text(&o.Kubeconfig), Usage: "path of the kubeconfig (credentials of the pod otherwise)"},
		{Env: "VK_BOOTSTRAP_KUBECONFIG", Flag: "bootstrap-kubeconfig", Key: "bootstrapKubeconfig", Value: settings.Text(&o.BootstrapKubeconfig), Usage: "path of credentials that new nodes share; with them the node asks the cluster to sign an identity of its own, and writes --kubeconfig"},
		{Env: "VK_CERT_DIR", Flag: "cert-dir", Key: "certDir", Default: defaultCertDir, Value: settings.Text(&o.CertDir), Usage: "folder of the certificates that the cluster signs"},
		{Env: "VK_SERVING_CSR", Flag: "serving-csr", Key: "servingCSR", Value: settings.Bool(&o.ServingCSR), Usage: "have the cluster sign the serving certificate too, and renew it (instead of --tls-cert)"},
		{Env: "COCOON_SOCKET", Flag: "socket", Key: "socket", Default: defaultSocket, Value: settings.Text(&o.Socket), Usage: "unix socket of cocoond"},
		{Env: "VK_RUNTIME", Flag: "runtime", Key: "runtime", Default: runtimeAuto, Value: settings.Text(&o.Runtime), Usage: "how VMs are reached: api (the socket), cli (the cocoon binary), auto (the binary when the socket does not answer)"},
		{Env: "VK_COCOON_BIN", Flag: "cocoon-bin", Key: "cocoonBin", Default: nodecli.DefaultBinary, Value: settings.Text(&o.CocoonBin), Usage: "the cocoon binary"},
		{Env: "VK_NODE_NAME", Flag: "node-name", Key: "nodeName", Default: defaultNodeName, Value: settings.Text(&o.NodeName), Usage: "name of the virtual node"},
		{Env: "VK_NODE_IP", Flag: "node-ip", Key: "nodeIP", Value: settings.Text(&o.NodeIP), Usage: "InternalIP of the node (first IPv4 address that is not loopback otherwise)"},
		{Env: "VK_NODE_POOL", Flag: "node-pool", Key: "pool", Default: "default", Value: settings.Text(&o.Pool), Usage: "pool label of the node"},
		{Env: "VK_SNAPSHOT_CPU_CLASS", Flag: "snapshot-cpu-class", Key: "snapshotCPUClass", Value: settings.Text(&o.CPUClass), Usage: "CPU class label of the node; snapshots of memory are for nodes of the class they were taken on (none otherwise)"},
		{Env: "VK_PROVIDER_ID", Flag: "provider-id", Key: "providerID", Value: settings.Text(&o.ProviderID), Usage: "ProviderID of the node, e.g. gce://PROJECT/ZONE/INSTANCE"},
		{Env: "VK_NO_ROLE", Flag: "no-role", Key: "noRole", Value: settings.Bool(&o.NoRole), Usage: "leave the role label to an admin; a node's own credentials may not set it"},
		{Env: "VK_BIND_ADDRESS", Flag: "bind-address", Key: "bindAddress", Value: settings.Text(&o.BindAddress), Usage: "address of the kubelet API (all otherwise)"},
		{Env: "VK_KUBELET_PORT", Flag: "kubelet-port", Key: "kubeletPort", Default: strconv.Itoa(defaultPort), Value: settings.Number(&o.KubeletPort), Usage: "port of the kubelet API"},
		{Env: "VK_TLS_CERT", Flag: "tls-cert", Key: "tlsCert", Default: "/etc/cocoon/vk/tls/vk-kubelet.crt", Value: settings.Text(&o.TLSCert), Usage: "serving certificate of the kubelet API"},
		{Env: "VK_TLS_KEY", Flag: "tls-key", Key: "tlsKey", Default: "/etc/cocoon/vk/tls/vk-kubelet.key", Value: settings.Text(&o.TLSKey), Usage: "key of the serving certificate"},
		{Env: "VK_CLIENT_CA", Flag: "client-ca", Key: "clientCA", Value: settings.Text(&o.ClientCA), Usage: "certificate authority of the kubelet API's clients (the kubeconfig's otherwise)"},
		{Env: "VK_METRICS_ADDR", Flag: "metrics-addr", Key: "metricsAddr", Default: "127.0.0.1:9091", Value: settings.Text(&o.MetricsAddr), Usage: "address of the Prometheus listener, which asks nobody who they are; empty for none (the kubelet API has /metrics too, for who may get nodes/metrics)"},
		{Env: "VK_LEASES_PATH", Flag: "leases-path", Key: "leasesPath", Default: "/var/lib/cocoon/net/leases.json", Value: settings.Text(&o.LeasesPath), Usage: "JSON lease file of the network"},
		{Env: "VK_ORPHAN_POLICY", Flag: "orphan-policy", Key: "orphans", Default: "alert", Value: settings.Text(&o.Orphans), Usage: "what to do with VMs whose pod is gone: alert, destroy, keep"},
		{Env: "EPOCH_URL", Flag: "epoch-url", Key: "epochURL", Value: settings.Text(&o.EpochURL), Usage: "registry of snapshots, e.g. http://epoch.cocoon-system.svc:8080 (none otherwise: snapshots stay on the node)"},
		{Env: "EPOCH_TOKEN", Value: settings.Text(&o.EpochToken), Usage: "the registry's bearer token; a secret, so no flag: a command line is everybody's to read"},
		{Env: "VK_EPOCH_TOKEN_FILE", Flag: "epoch-token-file", Key: "epochTokenFile", Value: settings.Text(&o.EpochTokenFile), Usage: "file with the registry's bearer token (or the token itself in $EPOCH_TOKEN)"},
		{Env: "EPOCH_CA_CERT", Flag: "epoch-ca-cert", Key: "epochCACert", Value: settings.Text(&o.EpochCACert), Usage: "PEM file with the registry's certificate authority"},
		{Env: "VK_PUBLIC_REPOSITORIES", Flag: "public-repositories", Key: "publicRepositories", Value: settings.Text(&o.PublicRepositories), Usage: "REPOSITORY,... of the registry that pods of every namespace may clone from; one that ends in / stands for all below it (none otherwise: a namespace clones from its own)"},
		{Env: "VK_TRUST_OLD_SNAPSHOTS", Flag: "trust-old-snapshots", Key: "trustOldSnapshots", Value: settings.Bool(&o.TrustOldSnapshots), Usage: "take snapshots that releases before owners left in the registry for those of the VMs that their names say; names of two namespaces may be the same"},
		{Env: "VK_PEERS", Flag: "peers", Key: "peers", Value: settings.Text(&o.Peers), Usage: "HOST:PORT,... of other nodes' node APIs, asked for a hibernated VM before the registry"},
		{Env: "VK_STATIC_FORWARD_NETWORKS", Flag: "static-forward-networks", Key: "staticForwardNetworks", Value: settings.Text(&o.StaticForwardNetworks), Usage: "CIDR,... to whose machines kubectl port-forward of static pods connects (none otherwise); never to this node's own addresses, its loopback or link-local ones"},
		{Env: "COCOON_ROOT_DIR", Flag: "root-dir", Key: "rootDir", Default: defaultRoot, Value: settings.Text(&o.RootDir), Usage: "folder of the VMs' disks, whose file system is the node's storage"},
		{Env: "VK_RESERVE_PERCENT", Flag: "reserve-percent", Key: "reservePercent", Default: "20", Value: settings.Number(&o.ReservePercent), Usage: "per cent of the host kept for itself"},
		{Env: "VK_NODE_CPU", Flag: "node-cpu", Key: "cpu", Value: settings.Text(&o.CPU), Usage: "CPU capacity (measured otherwise)"},
		{Env: "VK_NODE_MEM", Flag: "node-mem", Key: "memory", Value: settings.Text(&o.Memory), Usage: "memory capacity (measured otherwise)"},
		{Env: "VK_NODE_STORAGE", Flag: "node-storage", Key: "storage", Value: settings.Text(&o.Storage), Usage: "storage capacity (measured otherwise)"},
		{Env: "VK_NODE_HUGEPAGES", Flag: "node-hugepages", Key: "hugepages", Value: settings.Text(&o.Hugepages), Usage: "hugepages-2Mi capacity (measured otherwise)"},
		{Env: "VK_NODE_PODS", Flag: "node-pods", Key: "pods", Default: "256", Value: settings.Number(&o.Pods), Usage: "most pods at a time"},
		{Env: "VK_LOG_LEVEL", Flag: "log-level", Key: "logLevel", Default: "info", Value: settings.Text(&o.LogLevel), Usage: "debug, info, warn or error"},
		{Env: "VK_LOG_FORMAT", Flag: "log-format", Key: "logFormat", Default: "text", Value: settings.Text(&o.LogFormat), Usage: "text or json"},
	}
}

const help = `vk-cocoon is a virtual Kubernetes node whose pods are VMs of this machine.

Each setting is a flag, an environment variable or a key of the YAML file given by --config.
A flag wins over the variable, and the variable over the file.
`

// parse reads flags, variables, the file and defaults; the first of these wins.
func parse(args []string, env func(string) string, out io.Writer) (options, error) {
	var o options
	err := settings.New("vk-cocoon", "VK_CONFIG", o.settings()).Parse(help, args, env, out)
	return o, err
}
