package config

import (
	"maps"
	"slices"
	"strconv"
	"strings"
)

// flags maps the name of a flag to its value.
type flags map[string]string

// args renders f, with extra taking precedence, sorted by name.
func (f flags) args(extra map[string]string) []string {
	maps.Copy(f, extra)
	args := make([]string, 0, len(f))
	for _, name := range slices.Sorted(maps.Keys(f)) {
		args = append(args, "--"+name+"="+f[name])
	}
	return args
}

// EtcdURL is the address of etcd's client socket.
func (c *Config) EtcdURL() string { return "unix://" + c.EtcdSocket }

// EtcdArgs are the flags of etcd beyond its address and its folder.
func (c *Config) EtcdArgs() []string {
	f := flags{
		// The only member waits for an election timeout before it becomes leader. The
		// defaults are made for networks and cost up to a second here.
		"heartbeat-interval": "20",
		"election-timeout":   "100",
	}
	return f.args(c.Etcd.ExtraArgs)
}

// APIServerArgs are the flags of kube-apiserver.
func (c *Config) APIServerArgs() []string {
	f := flags{
		"etcd-servers":             c.EtcdURL(),
		"allow-privileged":         "true",
		"authorization-mode":       "Node,RBAC",
		"enable-admission-plugins": "NodeRestriction",
		"service-cluster-ip-range": c.ServiceCIDR,
		"logging-format":           c.LogFormat,
		"v":                        strconv.Itoa(c.Verbosity),

		"bind-address":         c.BindAddress,
		"secure-port":          strconv.Itoa(c.SecurePort),
		"tls-cert-file":        c.PKI.Serving.Cert,
		"tls-private-key-file": c.PKI.Serving.Key,
		"client-ca-file":       c.PKI.ClientCA,

		"service-account-issuer":           c.ServiceAccountIssuer,
		"service-account-key-file":         strings.Join(c.PKI.ServiceAccount.PublicKeys, ","),
		"service-account-signing-key-file": c.PKI.ServiceAccount.Key,

		// Virtual nodes are addressed by IP: their names do not resolve here.
		"kubelet-preferred-address-types": "InternalIP,Hostname",
		"kubelet-certificate-authority":   c.PKI.KubeletCA,
		"kubelet-client-certificate":      c.PKI.KubeletClient.Cert,
		"kubelet-client-key":              c.PKI.KubeletClient.Key,

		"requestheader-client-ca-file":       c.PKI.FrontProxy.CA,
		"requestheader-username-headers":     "X-Remote-User",
		"requestheader-group-headers":        "X-Remote-Group",
		"requestheader-extra-headers-prefix": "X-Remote-Extra-",
		"proxy-client-cert-file":             c.PKI.FrontProxy.Client.Cert,
		"proxy-client-key-file":              c.PKI.FrontProxy.Client.Key,
		// Webhooks and aggregated APIs are reached at their endpoints, not at
		// cluster IPs: this host may be without a kube-proxy.
		"enable-aggregator-routing": "true",

		// Ask watchers to disconnect on shutdown. Otherwise the server waits up
		// to a minute for them.
		"shutdown-watch-termination-grace-period": "200ms",
	}
	f.advertise(c)
	if strings.HasPrefix(c.ServiceAccountIssuer, "https://") {
		// The keys are where the issuer is. By default they are at the advertised address, which pods may not reach.
		f["service-account-jwks-uri"] = strings.TrimSuffix(c.ServiceAccountIssuer, "/") + "/openid/v1/jwks"
	}
	if names := c.PKI.FrontProxy.AllowedNames; len(names) > 0 {
		f["requestheader-allowed-names"] = strings.Join(names, ",")
	}
	if gates := c.featureGates(); gates != "" {
		f["feature-gates"] = gates
	}
	return f.args(c.APIServer.ExtraArgs)
}

// advertise sets the endpoint of the "kubernetes" Service. It always sets the
// address: the default needs a default route, and without one the API server
// cannot start.
func (f flags) advertise(c *Config) {
	f["advertise-address"] = c.AdvertiseAddress
	if c.AdvertiseAddress == "" {
		f["advertise-address"] = "127.0.0.1"
		f["endpoint-reconciler-type"] = "none"
	}
}

// ControllerManagerArgs are the flags of kube-controller-manager.
func (c *Config) ControllerManagerArgs() []string {
	f := flags{
		"kubeconfig":                       c.ControllerManager.Kubeconfig,
		"leader-elect":                     "false",
		"secure-port":                      "0",
		"root-ca-file":                     c.PKI.ServingCA,
		"service-account-private-key-file": c.PKI.ServiceAccount.Key,
		"use-service-account-credentials":  "true",
		// With the default of 20 queries per second, the first pods wait five
		// seconds for the default service account of their namespace.
		"kube-api-qps":                "500",
		"kube-api-burst":              "1000",
		"controller-shutdown-timeout": "2s",
	}
	if c.PKI.Signing.Cert != "" {
		f["cluster-signing-cert-file"] = c.PKI.Signing.Cert
		f["cluster-signing-key-file"] = c.PKI.Signing.Key
	}
	if len(c.Controllers) > 0 {
		f["controllers"] = strings.Join(c.Controllers, ",")
	}
	return f.args(c.ControllerManager.ExtraArgs)
}

// SchedulerArgs are the flags of kube-scheduler.
func (c *Config) SchedulerArgs() []string {
	f := flags{
		"kubeconfig":     c.Scheduler.Kubeconfig,
		"leader-elect":   "false",
		"secure-port":    "0",
		"kube-api-qps":   "500",
		"kube-api-burst": "1000",
	}
	return f.args(c.Scheduler.ExtraArgs)
}

func (c *Config) featureGates() string {
	gates := make([]string, 0, len(c.FeatureGates))
	for _, name := range slices.Sorted(maps.Keys(c.FeatureGates)) {
		gates = append(gates, name+"="+strconv.FormatBool(c.FeatureGates[name]))
	}
	return strings.Join(gates, ",")
}
