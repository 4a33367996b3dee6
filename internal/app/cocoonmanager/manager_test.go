package cocoonmanager

import (
	"io"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/admission"
	"cocoonstack.io/cocoon/internal/testkit/metricsdoc"
)

func TestMetricsAreDocumented(t *testing.T) {
	r := prometheus.NewRegistry()
	newMetrics(r)
	admission.NewMetrics(r)
	metricsdoc.Check(t, "manager", r)
}

func TestWebhookFlags(t *testing.T) {
	env := map[string]string{"POD_NAMESPACE": "vms"}
	read := func(args ...string) (Config, error) {
		return parse(args, func(k string) string { return env[k] }, io.Discard)
	}
	for _, bad := range [][]string{
		{"--webhook-addr", "8443"},
		{"--webhook-addr", ":0"},
		{"--webhook-addr", ":70000"},
		{"--webhook-addr", ":8443", "--tls-cert", "/a"},
		{"--webhook-addr", ":8443", "--client-allowed-names", "kube-apiserver"},
	} {
		if _, err := read(bad...); !errdefs.IsInvalid(err) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if c, err := read(); err != nil || c.Webhook.on() {
		t.Errorf("by default there are webhooks: %v", err)
	}
	env["LISTEN_ADDR"] = ":8443"
	c, err := read()
	if err != nil || !c.Webhook.own() || c.hosts()[0] != "cocoon-manager.vms.svc" {
		t.Errorf("%+v %v", c.Webhook, err)
	}
	env["TLS_CERT"], env["TLS_KEY"] = "/a", "/b"
	if c, err := read(); err != nil || c.Webhook.own() || !c.Webhook.on() {
		t.Errorf("%+v %v", c.Webhook, err)
	}
}
