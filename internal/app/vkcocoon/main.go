package vkcocoon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"cocoonstack.io/cocoon/internal/app/restconfig"
	"cocoonstack.io/cocoon/internal/app/service"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/logging"
	"cocoonstack.io/cocoon/internal/nodecli"
	"cocoonstack.io/cocoon/internal/settings"
)

const defaultSocket = "/run/cocoon/cocoond.sock"

// Main is the vk-cocoon binary: it runs until ctx ends and returns the exit code, 2 for a bad command line.
func Main(ctx context.Context, args []string, env func(string) string, stdout, stderr io.Writer) int {
	o, err := parse(args, env, stdout)
	if errors.Is(err, pflag.ErrHelp) {
		return 0
	}
	if err != nil {
		fmt.Fprintln(stderr, "vk-cocoon:", err)
		return 2
	}
	if err := serve(ctx, o, stderr); err != nil {
		fmt.Fprintln(stderr, "vk-cocoon:", err)
		if errdefs.IsInvalid(err) {
			return 2
		}
		return 1
	}
	return 0
}

func serve(ctx context.Context, o options, stderr io.Writer) error {
	log, err := logging.New(stderr, o.LogLevel, o.LogFormat)
	if err != nil {
		return err
	}
	klog.SetSlogLogger(log.With("component", "client-go"))
	if o.BootstrapKubeconfig == "" { // report missing credentials at once, not after cocoond has answered
		if _, err := restconfig.Load(o.Kubeconfig); err != nil {
			return err
		}
	}
	runtime, stop, err := o.chooseRuntime(ctx, log)
	if err != nil {
		return err
	}
	defer stop()
	n, err := New(o.Config, runtime, log)
	if err != nil {
		return err
	}
	n.service = true
	defer service.Stopping(log)
	return n.Run(ctx)
}

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
		{Env: "KUBECONFIG", Flag: "kubeconfig", Key: "kubeconfig", Value: settings.Text(&o.Kubeconfig), Usage: "path of the kubeconfig (default: the credentials of the pod)"},
		{Env: "VK_BOOTSTRAP_KUBECONFIG", Flag: "bootstrap-kubeconfig", Key: "bootstrapKubeconfig", Value: settings.Text(&o.BootstrapKubeconfig), Usage: "path of the credentials that all new nodes share; with them the node requests its own identity from the cluster and writes it to --kubeconfig"},
		{Env: "VK_CERT_DIR", Flag: "cert-dir", Key: "certDir", Default: defaultCertDir, Value: settings.Text(&o.CertDir), Usage: "folder for the certificates that the cluster signs"},
		{Env: "VK_SERVING_CSR", Flag: "serving-csr", Key: "servingCSR", Value: settings.Bool(&o.ServingCSR), Usage: "request the serving certificate from the cluster too, and renew it (instead of --tls-cert)"},
		{Env: "COCOON_SOCKET", Flag: "socket", Key: "socket", Default: defaultSocket, Value: settings.Text(&o.Socket), Usage: "unix socket of cocoond"},
		{Env: "VK_RUNTIME", Flag: "runtime", Key: "runtime", Default: runtimeAuto, Value: settings.Text(&o.Runtime), Usage: "how to reach VMs: api (the socket), cli (the cocoon binary), auto (the binary if the socket does not answer)"},
		{Env: "VK_COCOON_BIN", Flag: "cocoon-bin", Key: "cocoonBin", Default: nodecli.DefaultBinary, Value: settings.Text(&o.CocoonBin), Usage: "path of the cocoon binary"},
		{Env: "VK_NODE_NAME", Flag: "node-name", Key: "nodeName", Default: defaultNodeName, Value: settings.Text(&o.NodeName), Usage: "name of the virtual node"},
		{Env: "VK_NODE_IP", Flag: "node-ip", Key: "nodeIP", Value: settings.Text(&o.NodeIP), Usage: "InternalIP of the node (default: the first IPv4 address that is not loopback)"},
		{Env: "VK_NODE_POOL", Flag: "node-pool", Key: "pool", Default: "default", Value: settings.Text(&o.Pool), Usage: "pool label of the node"},
		{Env: "VK_CLUSTER_DOMAIN", Flag: "cluster-domain", Key: "clusterDomain", Default: convert.DefaultClusterDomain, Value: settings.Text(&o.ClusterDomain), Usage: "DNS domain of the cluster, for the full host names of pods with a subdomain, and for their search list with --cluster-dns"},
		{Env: "VK_CLUSTER_DNS", Flag: "cluster-dns", Key: "clusterDNS", Value: settings.Text(&o.ClusterDNS), Usage: "ADDRESS,... of the cluster's name servers, for pods with dnsPolicy ClusterFirst (default: none, and they use those of the VM's network)"},
		{Env: "VK_NETWORK_POLICY", Flag: "network-policy", Key: "networkPolicy", Default: policyEnforce, Value: settings.Text(&o.NetworkPolicy), Usage: "what to do with the NetworkPolicies of the cluster, on a network that can enforce them: enforce, or ignore; to enforce them the node needs the right to read policies, namespaces and all pods, and without it no pod starts"},
		{Env: "VK_SNAPSHOT_CPU_CLASS", Flag: "snapshot-cpu-class", Key: "snapshotCPUClass", Value: settings.Text(&o.CPUClass), Usage: "CPU class label of the node; a snapshot with memory resumes only on nodes of the class it was taken on (default: none)"},
		{Env: "VK_PROVIDER_ID", Flag: "provider-id", Key: "providerID", Value: settings.Text(&o.ProviderID), Usage: "ProviderID of the node, e.g. gce://PROJECT/ZONE/INSTANCE"},
		{Env: "VK_NO_ROLE", Flag: "no-role", Key: "noRole", Value: settings.Bool(&o.NoRole), Usage: "do not set the role label; the node's own credentials may not set it"},
		{Env: "VK_BIND_ADDRESS", Flag: "bind-address", Key: "bindAddress", Value: settings.Text(&o.BindAddress), Usage: "address of the kubelet API (default: all)"},
		{Env: "VK_KUBELET_PORT", Flag: "kubelet-port", Key: "kubeletPort", Default: strconv.Itoa(defaultPort), Value: settings.Number(&o.KubeletPort), Usage: "port of the kubelet API"},
		{Env: "VK_TLS_CERT", Flag: "tls-cert", Key: "tlsCert", Default: "/etc/cocoon/vk/tls/vk-kubelet.crt", Value: settings.Text(&o.TLSCert), Usage: "serving certificate of the kubelet API"},
		{Env: "VK_TLS_KEY", Flag: "tls-key", Key: "tlsKey", Default: "/etc/cocoon/vk/tls/vk-kubelet.key", Value: settings.Text(&o.TLSKey), Usage: "key of the serving certificate"},
		{Env: "VK_CLIENT_CA", Flag: "client-ca", Key: "clientCA", Value: settings.Text(&o.ClientCA), Usage: "certificate authority of the kubelet API's clients (default: that of the kubeconfig)"},
		{Env: "VK_METRICS_ADDR", Flag: "metrics-addr", Key: "metricsAddr", Default: "127.0.0.1:9091", Value: settings.Text(&o.MetricsAddr), Usage: "address of the Prometheus listener, which does not authenticate clients; empty: none (the kubelet API also serves /metrics, to clients that may get nodes/metrics)"},
		{Env: "VK_LEASES_PATH", Flag: "leases-path", Key: "leasesPath", Default: "/var/lib/cocoon/net/leases.json", Value: settings.Text(&o.LeasesPath), Usage: "JSON lease file of the network"},
		{Env: "VK_ORPHAN_POLICY", Flag: "orphan-policy", Key: "orphans", Default: "alert", Value: settings.Text(&o.Orphans), Usage: "what to do with VMs whose pod no longer exists: alert, destroy, keep"},
		{Env: "EPOCH_URL", Flag: "epoch-url", Key: "epochURL", Value: settings.Text(&o.EpochURL), Usage: "registry of snapshots, e.g. http://epoch.cocoon-system.svc:8080 (default: none, and snapshots stay on the node)"},
		{Env: "EPOCH_TOKEN", Value: settings.Text(&o.EpochToken), Usage: "bearer token of the registry; it has no flag because every user of the host can read command lines"},
		{Env: "VK_EPOCH_TOKEN_FILE", Flag: "epoch-token-file", Key: "epochTokenFile", Value: settings.Text(&o.EpochTokenFile), Usage: "file with the bearer token of the registry (or set the token itself in $EPOCH_TOKEN)"},
		{Env: "EPOCH_CA_CERT", Flag: "epoch-ca-cert", Key: "epochCACert", Value: settings.Text(&o.EpochCACert), Usage: "PEM file with the certificate authority of the registry"},
		{Env: "VK_PUBLIC_REPOSITORIES", Flag: "public-repositories", Key: "publicRepositories", Value: settings.Text(&o.PublicRepositories), Usage: "REPOSITORY,... of the registry that pods of every namespace may clone from; a name that ends in / means all repositories below it (default: none, and a namespace clones only from its own repositories)"},
		{Env: "VK_TRUST_OLD_SNAPSHOTS", Flag: "trust-old-snapshots", Key: "trustOldSnapshots", Value: settings.Bool(&o.TrustOldSnapshots), Usage: "for snapshots in the registry from releases that recorded no owner, take the owner from the name; VMs of two namespaces may have the same such name"},
		{Env: "VK_PEERS", Flag: "peers", Key: "peers", Value: settings.Text(&o.Peers), Usage: "HOST:PORT,... of the node APIs of other nodes; the node looks there for a hibernated VM before it looks in the registry"},
		{Env: "VK_STATIC_FORWARD_NETWORKS", Flag: "static-forward-networks", Key: "staticForwardNetworks", Value: settings.Text(&o.StaticForwardNetworks), Usage: "CIDR,... that kubectl port-forward of static pods may connect to (default: none); the node's own, loopback and link-local addresses are never allowed"},
		{Env: "COCOON_ROOT_DIR", Flag: "root-dir", Key: "rootDir", Default: defaultRoot, Value: settings.Text(&o.RootDir), Usage: "folder of the VMs' disks; its file system is the storage of the node"},
		{Env: "VK_RESERVE_PERCENT", Flag: "reserve-percent", Key: "reservePercent", Default: "20", Value: settings.Number(&o.ReservePercent), Usage: "per cent of the host that pods cannot use"},
		{Env: "VK_CPU_OVERCOMMIT", Flag: "cpu-overcommit", Key: "cpuOvercommit", Default: "1", Value: settings.Number(&o.CPUOvercommit), Usage: "virtual CPUs that pods may request for each CPU of the host; raise it if pods stay Pending with Insufficient cpu while the host is idle"},
		{Env: "VK_NODE_CPU", Flag: "node-cpu", Key: "cpu", Value: settings.Text(&o.CPU), Usage: "CPU capacity (default: measured)"},
		{Env: "VK_NODE_MEM", Flag: "node-mem", Key: "memory", Value: settings.Text(&o.Memory), Usage: "memory capacity (default: measured)"},
		{Env: "VK_NODE_STORAGE", Flag: "node-storage", Key: "storage", Value: settings.Text(&o.Storage), Usage: "storage capacity (default: measured)"},
		{Env: "VK_NODE_HUGEPAGES", Flag: "node-hugepages", Key: "hugepages", Value: settings.Text(&o.Hugepages), Usage: "hugepages-2Mi capacity (default: measured)"},
		{Env: "VK_NODE_PODS", Flag: "node-pods", Key: "pods", Default: "256", Value: settings.Number(&o.Pods), Usage: "maximum number of pods"},
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
