package vkcocoon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/logging"
	"cocoonstack.io/cocoon/internal/nodeclient"
)

const defaultSocket = "/run/cocoon/cocoond.sock"

// options are what the vk-cocoon binary can be told beyond a Config.
type options struct {
	Config
	socket string
	level  string
	format string
}

// setting is one choice: a flag, and the variable that stands in for it.
type setting struct {
	env, flag, usage string
	text             *string
	number           *int
}

func (o *options) settings() []setting {
	return []setting{
		{env: "KUBECONFIG", flag: "kubeconfig", text: &o.Kubeconfig, usage: "path of the kubeconfig (credentials of the pod otherwise)"},
		{env: "COCOON_SOCKET", flag: "socket", text: &o.socket, usage: "unix socket of cocoond"},
		{env: "VK_NODE_NAME", flag: "node-name", text: &o.NodeName, usage: "name of the virtual node"},
		{env: "VK_NODE_IP", flag: "node-ip", text: &o.NodeIP, usage: "InternalIP of the node (first IPv4 address that is not loopback otherwise)"},
		{env: "VK_NODE_POOL", flag: "node-pool", text: &o.Pool, usage: "pool label of the node"},
		{env: "VK_PROVIDER_ID", flag: "provider-id", text: &o.ProviderID, usage: "ProviderID of the node, e.g. gce://PROJECT/ZONE/INSTANCE"},
		{env: "VK_BIND_ADDRESS", flag: "bind-address", text: &o.BindAddress, usage: "address of the kubelet API (all otherwise)"},
		{env: "VK_KUBELET_PORT", flag: "kubelet-port", number: &o.KubeletPort, usage: "port of the kubelet API"},
		{env: "VK_TLS_CERT", flag: "tls-cert", text: &o.TLSCert, usage: "serving certificate of the kubelet API"},
		{env: "VK_TLS_KEY", flag: "tls-key", text: &o.TLSKey, usage: "key of the serving certificate"},
		{env: "VK_CLIENT_CA", flag: "client-ca", text: &o.ClientCA, usage: "certificate authority of the kubelet API's clients (the kubeconfig's otherwise)"},
		{env: "VK_METRICS_ADDR", flag: "metrics-addr", text: &o.MetricsAddr, usage: "address of the Prometheus listener, empty for none"},
		{env: "VK_LEASES_PATH", flag: "leases-path", text: &o.LeasesPath, usage: "JSON lease file of the network"},
		{env: "VK_ORPHAN_POLICY", flag: "orphan-policy", text: &o.Orphans, usage: "what to do with VMs whose pod is gone: alert, destroy, keep"},
		{env: "EPOCH_URL", flag: "epoch-url", text: &o.EpochURL, usage: "registry of snapshots, e.g. http://epoch.cocoon-system.svc:8080 (none otherwise: snapshots stay on the node)"},
		{env: "VK_EPOCH_TOKEN_FILE", flag: "epoch-token-file", text: &o.EpochTokenFile, usage: "file with the registry's bearer token (or the token itself in $EPOCH_TOKEN)"},
		{env: "EPOCH_CA_CERT", flag: "epoch-ca-cert", text: &o.EpochCACert, usage: "PEM file with the registry's certificate authority"},
		{env: "VK_PEERS", flag: "peers", text: &o.Peers, usage: "HOST:PORT,... of other nodes' node APIs, asked for a hibernated VM before the registry"},
		{env: "COCOON_ROOT_DIR", flag: "root-dir", text: &o.RootDir, usage: "folder of the VMs' disks, whose file system is the node's storage"},
		{env: "VK_RESERVE_PERCENT", flag: "reserve-percent", number: &o.ReservePercent, usage: "per cent of the host kept for itself"},
		{env: "VK_NODE_CPU", flag: "node-cpu", text: &o.CPU, usage: "CPU capacity (measured otherwise)"},
		{env: "VK_NODE_MEM", flag: "node-mem", text: &o.Memory, usage: "memory capacity (measured otherwise)"},
		{env: "VK_NODE_STORAGE", flag: "node-storage", text: &o.Storage, usage: "storage capacity (measured otherwise)"},
		{env: "VK_NODE_HUGEPAGES", flag: "node-hugepages", text: &o.Hugepages, usage: "hugepages-2Mi capacity (measured otherwise)"},
		{env: "VK_NODE_PODS", flag: "node-pods", number: &o.Pods, usage: "most pods at a time"},
		{env: "VK_LOG_LEVEL", flag: "log-level", text: &o.level, usage: "debug, info, warn or error"},
		{env: "VK_LOG_FORMAT", flag: "log-format", text: &o.format, usage: "text or json"},
	}
}

// parse reads flags, then variables, then defaults, in this order of weight.
func parse(args []string, env func(string) string, help io.Writer) (options, error) {
	o := options{socket: defaultSocket, level: "info", format: "text", Config: Config{
		NodeName: defaultNodeName, KubeletPort: defaultPort, TLSCert: defaultCert, TLSKey: defaultKey, MetricsAddr: defaultMetrics,
		LeasesPath: defaultLeases, RootDir: defaultRoot, Orphans: "alert", ReservePercent: defaultReserve, Pods: 256, Pool: "default",
	}}
	o.EpochToken = env("EPOCH_TOKEN") // never a flag: the command line is everybody's to read
	flags := pflag.NewFlagSet("vk-cocoon", pflag.ContinueOnError)
	flags.SetOutput(help)
	flags.SortFlags = false
	for _, s := range o.settings() {
		usage := s.usage + " [$" + s.env + "]"
		if s.number != nil {
			if v := env(s.env); v != "" {
				n, err := strconv.Atoi(v)
				if err != nil {
					return o, errdefs.Invalidf("%s: %q is not a number", s.env, v)
				}
				*s.number = n
			}
			flags.IntVar(s.number, s.flag, *s.number, usage)
			continue
		}
		if v := env(s.env); v != "" {
			*s.text = v
		}
		flags.StringVar(s.text, s.flag, *s.text, usage)
	}
	if err := flags.Parse(args); err != nil {
		return o, errdefs.As(errdefs.InvalidArgument, err)
	}
	if flags.NArg() > 0 {
		return o, errdefs.Invalidf("vk-cocoon takes no arguments, only flags; %q is one", flags.Arg(0))
	}
	return o, nil
}

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
	log, err := logging.New(stderr, o.level, o.format)
	if err != nil {
		return err
	}
	klog.SetSlogLogger(log.With("component", "client-go"))
	runtime, err := nodeclient.Dial(o.socket)
	if err != nil {
		return err
	}
	defer runtime.Close()
	n, err := New(o.Config, runtime, log)
	if err != nil {
		return err
	}
	return n.Run(ctx)
}
