package cocoonmanager

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/admission"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/servingcert"
)

const (
	webhookSecret        = "cocoon-manager-webhook" // of the namespace of the manager
	webhookConfiguration = "cocoon-manager"         // both kinds
)

// WebhookConfig says how the manager answers the API server's admission webhooks.
type WebhookConfig struct {
	Addr  string // HOST:PORT, "0": not at all
	Hosts string // of the certificate that the manager keeps, by comma
	Cert  string // PEM file of one that somebody else keeps
	Key   string
	Lives servingcert.Lives // of a kept one; zero: as is usual
}

func (w WebhookConfig) on() bool { return w.Addr != "0" && w.Addr != "" }

// own reports whether the manager keeps the certificate itself.
func (w WebhookConfig) own() bool { return w.on() && w.Cert == "" }

func (w WebhookConfig) check() error {
	if !w.on() {
		return nil
	}
	if (w.Cert == "") != (w.Key == "") {
		return errdefs.Invalidf("tls-cert and tls-key are given together or not at all")
	}
	_, _, err := w.listen()
	return err
}

func (w WebhookConfig) listen() (host string, port int, err error) {
	host, text, err := net.SplitHostPort(w.Addr)
	if err == nil {
		port, err = strconv.Atoi(text)
	}
	if err != nil || port < 1 || port > 65535 {
		return "", 0, errdefs.Invalidf("webhook-addr %q is not HOST:PORT, nor 0 for no webhooks", w.Addr)
	}
	return host, port, nil
}

// serveWebhooks has m serve the webhooks, in every replica, if they are wanted. m is ready only when the API server can
// reach and trusts them.
func (c Config) serveWebhooks(m ctrl.Manager, snapshots controller.Registry) error {
	if !c.Webhook.on() {
		return nil
	}
	host, port, err := c.Webhook.listen()
	if err != nil {
		return err
	}
	o := webhook.Options{Host: host, Port: port}
	hello := func(t *tls.Config) { t.MinVersion = tls.VersionTLS12 }
	if c.Webhook.own() {
		k := &servingcert.Keeper{
			Client: m.GetClient(), Secret: types.NamespacedName{Namespace: c.Namespace, Name: webhookSecret}, Configuration: webhookConfiguration,
			Hosts: c.hosts(), Lives: c.Webhook.Lives, Now: time.Now,
		}
		if k.Lives == (servingcert.Lives{}) {
			k.Lives = servingcert.Default
		}
		hello = func(t *tls.Config) { t.MinVersion, t.GetCertificate = tls.VersionTLS12, k.Certificate }
		if err := k.Setup(m); err != nil {
			return err
		}
		if err := m.AddReadyzCheck("webhook-certificate", k.Check); err != nil {
			return err
		}
	} else {
		// The server watches the files. Its folder is joined with both names, and so may be the root.
		o.CertDir = "/"
		for from, to := range map[string]*string{c.Webhook.Cert: &o.CertName, c.Webhook.Key: &o.KeyName} {
			if *to, err = filepath.Abs(from); err != nil {
				return err
			}
		}
	}
	o.TLSOpts = []func(*tls.Config){hello}
	server := webhook.NewServer(o)
	hooks := &admission.Webhooks{Client: m.GetClient(), Live: m.GetAPIReader(), Registry: snapshots, Metrics: admission.NewMetrics(ctrlmetrics.Registry)}
	hooks.Register(server)
	if err := m.AddReadyzCheck("webhook-server", func(req *http.Request) error { return server.StartedChecker()(req) }); err != nil {
		return err
	}
	return m.Add(afterCaches{server})
}

func (c Config) hosts() []string {
	if c.Webhook.Hosts == "" {
		return []string{"cocoon-manager." + c.Namespace + ".svc"}
	}
	return strings.Split(c.Webhook.Hosts, ",")
}

// afterCaches starts a server once the caches that it answers from are there. As it is, the manager would start it before
// them, and wait for a certificate that only a controller can make.
type afterCaches struct{ server webhook.Server }

func (a afterCaches) Start(ctx context.Context) error { return a.server.Start(ctx) }
func (afterCaches) NeedLeaderElection() bool          { return false }
