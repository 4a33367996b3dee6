package vkcocoon

import (
	"cmp"
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	kubeletconfig "k8s.io/kubelet/config/v1beta1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/node"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/kube/stats"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/version"
)

// Config is the configuration of one virtual node. Empty fields take the defaults of the seed, where it has one.
type Config struct {
	Kubeconfig    string `json:"kubeconfig,omitempty"`       // path; "": the credentials of the pod this runs in
	NodeName      string `json:"nodeName,omitempty"`         // default cocoon-pool
	NodeIP        string `json:"nodeIP,omitempty"`           // default: the first IPv4 address of this host that is not loopback
	Pool          string `json:"pool,omitempty"`             // default "default"
	ClusterDomain string `json:"clusterDomain,omitempty"`    // DNS domain of the cluster; default cluster.local
	ClusterDNS    string `json:"clusterDNS,omitempty"`       // addresses of the cluster's name servers, separated by commas; "": those of the VMs' networks
	NetworkPolicy string `json:"networkPolicy,omitempty"`    // enforce (default) or ignore
	CPUClass      string `json:"snapshotCPUClass,omitempty"` // label: nodes of one class can resume each other's memory snapshots; "": none
	ProviderID    string `json:"providerID,omitempty"`
	NoRole        bool   `json:"noRole,omitempty"` // do not set the role label: a node's own credentials may not set it
	Version       string `json:"-"`                // default: of this build

	BootstrapKubeconfig string `json:"bootstrapKubeconfig,omitempty"` // path; with it Kubeconfig is made, for the node's own identity
	CertDir             string `json:"certDir,omitempty"`             // folder of the certificates that the cluster signs; default /var/lib/vk-cocoon/pki
	ServingCSR          bool   `json:"servingCSR,omitempty"`          // the cluster signs the serving certificate too; replaces TLSCert and TLSKey

	BindAddress string `json:"bindAddress,omitempty"` // of the kubelet API; default: all
	KubeletPort int    `json:"kubeletPort,omitempty"` // default 10250
	TLSCert     string `json:"tlsCert,omitempty"`     // serving certificate; self-signed while the files are missing or expired
	TLSKey      string `json:"tlsKey,omitempty"`
	ClientCA    string `json:"clientCA,omitempty"`    // PEM file with the authority for client certificates; default: the kubeconfig's authority
	MetricsAddr string `json:"metricsAddr,omitempty"` // host:port; "": none

	LeasesPath string `json:"leasesPath,omitempty"` // lease file with addresses by MAC
	RootDir    string `json:"rootDir,omitempty"`    // folder of the VMs' disks, whose file system is the node's storage
	Orphans    string `json:"orphans,omitempty"`    // alert, destroy, keep

	EpochURL       string `json:"epochURL,omitempty"`       // registry of snapshots, [http[s]://]HOST[:PORT][/PREFIX]; "": none
	EpochToken     string `json:"-"`                        // bearer token for it; secret
	EpochTokenFile string `json:"epochTokenFile,omitempty"` // file that holds the token, when EpochToken is empty
	EpochCACert    string `json:"epochCACert,omitempty"`    // PEM file with the authority of its certificate, besides the system's
	Peers          string `json:"peers,omitempty"`          // HOST:PORT of other nodes' node APIs, separated by commas

	StaticForwardNetworks string `json:"staticForwardNetworks,omitempty"` // CIDRs, separated by commas, to whose machines static pods forward ports; "": none

	PublicRepositories string `json:"publicRepositories,omitempty"` // of the registry, separated by commas; every namespace may clone from them
	TrustOldSnapshots  bool   `json:"trustOldSnapshots,omitempty"`  // without a recorded owner: take the owner from the name

	ReservePercent int    `json:"reservePercent,omitempty"` // 0–100, of the host, reserved for the host
	CPUOvercommit  int    `json:"cpuOvercommit,omitempty"`  // virtual CPUs that pods may request for each CPU of the host; default 1
	CPU            string `json:"cpu,omitempty"`
	Memory         string `json:"memory,omitempty"`
	Storage        string `json:"storage,omitempty"`
	Hugepages      string `json:"hugepages,omitempty"`
	Pods           int    `json:"pods,omitempty"`

	BackoffBase time.Duration `json:"-"` // of crashing guests; default 10 s
	BackoffMax  time.Duration `json:"-"` // default 5 min

	dns       []string
	sizes     node.Sizes
	snapshots podsnapshots.Registry
	static    []netip.Prefix
}

// Defaults of the seed.
const (
	defaultNodeName = "cocoon-pool"
	defaultPort     = 10250
	defaultRoot     = "/var/lib/cocoon"
	defaultCertDir  = "/var/lib/vk-cocoon/pki"
)

// What a node does with network policies. Not on and off, which are booleans in YAML.
const (
	policyEnforce = "enforce"
	policyIgnore  = "ignore"
)

// complete fills in the defaults and checks the rest.
func (c Config) complete() (Config, error) {
	c.NodeName = cmp.Or(c.NodeName, defaultNodeName)
	if bad := validation.IsDNS1123Subdomain(c.NodeName); len(bad) > 0 {
		return c, errdefs.Invalidf("node name %q: %s", c.NodeName, strings.Join(bad, "; "))
	}
	if c.NodeIP == "" {
		c.NodeIP = firstIPv4()
	} else if _, err := netip.ParseAddr(c.NodeIP); err != nil {
		return c, errdefs.Invalidf("node address %q must be an IP address", c.NodeIP)
	}
	if bad := validation.IsValidLabelValue(c.CPUClass); len(bad) > 0 {
		return c, errdefs.Invalidf("CPU class %q: %s", c.CPUClass, strings.Join(bad, "; "))
	}
	if c.NetworkPolicy = cmp.Or(c.NetworkPolicy, policyEnforce); c.NetworkPolicy != policyEnforce && c.NetworkPolicy != policyIgnore {
		return c, errdefs.Invalidf("network policy %q must be one of: %s, %s", c.NetworkPolicy, policyEnforce, policyIgnore)
	}
	c.KubeletPort = cmp.Or(c.KubeletPort, defaultPort)
	if c.KubeletPort < 1 || c.KubeletPort > 65535 {
		return c, errdefs.Invalidf("kubelet port %d must be between 1 and 65535", c.KubeletPort)
	}
	if c.ReservePercent < 0 || c.ReservePercent > 100 {
		return c, errdefs.Invalidf("invalid reserve of %d per cent; use 0 to 100", c.ReservePercent)
	}
	if c.Pods < 0 {
		return c, errdefs.Invalidf("invalid maximum of %d pods; it must not be negative", c.Pods)
	}
	if c.MetricsAddr != "" {
		if _, _, err := net.SplitHostPort(c.MetricsAddr); err != nil {
			return c, errdefs.Invalidf("metrics address %q must be HOST:PORT", c.MetricsAddr)
		}
	}
	c.CertDir = cmp.Or(c.CertDir, defaultCertDir)
	if c.BootstrapKubeconfig != "" {
		c.NoRole = true // a node's own credentials may not set the role
		c.Kubeconfig = cmp.Or(c.Kubeconfig, filepath.Join(c.CertDir, "kubeconfig"))
	}
	c.RootDir, c.Version = cmp.Or(c.RootDir, defaultRoot), cmp.Or(c.Version, version.Version)
	var err error
	if c.snapshots, err = c.registry(); err != nil {
		return c, err
	}
	if c.static, err = network.Prefixes("static forward networks", words(c.StaticForwardNetworks)); err != nil {
		return c, err
	}
	for _, server := range words(c.ClusterDNS) {
		if _, err := netip.ParseAddr(server); err != nil {
			return c, errdefs.Invalidf("name server %q of the cluster must be an IP address, such as 10.96.0.10", server)
		}
		c.dns = append(c.dns, server)
	}
	if c.CPUOvercommit = cmp.Or(c.CPUOvercommit, 1); c.CPUOvercommit < 1 || c.CPUOvercommit > node.MaxVirtual {
		return c, errdefs.Invalidf("invalid CPU overcommit of %d; use 1 to %d", c.CPUOvercommit, node.MaxVirtual)
	}
	c.sizes.Pods, c.sizes.Virtual = int64(c.Pods), c.CPUOvercommit
	for _, q := range []struct {
		what, text string
		to         *resource.Quantity
	}{{"CPU", c.CPU, &c.sizes.CPU}, {"memory", c.Memory, &c.sizes.Memory}, {"storage", c.Storage, &c.sizes.Storage}, {"hugepages", c.Hugepages, &c.sizes.Hugepages}} {
		if q.text == "" {
			continue
		}
		v, err := resource.ParseQuantity(q.text)
		if err != nil || v.Sign() < 0 {
			return c, errdefs.Invalidf("node %s %q must be a quantity such as 4 or 16Gi", q.what, q.text)
		}
		*q.to = v
	}
	return c, nil
}

// memory is the capacity of the node in bytes, 0 if it is not known.
func (c Config) memory() int64 {
	if !c.sizes.Memory.IsZero() {
		return c.sizes.Memory.Value()
	}
	m, err := stats.Host{Root: c.RootDir}.Memory()
	if err != nil {
		return 0
	}
	return m.Total
}

// firstIPv4 is this host's first address that other hosts can reach, "" without one.
func firstIPv4() string {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return ""
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() && n.IP.To4() != nil {
			return n.IP.String()
		}
	}
	return ""
}

// configz serves the settings in force as the kubelet does: under "kubeletconfig" those that a kubelet also has, under
// "vkcocoon" all of the virtual node's. Neither contains secrets.
func (c Config) configz() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(struct {
			Kubelet kubeletconfig.KubeletConfiguration `json:"kubeletconfig"`
			Own     Config                             `json:"vkcocoon"`
		}{c.asKubelet(), c})
	})
}

func (c Config) asKubelet() kubeletconfig.KubeletConfiguration {
	yes, no := true, false
	return kubeletconfig.KubeletConfiguration{
		TypeMeta: metav1.TypeMeta{Kind: "KubeletConfiguration", APIVersion: kubeletconfig.SchemeGroupVersion.String()},
		Address:  c.BindAddress, Port: int32(c.KubeletPort), TLSCertFile: c.TLSCert, TLSPrivateKeyFile: c.TLSKey, ServerTLSBootstrap: c.ServingCSR,
		Authentication: kubeletconfig.KubeletAuthentication{
			X509:      kubeletconfig.KubeletX509Authentication{ClientCAFile: c.ClientCA},
			Webhook:   kubeletconfig.KubeletWebhookAuthentication{Enabled: &yes},
			Anonymous: kubeletconfig.KubeletAnonymousAuthentication{Enabled: &no},
		},
		Authorization: kubeletconfig.KubeletAuthorization{Mode: kubeletconfig.KubeletAuthorizationModeWebhook},
		MaxPods:       int32(c.Pods), ProviderID: c.ProviderID, RegisterWithTaints: []corev1.Taint{node.Taint()},
	}
}

// words are the parts of a list that commas or spaces separate.
func words(list string) []string {
	return strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
}
