package cocoonmanager

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/admission"
	"cocoonstack.io/cocoon/internal/kube/aggregated"
	"cocoonstack.io/cocoon/internal/testkit/metricsdoc"
	"cocoonstack.io/cocoon/internal/testkit/settingsdoc"
)

func TestMetricsAreDocumented(t *testing.T) {
	r := prometheus.NewRegistry()
	newMetrics(r)
	admission.NewMetrics(r)
	aggregated.NewMetrics(r)
	metricsdoc.Check(t, "manager", r)
}

func TestSettingsAreDocumented(t *testing.T) {
	all := new(Config).settings()
	settingsdoc.Reference(t, "cocoon-manager", all)
	settingsdoc.Manifest(t, "deploy/manager/manager.yaml", all)
}

func TestSettingsByWeight(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(path, []byte("namespace: of-file\nprobeAddr: :1\nleaderElect: false\nclientAllowedNames: [a, b]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"OPERATOR_CONFIG": path, "POD_NAMESPACE": "of-env", "CLIENT_ALLOWED_NAMES": "c", "EPOCH_TOKEN": "s3cret"}
	c, err := parse([]string{"--client-allowed-names", "d", "--client-allowed-names", "e,f"}, func(k string) string { return env[k] }, io.Discard)
	if err != nil || c.Namespace != "of-env" || c.ProbeAddr != ":1" || c.LeaderElect || c.Sets != 4 || c.Epoch.Token != "s3cret" || strings.Join(c.Webhook.ClientNames, " ") != "d e f" {
		t.Errorf("%+v, %v", c, err)
	}
	for _, bad := range [][]string{{"--hibernation-concurrency=0"}, {"--cocoonset-concurrency=x"}, {"--leader-elect=perhaps"}, {"stray"}} {
		if _, err := parse(bad, func(string) string { return "" }, io.Discard); !errdefs.IsInvalid(err) {
			t.Errorf("%v: %v", bad, err)
		}
	}
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
	for _, bad := range [][]string{
		{"--kubevirt-addr", "8444"},
		{"--kubevirt-addr", ":8444"}, // nobody makes a certificate
		{"--kubevirt-addr", ":8444", "--kubevirt-cert", "/a"},
		{"--kubevirt-addr", ":8444", "--webhook-addr", ":8443", "--kubevirt-key", "/a"},
		{"--kubevirt-addr", ":8444", "--webhook-addr", ":8443", "--tls-cert", "/a", "--tls-key", "/b"},
	} {
		if _, err := read(bad...); !errdefs.IsInvalid(err) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if c, err := read("--kubevirt-addr", ":8444", "--webhook-addr", ":8443"); err != nil || !c.KubeVirt.own() {
		t.Errorf("with a certificate of its own: %+v %v", c.KubeVirt, err)
	}
	if c, err := read("--kubevirt-addr", ":8444", "--kubevirt-cert", "/a", "--kubevirt-key", "/b"); err != nil || c.KubeVirt.own() {
		t.Errorf("with the certificate of somebody else: %+v %v", c.KubeVirt, err)
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
