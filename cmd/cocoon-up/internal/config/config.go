// Package config reads the configuration file of "cocoon-up control-plane" and
// derives the component flags from it. It starts nothing and imports no
// Kubernetes code, so that tests of the file format take milliseconds.
package config

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"

	"sigs.k8s.io/yaml"
)

// Config is the whole file, YAML or JSON. Unknown keys are rejected.
//
// Every path may be relative to the folder of the configuration file, so that a
// cluster's folder can be moved as a whole.
// The caller creates all certificates, keys and kubeconfigs. This package
// generates none of them, and writes nothing outside DataDir.
type Config struct {
	// DataDir holds etcd's data, its socket and a lock. It is created with
	// mode 0700 if it is missing. One process at a time may use it.
	DataDir string `json:"dataDir"`
	// EtcdSocket is where etcd listens for the API server. Default:
	// DataDir/etcd.sock. Set it only if that path is longer than the 107
	// bytes that the name of a unix socket may have. Its folder must then be
	// private, because anyone who can connect controls the cluster.
	EtcdSocket string `json:"etcdSocket,omitempty"`

	// BindAddress is the IP address that the API server listens on. Default: 127.0.0.1.
	BindAddress string `json:"bindAddress,omitempty"`
	// SecurePort is the API server's port, the only one this process binds.
	SecurePort int `json:"securePort"`
	// AdvertiseAddress is the IP address at which pods reach the API server. It
	// becomes the endpoint of the "kubernetes" Service. Default: BindAddress, if
	// that can be an endpoint. A loopback address cannot, and then the Service
	// has no endpoint.
	AdvertiseAddress string `json:"advertiseAddress,omitempty"`
	// ServiceCIDR is the range of cluster IPs. The serving certificate must
	// name its first address if pods are to use the "kubernetes" Service.
	// Default: 10.96.0.0/16.
	ServiceCIDR string `json:"serviceCIDR,omitempty"`
	// ServiceAccountIssuer is the "iss" of service account tokens. Changing it
	// invalidates the tokens in use. Default: https://kubernetes.default.svc.cluster.local.
	ServiceAccountIssuer string `json:"serviceAccountIssuer,omitempty"`

	// PKI names the certificates and keys.
	PKI PKI `json:"pki"`

	// Controllers selects the controllers to run, in the syntax of
	// kube-controller-manager's --controllers: "*", "name" or "-name".
	// Default: the standard set.
	Controllers []string `json:"controllers,omitempty"`
	// FeatureGates apply to all components, because they share one process.
	FeatureGates map[string]bool `json:"featureGates,omitempty"`

	// LogFormat is "text" (default) or "json"; all logs go to standard error.
	LogFormat string `json:"logFormat,omitempty"`
	// Verbosity is klog's -v for all Kubernetes components.
	Verbosity int `json:"verbosity,omitempty"`

	// Etcd takes those flags that do not change where it serves and stores: see EtcdFlags.
	Etcd              Component `json:"etcd,omitempty"`
	APIServer         Component `json:"apiServer,omitempty"`
	ControllerManager Client    `json:"controllerManager"`
	Scheduler         Client    `json:"scheduler"`
	// ExternalScheduler omits kube-scheduler: another process schedules the
	// cluster's pods. Scheduler is then ignored.
	ExternalScheduler bool `json:"externalScheduler,omitempty"`
}

// Component holds the settings of one component.
type Component struct {
	// ExtraArgs are flags of the component, without dashes: {"event-ttl": "2h"}.
	// They override the flags that the rest of the file sets, and replace the
	// whole value of such a flag. Flags of the whole process (feature-gates,
	// leader-elect, logging-format, v) are rejected.
	ExtraArgs map[string]string `json:"extraArgs,omitempty"`
}

// Client is a component that talks to the API server.
type Client struct {
	// Kubeconfig names the API server and the component's credentials.
	Kubeconfig string `json:"kubeconfig"`
	Component
}

// PKI holds paths of PEM files.
type PKI struct {
	// ServingCA signed Serving. Pods get it as kube-root-ca.crt.
	ServingCA string `json:"servingCA"`
	// Serving is the API server's own certificate.
	Serving KeyPair `json:"serving"`
	// ClientCA signed the client certificates of users, nodes and components.
	// It may be the same file as ServingCA.
	ClientCA string `json:"clientCA"`

	// KubeletCA signed the serving certificates of nodes (port 10250).
	KubeletCA string `json:"kubeletCA"`
	// KubeletClient is the certificate that the API server presents to nodes for
	// logs, exec, attach and port-forward.
	KubeletClient KeyPair `json:"kubeletClient"`

	// FrontProxy identifies the API server to aggregated API servers.
	FrontProxy FrontProxy `json:"frontProxy"`
	// ServiceAccount signs and verifies service account tokens.
	ServiceAccount ServiceAccount `json:"serviceAccount"`

	// Signing, if set, is the CA with which the controller manager signs
	// CertificateSigningRequests. Without it they stay approved and unsigned.
	Signing KeyPair `json:"signing,omitempty"`
}

// KeyPair is a certificate and its private key.
type KeyPair struct {
	Cert string `json:"cert"`
	Key  string `json:"key"`
}

// FrontProxy configures the trust between the API server and aggregated API servers.
type FrontProxy struct {
	// CA must not be ClientCA, unless AllowedNames is set: a client with a
	// certificate signed by CA may act as any user.
	CA string `json:"ca"`
	// Client is the certificate that the API server presents to aggregated API servers.
	Client KeyPair `json:"client"`
	// AllowedNames are the common names that may act as other users. Default: any
	// certificate signed by CA.
	AllowedNames []string `json:"allowedNames,omitempty"`
}

// ServiceAccount holds the token keys (RSA or ECDSA).
type ServiceAccount struct {
	// Key is the private key that signs.
	Key string `json:"key"`
	// PublicKeys verify tokens: the key that belongs to Key, and older keys that are still trusted.
	PublicKeys []string `json:"publicKeys"`
}

// Load reads the file at path, fills in defaults and validates the result.
func Load(path string) (*Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	dir, err := filepath.Abs(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("locate configuration %s: %w", path, err)
	}
	c, err := Parse(data, dir)
	if err != nil {
		return nil, fmt.Errorf("configuration %s: %w", path, err)
	}
	return c, nil
}

// Parse decodes data strictly, fills in defaults, makes paths absolute
// relative to dir and validates the result. It does not touch the file system.
func Parse(data []byte, dir string) (*Config, error) {
	c := &Config{}
	if err := yaml.UnmarshalStrict(data, c); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	c.complete(dir)
	if err := c.validate(); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Config) complete(dir string) {
	c.BindAddress = cmp.Or(c.BindAddress, "127.0.0.1")
	c.ServiceCIDR = cmp.Or(c.ServiceCIDR, "10.96.0.0/16")
	c.ServiceAccountIssuer = cmp.Or(c.ServiceAccountIssuer, "https://kubernetes.default.svc.cluster.local")
	c.LogFormat = cmp.Or(c.LogFormat, "text")
	if isEndpoint(c.BindAddress) {
		c.AdvertiseAddress = cmp.Or(c.AdvertiseAddress, c.BindAddress)
	}
	if c.DataDir != "" {
		c.EtcdSocket = cmp.Or(c.EtcdSocket, filepath.Join(c.DataDir, "etcd.sock"))
	}
	for _, p := range c.paths() {
		if *p.path != "" && !filepath.IsAbs(*p.path) {
			*p.path = filepath.Join(dir, *p.path)
		}
	}
}

// field is a path in the file, its key, and whether it is required.
type field struct {
	key      string
	path     *string
	required bool
}

func (c *Config) paths() []field {
	p := &c.PKI
	fields := []field{
		{"dataDir", &c.DataDir, true},
		{"etcdSocket", &c.EtcdSocket, true},
		{"controllerManager.kubeconfig", &c.ControllerManager.Kubeconfig, true},
		{"scheduler.kubeconfig", &c.Scheduler.Kubeconfig, !c.ExternalScheduler},
		{"pki.servingCA", &p.ServingCA, true},
		{"pki.serving.cert", &p.Serving.Cert, true},
		{"pki.serving.key", &p.Serving.Key, true},
		{"pki.clientCA", &p.ClientCA, true},
		{"pki.kubeletCA", &p.KubeletCA, true},
		{"pki.kubeletClient.cert", &p.KubeletClient.Cert, true},
		{"pki.kubeletClient.key", &p.KubeletClient.Key, true},
		{"pki.frontProxy.ca", &p.FrontProxy.CA, true},
		{"pki.frontProxy.client.cert", &p.FrontProxy.Client.Cert, true},
		{"pki.frontProxy.client.key", &p.FrontProxy.Client.Key, true},
		{"pki.serviceAccount.key", &p.ServiceAccount.Key, true},
		{"pki.signing.cert", &p.Signing.Cert, false},
		{"pki.signing.key", &p.Signing.Key, false},
	}
	for i := range p.ServiceAccount.PublicKeys {
		key := fmt.Sprintf("pki.serviceAccount.publicKeys[%d]", i)
		fields = append(fields, field{key, &p.ServiceAccount.PublicKeys[i], true})
	}
	return fields
}
