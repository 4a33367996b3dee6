package up

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// apiClient makes the few API server requests that a start must wait for. It is plain HTTP on purpose: the CLI, which
// contains this code, does not depend on client-go.
type apiClient struct {
	base string
	http *http.Client
}

func newAPIClient(p pki, s Settings) (*apiClient, error) {
	pair, err := tls.LoadX509KeyPair(p.crt("admin"), p.key("admin"))
	if err != nil {
		return nil, fmt.Errorf("load admin certificate: %w", err)
	}
	ca, err := os.ReadFile(p.crt("ca"))
	if err != nil {
		return nil, fmt.Errorf("load certificate authority: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	return &apiClient{
		base: fmt.Sprintf("https://%s:%d", nodeIP, s.APIPort),
		http: &http.Client{
			Timeout:   5 * time.Second,
			Transport: &http.Transport{TLSClientConfig: &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots, MinVersion: tls.VersionTLS12}},
		},
	}, nil
}

// get decodes the JSON at path into v (nil: only the status counts) and reports whether it answered 200.
func (c *apiClient) get(ctx context.Context, path string, v any) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+path, nil)
	if err != nil {
		return false
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return false
	}
	if v == nil {
		_, _ = io.Copy(io.Discard, resp.Body)
		return true
	}
	return json.NewDecoder(resp.Body).Decode(v) == nil
}

// labelNode gives the node its role, which the API server forbids a node to give itself (NodeRestriction).
func (c *apiClient) labelNode(ctx context.Context, name string) error {
	return c.patchNode(ctx, name, `{"metadata":{"labels":{"`+contract.LabelNodeRole+`":""}}}`)
}

func (c *apiClient) patchNode(ctx context.Context, name, patch string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPatch, c.base+"/api/v1/nodes/"+name, strings.NewReader(patch))
	if err != nil {
		return fmt.Errorf("label node %s: %w", name, err)
	}
	req.Header.Set("Content-Type", "application/merge-patch+json")
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("label node %s: %w", name, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errdefs.Unavailablef("label node %s: the API server answers %s", name, resp.Status)
	}
	return nil
}

func (c *apiClient) ready(ctx context.Context) bool { return c.get(ctx, "/readyz", nil) }

// hasDefaultServiceAccount reports whether the default service account exists; pods in the default namespace need it.
func (c *apiClient) hasDefaultServiceAccount(ctx context.Context) bool {
	return c.get(ctx, "/api/v1/namespaces/default/serviceaccounts/default", nil)
}

// nodeReady reports whether the node is Ready and its lease was renewed after since: a Ready condition left from an
// earlier run does not count.
func (c *apiClient) nodeReady(ctx context.Context, name string, since time.Time) bool {
	var lease struct {
		Spec struct {
			RenewTime time.Time `json:"renewTime"`
		} `json:"spec"`
	}
	if !c.get(ctx, "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/"+name, &lease) || lease.Spec.RenewTime.Before(since) {
		return false
	}
	var node struct {
		Status struct {
			Conditions []struct{ Type, Status string } `json:"conditions"`
		} `json:"status"`
	}
	if !c.get(ctx, "/api/v1/nodes/"+name, &node) {
		return false
	}
	for _, cond := range node.Status.Conditions {
		if cond.Type == "Ready" {
			return cond.Status == "True"
		}
	}
	return false
}
