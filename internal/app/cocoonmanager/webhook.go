package cocoonmanager

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	ctrl "sigs.k8s.io/controller-runtime"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/admission"
	"cocoonstack.io/cocoon/internal/kube/aggregated"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/servingcert"
	"cocoonstack.io/cocoon/internal/kube/upload"
)

const (
	webhookSecret        = "cocoon-manager-webhook" // of the namespace of the manager
	webhookConfiguration = "cocoon-manager"         // both kinds
)

// WebhookConfig configures how the manager answers the API server's admission webhooks.
type WebhookConfig struct {
	Addr  string // HOST:PORT, "0": disabled
	Hosts string // of the certificate that the manager keeps, separated by commas
	Cert  string // PEM file of a certificate that is managed elsewhere
	Key   string
	Lives servingcert.Lives // of a kept one; zero: the defaults

	CloneDirs string // absolute folders of the nodes, separated by commas, that pods may be cloned from

	ClientCA    string   // PEM file with the authorities of allowed clients; "": all clients are allowed
	ClientNames []string // common names of allowed clients; none: all with a certificate of those authorities
}

func (w WebhookConfig) on() bool { return w.Addr != "0" && w.Addr != "" }

// own reports whether the manager keeps the certificate itself.
func (w WebhookConfig) own() bool { return w.on() && w.Cert == "" }

func (w WebhookConfig) check() error {
	if !w.on() {
		return nil
	}
	if (w.Cert == "") != (w.Key == "") {
		return errdefs.Invalidf("tls-cert and tls-key must be set together")
	}
	if len(w.ClientNames) > 0 && w.ClientCA == "" {
		return errdefs.Invalidf("client-allowed-names requires client-ca-file; without it no client certificates are checked")
	}
	for _, dir := range w.cloneDirs() {
		if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir {
			return errdefs.Invalidf("clone-dirs: %q must be an absolute path without . and ..", dir)
		}
	}
	_, _, err := w.listen()
	return err
}

func (w WebhookConfig) cloneDirs() []string {
	return strings.FieldsFunc(w.CloneDirs, func(r rune) bool { return r == ',' })
}

func (w WebhookConfig) listen() (host string, port int, err error) {
	host, text, err := net.SplitHostPort(w.Addr)
	if err == nil {
		port, err = strconv.Atoi(text)
	}
	if err != nil || port < 1 || port > 65535 {
		return "", 0, errdefs.Invalidf("webhook-addr %q must be HOST:PORT, or 0 for no webhooks", w.Addr)
	}
	return host, port, nil
}

// certificate returns the certificate of a connection.
type certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)

// serve makes m serve what is enabled: webhooks, and the API of virtctl.
func (c Config) serve(m ctrl.Manager, snapshots controller.Registry, uploads upload.Registry, log *slog.Logger) error {
	own, err := c.keepCertificate(m)
	if err != nil {
		return err
	}
	return errors.Join(c.serveWebhooks(m, snapshots, own), c.serveKubeVirt(m, own, uploads, log))
}

// keepCertificate makes m keep a certificate for the webhooks and the API of virtctl, unless that is done elsewhere. m becomes ready only
// when the API server trusts it.
func (c Config) keepCertificate(m ctrl.Manager) (certificate, error) {
	if !c.Webhook.own() {
		return nil, nil
	}
	k := &servingcert.Keeper{
		Client: m.GetClient(), Secret: types.NamespacedName{Namespace: c.Namespace, Name: webhookSecret}, Configuration: webhookConfiguration,
		Hosts: c.hosts(), Lives: c.Webhook.Lives, Now: time.Now,
	}
	if k.Lives == (servingcert.Lives{}) {
		k.Lives = servingcert.Default
	}
	if c.KubeVirt.own() {
		for _, version := range aggregated.Versions {
			k.APIs = append(k.APIs, version+"."+aggregated.Group)
		}
		k.APIs = append(k.APIs, aggregated.UploadVersion+"."+aggregated.UploadGroup)
	}
	return k.Certificate, errors.Join(k.Setup(m), m.AddReadyzCheck("webhook-certificate", k.Check))
}

// serveWebhooks makes m serve the webhooks, in every replica, if they are enabled. m becomes ready only when the API
// server can reach them. own is the certificate that m keeps, nil if none.
func (c Config) serveWebhooks(m ctrl.Manager, snapshots controller.Registry, own certificate) error {
	if !c.Webhook.on() {
		return nil
	}
	host, port, err := c.Webhook.listen()
	if err != nil {
		return err
	}
	o := webhook.Options{Host: host, Port: port}
	if own == nil {
		// The server watches the files. It joins its folder with both names, so the folder may be the root.
		o.CertDir = "/"
		if o.CertName, err = filepath.Abs(c.Webhook.Cert); err != nil {
			return err
		}
		if o.KeyName, err = filepath.Abs(c.Webhook.Key); err != nil {
			return err
		}
	}
	o.TLSOpts = []func(*tls.Config){func(t *tls.Config) {
		t.MinVersion, t.GetCertificate = tls.VersionTLS12, own
		if c.Webhook.ClientCA != "" {
			t.ClientAuth = tls.RequestClientCert
		}
	}}
	server := webhook.NewServer(o)
	if c.Webhook.ClientCA != "" {
		file, err := dynamiccertificates.NewDynamicCAContentFromFile("client-ca", c.Webhook.ClientCA)
		if err != nil {
			return errdefs.Preconditionf("client-ca-file of the webhooks: %w", err)
		}
		if err := m.Add(inEveryReplica(func(ctx context.Context) error { file.Run(ctx, 1); return nil })); err != nil { // reloads the file when it changes
			return err
		}
		server = admission.Clients{Authorities: file.VerifyOptions, Names: c.Webhook.ClientNames}.Guarded(server)
	}
	hooks := &admission.Webhooks{Client: m.GetClient(), Live: m.GetAPIReader(), Registry: snapshots, CloneDirs: c.Webhook.cloneDirs(), Machines: c.KubeVirt.on(), Metrics: admission.NewMetrics(ctrlmetrics.Registry)}
	hooks.Register(server)
	if err := m.AddReadyzCheck("webhook-server", func(req *http.Request) error { return server.StartedChecker()(req) }); err != nil {
		return err
	}
	return m.Add(inEveryReplica(server.Start)) // not as a webhook.Server; see inEveryReplica
}

func (c Config) hosts() []string {
	if c.Webhook.Hosts == "" {
		return []string{"cocoon-manager." + c.Namespace + ".svc"}
	}
	return strings.Split(c.Webhook.Hosts, ",")
}

// inEveryReplica runs in every replica, leading or not, after the caches are ready. If the webhooks were a
// webhook.Server, they would start before the caches, and wait for a certificate that only a controller can make.
type inEveryReplica func(context.Context) error

func (f inEveryReplica) Start(ctx context.Context) error { return f(ctx) }
func (inEveryReplica) NeedLeaderElection() bool          { return false }
