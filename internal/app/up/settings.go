package up

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hostdir"
	"cocoonstack.io/cocoon/internal/kube/node"
	"cocoonstack.io/cocoon/internal/reach"
)

const (
	defaultNodeName    = "cocoon-node-0"
	defaultAPIPort     = 6443
	defaultNodePort    = 10250
	defaultMetricsPort = 9091
	defaultEpochPort   = 8080
	defaultServerPort  = 4443 // of metrics-server
	defaultManagerPort = 8081
	defaultSchedPort   = 10259
	defaultWebhookPort = 8443
	defaultVirtPort    = 8444 // of the API of KubeVirt's objects
	defaultProxyHealth = 10256
	defaultProxyPort   = 10249 // of kube-proxy's metrics
	defaultDNSPort     = 10053
	defaultDNSReady    = 8181
	defaultDNSMetrics  = 9153
	serviceCIDR        = "10.96.0.0/16"
	serviceIP          = "10.96.0.1"  // first address of serviceCIDR: the "kubernetes" Service
	dnsIP              = "10.96.0.10" // the Service "kube-dns", at its usual address
	nodeIP             = "127.0.0.1"
	mostNodes          = 16
	defaultOvercommit  = 16 // the VMs of a demo, a test or a laptop are idle most of the time
)

// Settings are the choices of an instance that must survive a restart. They are stored in DIR/up.json.
type Settings struct {
	APIPort   int            `json:"apiPort"`
	Nodes     []NodeSettings `json:"nodes"`
	With      []string       `json:"with,omitempty"` // what runs beside control plane and nodes
	EpochPort int            `json:"epochPort,omitempty"`
	// ServerPort is metrics-server's.
	ServerPort int `json:"metricsServerPort,omitempty"`
	// ManagerPort is the port of the manager's health checks.
	ManagerPort int `json:"managerPort,omitempty"`
	// ExtraConfig are flags of the control plane's components, each COMPONENT.FLAG=VALUE.
	ExtraConfig []string `json:"extraConfig,omitempty"`
	// HostPaths are the folders of this machine that VMs may share.
	HostPaths []string `json:"hostPaths,omitempty"`
	// CSIPlugins is the folder in which CSI drivers of this machine register; "": none do.
	CSIPlugins string `json:"csiPlugins,omitempty"`
	// CNIConfDir is the folder of conflists that are networks of the nodes beside their bridges; "": there are none.
	CNIConfDir string `json:"cniConfDir,omitempty"`
	// AllowImages is where pods' images may come from, in addition to public addresses.
	AllowImages []string `json:"allowImages,omitempty"`
	// CPUOvercommit is how many virtual CPUs pods may request for each CPU of this machine; 0 means defaultOvercommit.
	CPUOvercommit int `json:"cpuOvercommit,omitempty"`
	// SchedulerPort is the port of cocoon-scheduler's health checks.
	SchedulerPort int `json:"schedulerPort,omitempty"`
	// WebhookPort is the port of the manager's admission webhooks.
	WebhookPort int `json:"webhookPort,omitempty"`
	// KubeVirtPort is the port of the manager's API of KubeVirt's objects.
	KubeVirtPort int `json:"kubeVirtPort,omitempty"`
	// Services is whether the instance serves Services and the cluster's DNS; nil: if nothing else on the machine does.
	Services *bool `json:"services,omitempty"`
	// Kubelet is the node with a kubelet; nil: there is none.
	Kubelet *KubeletSettings `json:"kubelet,omitempty"`
	// Ports of kube-proxy and the cluster's DNS. All except DNSPort are on loopback; DNSPort is on the first node's bridge.
	ProxyHealthPort  int `json:"proxyHealthPort,omitempty"`
	ProxyMetricsPort int `json:"proxyMetricsPort,omitempty"`
	DNSPort          int `json:"dnsPort,omitempty"`
	DNSReadyPort     int `json:"dnsReadyPort,omitempty"`
	DNSMetricsPort   int `json:"dnsMetricsPort,omitempty"`

	// NodeName is from the format of instances with a single node.
	NodeName string `json:"nodeName,omitempty"`
	NodePort int    `json:"nodePort,omitempty"`
}

// NodeSettings are the choices of one virtual node.
type NodeSettings struct {
	Name        string `json:"name"`
	Port        int    `json:"port"`              // the kubelet API
	MetricsPort int    `json:"metricsPort"`       // Prometheus
	Address     string `json:"address,omitempty"` // of its bridge, where the kubelet API listens; known once the bridge is up
}

// layout knows the paths of an instance's files.
type layout struct{ dir string }

func (l layout) join(parts ...string) string {
	return filepath.Join(append([]string{l.dir}, parts...)...)
}
func (l layout) settings() string   { return l.join("up.json") }
func (l layout) lock() string       { return l.join("up.lock") }
func (l layout) kubeconfig() string { return l.join("kubeconfig") }
func (l layout) log(name string) string {
	return l.join("log", name+".log")
}
func (l layout) config(name string) string { return l.join("etc", name) }
func (l layout) mappings() string          { return l.join("etc", "images.d") } // image name mappings, filled by the user
func (l layout) epochTokens() string       { return l.config("epoch-tokens") }

// nodeLayout knows the paths of one virtual node's files. Those of the first node are where `cocoon --dir DIR` expects
// them.
type nodeLayout struct {
	layout
	name  string
	first bool
}

func (l layout) node(s Settings, i int) nodeLayout {
	return nodeLayout{layout: l, name: s.Nodes[i].Name, first: i == 0}
}

func (n nodeLayout) folder(name string) string {
	if n.first {
		return n.join(name)
	}
	return n.join("nodes", n.name, name)
}
func (n nodeLayout) kubeconfig() string   { return n.config(n.suffixed("node") + ".kubeconfig") }
func (n nodeLayout) daemonConfig() string { return n.config(n.suffixed("cocoond") + ".yaml") }
func (n nodeLayout) socket() string       { return filepath.Join(n.folder("run"), "cocoond.sock") }

// suffixed is the name of a file that each node has.
func (n nodeLayout) suffixed(name string) string {
	if n.first {
		return name
	}
	return name + "-" + n.name
}

var nodeNameRE = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)

// check rejects invalid options.
func (o Options) check() error {
	if o.NodeName != "" && (len(o.NodeName) > 63 || !nodeNameRE.MatchString(o.NodeName)) {
		return errdefs.Invalidf("node name %q must be a DNS name of at most 63 characters", o.NodeName)
	}
	for what, port := range map[string]int{"API server": o.APIPort, "virtual node": o.NodePort, "node's metrics": o.MetricsPort, "registry": o.EpochPort, "manager": o.ManagerPort, "manager's webhooks": o.WebhookPort} {
		if port < 0 || port > 65535 {
			return errdefs.Invalidf("port %d of the %s must be between 1 and 65535", port, what)
		}
	}
	if o.Nodes != nil && (*o.Nodes < 0 || *o.Nodes > mostNodes) {
		return errdefs.Invalidf("invalid number of nodes, %d; use 0 to %d", *o.Nodes, mostNodes)
	}
	if o.CPUOvercommit < 0 || o.CPUOvercommit > node.MaxVirtual {
		return errdefs.Invalidf("invalid --cpu-overcommit %d; use 1 to %d", o.CPUOvercommit, node.MaxVirtual)
	}
	for _, part := range o.With {
		if !slices.Contains(parts, part) {
			return errdefs.Invalidf("invalid part %q; choose from %s", part, strings.Join(parts, ", "))
		}
	}
	if _, err := (reach.Policy{}).Open(o.AllowImages); err != nil {
		return errdefs.Invalidf("--allow-images: %w", err)
	}
	if _, err := hostdir.Parse(o.HostPaths); err != nil {
		return errdefs.Invalidf("--host-paths: %w", err)
	}
	for flag, dir := range map[string]*string{"csi-plugins": o.CSIPlugins, "cni-conf-dir": o.CNIConfDir} {
		if dir != nil && *dir != "" && (!filepath.IsAbs(*dir) || filepath.Clean(*dir) != *dir) {
			return errdefs.Invalidf("--%s: %q is not an absolute path without empty, \".\" and \"..\" parts", flag, *dir)
		}
	}
	for _, text := range o.ExtraConfig {
		if !extraConfigRE.MatchString(text) {
			return errdefs.Invalidf("--extra-config %q must be COMPONENT.FLAG=VALUE; COMPONENT must be one of: etcd, apiServer, controllerManager, scheduler", text)
		}
	}
	return nil
}

var extraConfigRE = regexp.MustCompile(`^(etcd|apiServer|controllerManager|scheduler)\.([a-z0-9-]+)=(.*)$`)

// extraArgs are the user's flags for one component. Preconditions: s was checked.
func (s Settings) extraArgs(component string) map[string]string {
	args := map[string]string{}
	for _, text := range s.ExtraConfig {
		if m := extraConfigRE.FindStringSubmatch(text); m[1] == component {
			args[m[2]] = m[3]
		}
	}
	return args
}

// nodeName is the name of the i-th node when the first is called first: a number at its end is counted up.
func nodeName(first string, i int) string {
	if i == 0 {
		return first
	}
	base := first
	if cut := strings.LastIndexByte(first, '-'); cut > 0 {
		if n, err := strconv.Atoi(first[cut+1:]); err == nil {
			return fmt.Sprintf("%s-%d", first[:cut], n+i)
		}
	}
	return fmt.Sprintf("%s-%d", base, i)
}

// check rejects settings that no instance can have stored.
func (s Settings) check() error {
	if err := (Options{APIPort: s.APIPort, EpochPort: s.EpochPort, ManagerPort: s.ManagerPort, WebhookPort: s.WebhookPort, With: s.With, ExtraConfig: s.ExtraConfig, HostPaths: s.HostPaths, CSIPlugins: &s.CSIPlugins, CNIConfDir: &s.CNIConfDir, AllowImages: s.AllowImages, CPUOvercommit: s.CPUOvercommit}).check(); err != nil {
		return err
	}
	if s.Kubelet != nil {
		if err := s.Kubelet.check(); err != nil {
			return err
		}
	}
	for _, n := range s.Nodes {
		if err := (Options{NodeName: n.Name, NodePort: n.Port, MetricsPort: n.MetricsPort}).check(); err != nil {
			return err
		}
	}
	return nil
}

func (s Settings) with(part string) bool { return slices.Contains(s.With, part) }

// wantServices reports whether the instance serves Services where it can.
func (s Settings) wantServices() bool { return s.Services == nil || *s.Services }

func (s Settings) epochURL() string { return fmt.Sprintf("http://%s:%d", nodeIP, s.EpochPort) }

// settle merges the requested options with the choices of an earlier start, picks free ports for the rest and stores
// the result. The caller holds the ports until it closes p. Preconditions: o.check() returned no error.
func settle(l layout, o Options, p *ports) (Settings, error) {
	var s Settings
	switch data, err := os.ReadFile(l.settings()); {
	case err == nil:
		if err := json.Unmarshal(data, &s); err != nil {
			return s, errdefs.DataLossf("%s is damaged (%w); remove it, and the next start chooses new ports", l.settings(), err)
		}
		if len(s.Nodes) == 0 && s.NodeName != "" {
			s.Nodes = []NodeSettings{{Name: s.NodeName, Port: s.NodePort}}
		}
		s.NodeName, s.NodePort = "", 0
		if err := s.check(); err != nil {
			return s, errdefs.DataLossf("%s is damaged (%w); remove it, and the next start writes a new one", l.settings(), err)
		}
	case errors.Is(err, os.ErrNotExist):
		s.Nodes = []NodeSettings{{}}
		if o.Nodes == nil || *o.Nodes > 0 {
			s.With = usualParts
		}
	default:
		return s, fmt.Errorf("read settings: %w", err)
	}
	if o.With != nil {
		s.With = slices.DeleteFunc(slices.Clone(parts), func(part string) bool { return !slices.Contains(o.With, part) }) // in the order of their start
	}
	if o.ExtraConfig != nil {
		s.ExtraConfig = o.ExtraConfig
	}
	if o.HostPaths != nil {
		s.HostPaths = o.HostPaths
	}
	if o.CSIPlugins != nil {
		s.CSIPlugins = *o.CSIPlugins
	}
	if o.CNIConfDir != nil {
		s.CNIConfDir = *o.CNIConfDir
	}
	if o.AllowImages != nil {
		s.AllowImages = o.AllowImages
	}
	if o.Services != nil {
		s.Services = o.Services
	}
	s.CPUOvercommit = cmp.Or(o.CPUOvercommit, s.CPUOvercommit)
	if o.Nodes != nil {
		s.Nodes = slices.Grow(s.Nodes, *o.Nodes)[:min(len(s.Nodes), *o.Nodes)]
		for len(s.Nodes) < *o.Nodes {
			s.Nodes = append(s.Nodes, NodeSettings{})
		}
	}
	err := s.settleKubelet(l, o)
	how := p.choose
	choose := func(port *int, what, flag string, asked, usual int) { // the first error stays
		if err == nil {
			*port, err = how(what, flag, asked, *port, usual)
		}
	}
	choose(&s.APIPort, "API server", "--api-port", o.APIPort, defaultAPIPort)
	for i := range s.Nodes {
		n := &s.Nodes[i]
		var port, metrics int
		if i == 0 {
			port, metrics = o.NodePort, o.MetricsPort
			n.Name = cmp.Or(o.NodeName, n.Name, defaultNodeName)
		} else {
			n.Name = nodeName(s.Nodes[0].Name, i)
		}
		choose(&n.Port, "virtual node", "--node-port", port, defaultNodePort)
		choose(&n.MetricsPort, "node's metrics", "--metrics-port", metrics, defaultMetricsPort)
	}
	if s.with(partEpoch) {
		choose(&s.EpochPort, "registry", "--epoch-port", o.EpochPort, defaultEpochPort)
	}
	if s.with(partMetricsServer) {
		if err == nil && len(s.Nodes) == 0 {
			err = errdefs.Invalidf("%s needs a node because it listens on the node's bridge; use --nodes 1 or more", partMetricsServer)
		}
		choose(&s.ServerPort, partMetricsServer, "--with=", 0, defaultServerPort)
	}
	if s.wantServices() && len(s.Nodes) > 0 {
		const off = "--services=false"
		choose(&s.ProxyHealthPort, "health checks of kube-proxy", off, 0, defaultProxyHealth)
		choose(&s.ProxyMetricsPort, "metrics of kube-proxy", off, 0, defaultProxyPort)
		choose(&s.DNSPort, "cluster's DNS", off, 0, defaultDNSPort)
		choose(&s.DNSReadyPort, "health checks of the cluster's DNS", off, 0, defaultDNSReady)
		choose(&s.DNSMetricsPort, "metrics of the cluster's DNS", off, 0, defaultDNSMetrics)
	}
	how = p.chooseInner
	if s.with(partManager) {
		choose(&s.ManagerPort, "manager", "--manager-port", o.ManagerPort, defaultManagerPort)
		choose(&s.WebhookPort, "manager's webhooks", "--webhook-port", o.WebhookPort, defaultWebhookPort)
		choose(&s.KubeVirtPort, "manager's API of KubeVirt's objects", "--with=", 0, defaultVirtPort)
	}
	if s.with(partScheduler) {
		choose(&s.SchedulerPort, partScheduler, "--with=", 0, defaultSchedPort)
	}
	if err != nil {
		return s, err
	}
	return s, s.save(l)
}

func (s Settings) save(l layout) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("encode settings: %w", err)
	}
	return atomicfile.WriteFile(l.settings(), append(data, '\n'), 0o600)
}
