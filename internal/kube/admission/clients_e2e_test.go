//go:build e2e

package admission_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	registration "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/cert"

	"cocoonstack.io/cocoon/internal/kube/admission"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// asking is the common name in the client certificate of the rig's API server.
const asking = "apiserver-webhooks"

// access is the certificate authority with which the managers verify the API server, and its directory.
type access struct {
	authority *tls.Certificate
	dir       string
}

// newAccess writes an authority, ca.crt, and admission.yaml, the AdmissionConfiguration of an API server that has a client
// certificate of this authority.
func newAccess(t *testing.T) access {
	a := access{authority: admission.Pair(t, "clients", nil, nil), dir: t.TempDir()}
	client := admission.Pair(t, asking, a.authority, nil)
	key, err := x509.MarshalPKCS8PrivateKey(client.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"ca.crt":     encode("CERTIFICATE", a.authority.Certificate[0]),
		"client.crt": encode("CERTIFICATE", client.Certificate[0]),
		"client.key": encode("PRIVATE KEY", key),
		"kubeconfig": fmt.Sprintf("apiVersion: v1\nkind: Config\nusers: [{name: '*', user: {client-certificate: %[1]s/client.crt, client-key: %[1]s/client.key}}]\n", a.dir),
		"admission.yaml": strings.ReplaceAll(`apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
  - name: MutatingAdmissionWebhook
    configuration: &webhooks {apiVersion: apiserver.config.k8s.io/v1, kind: WebhookAdmissionConfiguration, kubeConfigFile: DIR/kubeconfig}
  - name: ValidatingAdmissionWebhook
    configuration: *webhooks
`, "DIR", a.dir),
	} {
		if err := os.WriteFile(filepath.Join(a.dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return a
}

func encode(kind string, der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
}

// Clients without the API server's certificate are refused. In all other tests of this package the API server calls with its
// certificate.
func (r *rig) strangers(t *testing.T) {
	for name, tc := range map[string]struct {
		cert *tls.Certificate
		want string
	}{
		"no certificate":      {nil, "401 a client certificate is required"},
		"another authority":   {admission.Pair(t, asking, admission.Pair(t, "other", nil, nil), nil), "401 the client certificate is not valid"},
		"another common name": {admission.Pair(t, "kubelet", r.access.authority, nil), "403 the common name of the client certificate is not allowed"},
		"API server":          {admission.Pair(t, asking, r.access.authority, nil), "200 {"},
	} {
		config := &tls.Config{InsecureSkipVerify: true} //nolint:gosec // the test checks the client's certificate, not the server's
		if tc.cert != nil {
			config.Certificates = []tls.Certificate{*tc.cert}
		}
		client := http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}}
		resp, err := client.Post("https://"+r.managers[0].webhooks+admission.PathCheckPod, "application/json", strings.NewReader(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u"}}`))
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if got := fmt.Sprintf("%d %s", resp.StatusCode, text); !strings.HasPrefix(got, tc.want) {
			t.Errorf("%s gets %q, want %q", name, got, tc.want)
		}
	}
}

// A manager whose certificate is managed externally, in files that change while it runs.
func (r *rig) files(t *testing.T) {
	for _, m := range r.managers {
		m.kill(t)
	}
	crt, key := filepath.Join(r.access.dir, "tls.crt"), filepath.Join(r.access.dir, "tls.key")
	issue := func() []byte {
		t.Helper()
		chain, private, err := cert.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
		if err != nil {
			t.Fatal(err)
		}
		for path, text := range map[string][]byte{crt: chain, key: private} {
			if err := os.WriteFile(path+".new", text, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(path+".new", path); err != nil {
				t.Fatal(err)
			}
		}
		return chain
	}
	m := r.managers[0]
	own := m.args
	m.args = append(own[:len(own):len(own)], "--tls-cert", crt, "--tls-key", key)
	t.Cleanup(func() { m.kill(t); m.args = own })
	serves := func() string {
		c, err := tls.Dial("tcp", m.webhooks, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // the test compares the certificate itself
		if err != nil {
			return err.Error()
		}
		defer c.Close()
		return string(c.ConnectionState().PeerCertificates[0].Raw)
	}
	for i := range 2 {
		chain := issue()
		if i == 0 {
			m.start(t)
		}
		m.ready(t)
		block, _ := pem.Decode(chain)
		kubetest.Eventually(t, "the certificate that is served", func() string {
			if serves() == string(block.Bytes) {
				return "the file's"
			}
			return "another"
		}, "the file's")
		r.trust(t, chain)
		kubetest.Eventually(t, "the answer to a set", func() string {
			_, err := r.TryKubectl(t, setManifest("default", "s", `{agent: {mode: run, image: a}}`), "create", "--dry-run=server", "-f", "-")
			out, _ := r.TryKubectl(t, setManifest("default", "s", `{agent: {mode: run, image: a, storage: "-1Gi"}}`), "create", "--dry-run=server", "-f", "-")
			if err != nil || !strings.Contains(out, "must be a positive quantity") {
				return out
			}
			return ""
		}, "")
	}
}

// trust makes the API server trust the webhooks' authority, as a certificate manager does.
func (r *rig) trust(t *testing.T, bundle []byte) {
	t.Helper()
	hooks := r.kube.AdmissionregistrationV1()
	v, err := hooks.ValidatingWebhookConfigurations().Get(t.Context(), "cocoon-manager", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := hooks.MutatingWebhookConfigurations().Get(t.Context(), "cocoon-manager", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var all []*registration.WebhookClientConfig
	for i := range v.Webhooks {
		all = append(all, &v.Webhooks[i].ClientConfig)
	}
	for i := range m.Webhooks {
		all = append(all, &m.Webhooks[i].ClientConfig)
	}
	for _, c := range all {
		if bytes.Equal(c.CABundle, bundle) {
			t.Error("the manager changed the caBundle")
		}
		c.CABundle = bundle
	}
	if _, err := hooks.ValidatingWebhookConfigurations().Update(t.Context(), v, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := hooks.MutatingWebhookConfigurations().Update(t.Context(), m, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}
