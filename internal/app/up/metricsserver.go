package up

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"os"
	"strings"
	"text/template"
	"time"

	_ "embed"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	metricsServerUser = "system:metrics-server"
	metricsServerAPI  = "/apis/apiregistration.k8s.io/v1/apiservices/v1beta1.metrics.k8s.io"
)

//go:embed metricsserver.yaml
var metricsServerManifest string

// metricsServer is the part without the address that it listens on, which is known once a node exists.
func (in *instance) metricsServer() part {
	kubeconfig := in.config("metrics-server.kubeconfig")
	return part{
		late: true,
		child: child{
			name: partMetricsServer, path: in.opts.Assets.ControlPlane, log: in.layout.log(partMetricsServer), stop: stopPart,
			args: []string{
				partMetricsServer,
				"--kubeconfig=" + kubeconfig, "--authentication-kubeconfig=" + kubeconfig, "--authorization-kubeconfig=" + kubeconfig,
				fmt.Sprintf("--secure-port=%d", in.settings.ServerPort),
				"--tls-cert-file=" + in.pki.crt("metrics-server-serving"), "--tls-private-key-file=" + in.pki.key("metrics-server-serving"),
				"--kubelet-certificate-authority=" + in.pki.crt("ca"), "--kubelet-preferred-address-types=InternalIP", "--kubelet-use-node-status-port",
				"--metric-resolution=15s",
			},
		},
		prepare: func() error { return writeKubeconfig(kubeconfig, in.pki, in.settings, partMetricsServer) },
		ready:   func(ctx context.Context) bool { return in.api.get(ctx, "/apis/metrics.k8s.io/v1beta1", nil) },
	}
}

// runMetricsServer starts metrics-server and registers its API, or removes the registration of an earlier start: an API
// that is registered but not served blocks the deletion of namespaces.
func (in *instance) runMetricsServer(ctx context.Context, launch func(child) <-chan error) error {
	if !in.settings.with(partMetricsServer) {
		return in.api.remove(ctx, metricsServerAPI)
	}
	began := time.Now()
	// The API server reaches aggregated APIs at the endpoints of Services, which may not be on loopback. The rules of
	// the bridge block guests from this address.
	addr := in.settings.Nodes[0].Address
	list, err := in.metricsServerManifests(addr)
	if err != nil {
		return err
	}
	part := in.metricsServer()
	part.args = append(part.args, "--bind-address="+addr)
	if err := in.install(ctx, list, part.child, nil); err != nil { // before it starts: without its rights it ends at once
		return err
	}
	ended := launch(part.child)
	if err := in.await(ctx, part.child, ended, part.ready); err != nil {
		return err
	}
	in.report(partMetricsServer+" answers", time.Since(began))
	return nil
}

func (in *instance) metricsServerManifests(addr string) ([]manifest, error) {
	ca, err := os.ReadFile(in.pki.crt("ca"))
	if err != nil {
		return nil, fmt.Errorf("read certificate authority: %w", err)
	}
	t, err := template.New(partMetricsServer).Parse(metricsServerManifest)
	if err != nil {
		return nil, fmt.Errorf("read manifest of %s: %w", partMetricsServer, err)
	}
	var text bytes.Buffer
	err = t.Execute(&text, map[string]any{
		"User": metricsServerUser, "Address": addr, "Port": in.settings.ServerPort, "CA": base64.StdEncoding.EncodeToString(ca),
	})
	if err != nil {
		return nil, fmt.Errorf("render manifest of %s: %w", partMetricsServer, err)
	}
	return manifests(text.Bytes())
}

// remove deletes an object that one of our manifests made; objects made by others stay. A missing object is no error.
func (c *apiClient) remove(ctx context.Context, path string) error {
	var there struct {
		Metadata struct {
			Labels map[string]string `json:"labels"`
			UID    string            `json:"uid"`
		} `json:"metadata"`
	}
	if !c.get(ctx, path, &there) || there.Metadata.Labels["app.kubernetes.io/managed-by"] != "cocoon-up" {
		return nil
	}
	body := fmt.Sprintf(`{"preconditions":{"uid":%q}}`, there.Metadata.UID)
	req, err := http.NewRequestWithContext(ctx, http.MethodDelete, c.base+path, strings.NewReader(body))
	if err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		return errdefs.Unavailablef("remove %s: %w", path, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusNotFound {
		return errdefs.Unavailablef("remove %s: the API server answers %s", path, resp.Status)
	}
	return nil
}
