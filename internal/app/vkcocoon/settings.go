package vkcocoon

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodecli"
)

// options are the settings of the vk-cocoon binary beyond a Config, with the keys of its YAML file.
type options struct {
	Config

	Socket    string `json:"socket,omitempty"`
	Runtime   string `json:"runtime,omitempty"`   // auto, api, cli
	CocoonBin string `json:"cocoonBin,omitempty"` // the cocoon binary
	LogLevel  string `json:"logLevel,omitempty"`
	LogFormat string `json:"logFormat,omitempty"`
}

// Setting is one setting that can be given in three ways. The flag wins, then the variable, then the file.
type Setting struct {
	Flag    string
	Env     string
	Key     string // in the file
	Default string
	Usage   string
	value   pflag.Value
}

// settings are all settings, bound to the fields of o. Their defaults are the values in o.
func (o *options) settings() []Setting {
	text := func(p *string) pflag.Value { return (*textValue)(p) }
	number := func(p *int) pflag.Value { return (*numberValue)(p) }
	flag := func(p *bool) pflag.Value { return (*boolValue)(p) }
	all := []Setting{
		{Env: "KUBECONFIG", Flag: "kubeconfig", Key: "kubeconfig", value: text(&o.Kubeconfig), Usage: "path of the kubeconfig (credentials of the pod otherwise)"},
		{Env: "VK_BOOTSTRAP_KUBECONFIG", Flag: "bootstrap-kubeconfig", Key: "bootstrapKubeconfig", value: text(&o.BootstrapKubeconfig), Usage: "path of credentials that new nodes share; with them the node asks the cluster to sign an identity of its own, and writes --kubeconfig"},
		{Env: "VK_CERT_DIR", Flag: "cert-dir", Key: "certDir", value: text(&o.CertDir), Usage: "folder of the certificates that the cluster signs"},
		{Env: "VK_SERVING_CSR", Flag: "serving-csr", Key: "servingCSR", value: flag(&o.ServingCSR), Usage: "have the cluster sign the serving certificate too, and renew it (instead of --tls-cert)"},
		{Env: "COCOON_SOCKET", Flag: "socket", Key: "socket", value: text(&o.Socket), Usage: "unix socket of cocoond"},
		{Env: "VK_RUNTIME", Flag: "runtime", Key: "runtime", value: text(&o.Runtime), Usage: "how VMs are reached: api (the socket), cli (the cocoon binary), auto (the binary when the socket does not answer)"},
		{Env: "VK_COCOON_BIN", Flag: "cocoon-bin", Key: "cocoonBin", value: text(&o.CocoonBin), Usage: "the cocoon binary"},
		{Env: "VK_NODE_NAME", Flag: "node-name", Key: "nodeName", value: text(&o.NodeName), Usage: "name of the virtual node"},
		{Env: "VK_NODE_IP", Flag: "node-ip", Key: "nodeIP", value: text(&o.NodeIP), Usage: "InternalIP of the node (first IPv4 address that is not loopback otherwise)"},
		{Env: "VK_NODE_POOL", Flag: "node-pool", Key: "pool", value: text(&o.Pool), Usage: "pool label of the node"},
		{Env: "VK_SNAPSHOT_CPU_CLASS", Flag: "snapshot-cpu-class", Key: "snapshotCPUClass", value: text(&o.CPUClass), Usage: "CPU class label of the node; snapshots of memory are for nodes of the class they were taken on (none otherwise)"},
		{Env: "VK_PROVIDER_ID", Flag: "provider-id", Key: "providerID", value: text(&o.ProviderID), Usage: "ProviderID of the node, e.g. gce://PROJECT/ZONE/INSTANCE"},
		{Env: "VK_NO_ROLE", Flag: "no-role", Key: "noRole", value: flag(&o.NoRole), Usage: "leave the role label to an admin; a node's own credentials may not set it"},
		{Env: "VK_BIND_ADDRESS", Flag: "bind-address", Key: "bindAddress", value: text(&o.BindAddress), Usage: "address of the kubelet API (all otherwise)"},
		{Env: "VK_KUBELET_PORT", Flag: "kubelet-port", Key: "kubeletPort", value: number(&o.KubeletPort), Usage: "port of the kubelet API"},
		{Env: "VK_TLS_CERT", Flag: "tls-cert", Key: "tlsCert", value: text(&o.TLSCert), Usage: "serving certificate of the kubelet API"},
		{Env: "VK_TLS_KEY", Flag: "tls-key", Key: "tlsKey", value: text(&o.TLSKey), Usage: "key of the serving certificate"},
		{Env: "VK_CLIENT_CA", Flag: "client-ca", Key: "clientCA", value: text(&o.ClientCA), Usage: "certificate authority of the kubelet API's clients (the kubeconfig's otherwise)"},
		{Env: "VK_METRICS_ADDR", Flag: "metrics-addr", Key: "metricsAddr", value: text(&o.MetricsAddr), Usage: "address of the Prometheus listener, which asks nobody who they are; empty for none (the kubelet API has /metrics too, for who may get nodes/metrics)"},
		{Env: "VK_LEASES_PATH", Flag: "leases-path", Key: "leasesPath", value: text(&o.LeasesPath), Usage: "JSON lease file of the network"},
		{Env: "VK_ORPHAN_POLICY", Flag: "orphan-policy", Key: "orphans", value: text(&o.Orphans), Usage: "what to do with VMs whose pod is gone: alert, destroy, keep"},
		{Env: "EPOCH_URL", Flag: "epoch-url", Key: "epochURL", value: text(&o.EpochURL), Usage: "registry of snapshots, e.g. http://epoch.cocoon-system.svc:8080 (none otherwise: snapshots stay on the node)"},
		{Env: "VK_EPOCH_TOKEN_FILE", Flag: "epoch-token-file", Key: "epochTokenFile", value: text(&o.EpochTokenFile), Usage: "file with the registry's bearer token (or the token itself in $EPOCH_TOKEN)"},
		{Env: "EPOCH_CA_CERT", Flag: "epoch-ca-cert", Key: "epochCACert", value: text(&o.EpochCACert), Usage: "PEM file with the registry's certificate authority"},
		{Env: "VK_PUBLIC_REPOSITORIES", Flag: "public-repositories", Key: "publicRepositories", value: text(&o.PublicRepositories), Usage: "REPOSITORY,... of the registry that pods of every namespace may clone from; one that ends in / stands for all below it (none otherwise: a namespace clones from its own)"},
		{Env: "VK_TRUST_OLD_SNAPSHOTS", Flag: "trust-old-snapshots", Key: "trustOldSnapshots", value: flag(&o.TrustOldSnapshots), Usage: "take snapshots that releases before owners left in the registry for those of the VMs that their names say; names of two namespaces may be the same"},
		{Env: "VK_PEERS", Flag: "peers", Key: "peers", value: text(&o.Peers), Usage: "HOST:PORT,... of other nodes' node APIs, asked for a hibernated VM before the registry"},
		{Env: "VK_STATIC_FORWARD_NETWORKS", Flag: "static-forward-networks", Key: "staticForwardNetworks", value: text(&o.StaticForwardNetworks), Usage: "CIDR,... to whose machines kubectl port-forward of static pods connects (none otherwise); never to this node's own addresses, its loopback or link-local ones"},
		{Env: "COCOON_ROOT_DIR", Flag: "root-dir", Key: "rootDir", value: text(&o.RootDir), Usage: "folder of the VMs' disks, whose file system is the node's storage"},
		{Env: "VK_RESERVE_PERCENT", Flag: "reserve-percent", Key: "reservePercent", value: number(&o.ReservePercent), Usage: "per cent of the host kept for itself"},
		{Env: "VK_NODE_CPU", Flag: "node-cpu", Key: "cpu", value: text(&o.CPU), Usage: "CPU capacity (measured otherwise)"},
		{Env: "VK_NODE_MEM", Flag: "node-mem", Key: "memory", value: text(&o.Memory), Usage: "memory capacity (measured otherwise)"},
		{Env: "VK_NODE_STORAGE", Flag: "node-storage", Key: "storage", value: text(&o.Storage), Usage: "storage capacity (measured otherwise)"},
		{Env: "VK_NODE_HUGEPAGES", Flag: "node-hugepages", Key: "hugepages", value: text(&o.Hugepages), Usage: "hugepages-2Mi capacity (measured otherwise)"},
		{Env: "VK_NODE_PODS", Flag: "node-pods", Key: "pods", value: number(&o.Pods), Usage: "most pods at a time"},
		{Env: "VK_LOG_LEVEL", Flag: "log-level", Key: "logLevel", value: text(&o.LogLevel), Usage: "debug, info, warn or error"},
		{Env: "VK_LOG_FORMAT", Flag: "log-format", Key: "logFormat", value: text(&o.LogFormat), Usage: "text or json"},
	}
	for i := range all {
		all[i].Default = all[i].value.String()
	}
	return all
}

func defaults() options {
	return options{Socket: defaultSocket, Runtime: runtimeAuto, CocoonBin: nodecli.DefaultBinary, LogLevel: "info", LogFormat: "text", Config: Config{
		NodeName: defaultNodeName, KubeletPort: defaultPort, TLSCert: defaultCert, TLSKey: defaultKey, MetricsAddr: defaultMetrics,
		LeasesPath: defaultLeases, RootDir: defaultRoot, Orphans: "alert", ReservePercent: defaultReserve, Pods: 256, Pool: "default", CertDir: defaultCertDir,
	}}
}

// Settings describes every setting of vk-cocoon, for its reference documentation.
func Settings() []Setting {
	o := defaults()
	return o.settings()
}

const helpHead = `vk-cocoon is a virtual Kubernetes node whose pods are VMs of this machine.

Each setting is a flag, an environment variable or a key of the YAML file given by --config; they count in this order.
EPOCH_TOKEN, the bearer token of the snapshot registry, is a variable only: a command line is everybody's to read.

`

// parse reads flags, variables, the file and defaults; the first of these wins.
func parse(args []string, env func(string) string, help io.Writer) (options, error) {
	o := defaults()
	settings := o.settings()
	flags := pflag.NewFlagSet("vk-cocoon", pflag.ContinueOnError)
	flags.SetOutput(help)
	flags.SortFlags = false
	flags.Usage = func() { fmt.Fprintf(help, "%sUsage:\n%s", helpHead, flags.FlagUsages()) }
	config := flags.String("config", env("VK_CONFIG"), "YAML `FILE` with settings [$VK_CONFIG]")
	flags.Lookup("config").DefValue = ""
	for _, s := range settings {
		f := flags.VarPF(s.value, s.Flag, "", s.Usage+" [$"+s.Env+", "+s.Key+":]")
		if s.value.Type() == "bool" {
			f.NoOptDefVal = "true"
		}
	}
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return o, err
		}
		return o, errdefs.As(errdefs.InvalidArgument, err)
	}
	if flags.NArg() > 0 {
		return o, errdefs.Invalidf("vk-cocoon takes no arguments, only flags; %q is one", flags.Arg(0))
	}
	given := map[string]string{} // flags overwrite the values that are set below
	flags.Visit(func(f *pflag.Flag) { given[f.Name] = f.Value.String() })
	path := *config
	o = defaults() // settings stay bound to the same fields
	if err := o.read(path); err != nil {
		return o, err
	}
	o.EpochToken = env("EPOCH_TOKEN")
	for _, s := range settings {
		if v := env(s.Env); v != "" {
			if err := s.value.Set(v); err != nil {
				return o, errdefs.Invalidf("%s: %w", s.Env, err)
			}
		}
		if v, ok := given[s.Flag]; ok {
			if err := s.value.Set(v); err != nil {
				return o, errdefs.Invalidf("--%s: %w", s.Flag, err)
			}
		}
	}
	return o, nil
}

// maxFile is the maximum size of a settings file; larger ones are rejected.
const maxFile = 1 << 20

// read reads the file; "" means no file. Unknown keys are an error.
func (o *options) read(path string) error {
	if path == "" {
		return nil
	}
	st, err := os.Stat(path)
	if err != nil {
		return errdefs.Preconditionf("read settings: %w", err)
	}
	if !st.Mode().IsRegular() || st.Size() > maxFile {
		return errdefs.Invalidf("read settings: %s is no small file", path)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return errdefs.Preconditionf("read settings: %w", err)
	}
	if err := yaml.UnmarshalStrict(text, o); err != nil {
		return errdefs.Invalidf("settings in %s: %w", path, err)
	}
	return nil
}

type textValue string

func (v *textValue) String() string     { return string(*v) }
func (v *textValue) Type() string       { return "string" }
func (v *textValue) Set(s string) error { *v = textValue(s); return nil }

type numberValue int

func (v *numberValue) String() string { return strconv.Itoa(int(*v)) }
func (v *numberValue) Type() string   { return "int" }

func (v *numberValue) Set(s string) error {
	n, err := strconv.Atoi(s)
	if err != nil {
		return errdefs.Invalidf("%q is not a number", s)
	}
	*v = numberValue(n)
	return nil
}

type boolValue bool

func (v *boolValue) String() string { return strconv.FormatBool(bool(*v)) }
func (v *boolValue) Type() string   { return "bool" }

func (v *boolValue) Set(s string) error {
	b, err := strconv.ParseBool(s)
	if err != nil {
		return errdefs.Invalidf("%q is neither true nor false", s)
	}
	*v = boolValue(b)
	return nil
}
