package registry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/access"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/objects"
	"cocoonstack.io/cocoon/internal/registry/objects/folder"
)

const (
	allToken  = "all-rights"
	pushToken = "team-pusher"
	pullToken = "team-puller"
	oldToken  = "too-old"
)

// rig is a registry in this process.
type rig struct {
	t       *testing.T
	url     string
	dir     string
	content *content.Content
	server  *httptest.Server
}

func tokens(t *testing.T) *access.File {
	t.Helper()
	text := allToken + "\n"
	for name, rest := range map[string]string{
		pushToken: "scope=push:team", pullToken: "scope=pull:team", oldToken: "expires=2020-01-01T00:00:00Z",
	} {
		text += fmt.Sprintf("%s-name %s %s\n", name, digest.FromString(name), rest)
	}
	path := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := access.Open(path, "", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func newRig(t *testing.T, cfg registry.Config, limits content.Config) *rig {
	t.Helper()
	dir := t.TempDir()
	store, err := folder.New(dir)
	if err != nil {
		t.Fatal(err)
	}
	r := rigOn(t, store, cfg, limits)
	r.dir = dir
	return r
}

func rigOn(t *testing.T, store objects.Store, cfg registry.Config, limits content.Config) *rig {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	limits.Log = log
	if limits.UploadTTL == 0 {
		limits.UploadTTL = time.Hour
	}
	c, err := content.New(t.Context(), store, limits)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(registry.New(cfg, c, tokens(t), prometheus.NewRegistry(), log))
	t.Cleanup(server.Close)
	return &rig{t: t, url: server.URL, content: c, server: server}
}

// reply is a response that was read.
type reply struct {
	*http.Response
	body []byte
}

// do sends a request with a token with all rights, unless headers say otherwise. Headers are "Name: value".
func (r *rig) do(method, path string, body []byte, headers ...string) reply {
	r.t.Helper()
	return r.send(method, path, bytes.NewReader(body), headers...)
}

func (r *rig) send(method, path string, body io.Reader, headers ...string) reply {
	r.t.Helper()
	resp, data, err := r.try(r.t.Context(), method, path, body, headers...) //nolint:bodyclose // try closed it
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	return reply{resp, data}
}

func (r *rig) try(ctx context.Context, method, path string, body io.Reader, headers ...string) (*http.Response, []byte, error) {
	if !strings.HasPrefix(path, "http") {
		path = r.url + path
	}
	req, err := http.NewRequestWithContext(ctx, method, path, body)
	if err != nil {
		return nil, nil, err
	}
	req.Header.Set("Authorization", "Bearer "+allToken)
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		if value == "" {
			req.Header.Del(name)
			continue
		}
		req.Header.Set(name, value)
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return resp, data, err
}

// want checks the status, and the code of an error.
func (r *rig) want(got reply, status int, code ...content.Code) reply {
	r.t.Helper()
	if got.StatusCode != status {
		r.t.Fatalf("%s %s: %s, want %d: %s", got.Request.Method, got.Request.URL.Path, got.Status, status, got.body)
	}
	if len(code) == 0 || got.Request.Method == http.MethodHead {
		return got
	}
	var doc struct {
		Errors []struct {
			Code    content.Code `json:"code"`
			Message string       `json:"message"`
		} `json:"errors"`
	}
	if err := json.Unmarshal(got.body, &doc); err != nil || len(doc.Errors) != 1 || doc.Errors[0].Code != code[0] || doc.Errors[0].Message == "" {
		r.t.Fatalf("%s %s: error is not %s: %s", got.Request.Method, got.Request.URL.Path, code[0], got.body)
	}
	return got
}

func (r *rig) pushBlob(repo string, data []byte) v1.Descriptor {
	r.t.Helper()
	d := digest.FromBytes(data)
	r.want(r.do("POST", "/v2/"+repo+"/blobs/uploads/?digest="+d.String(), data), http.StatusCreated)
	return v1.Descriptor{MediaType: "application/octet-stream", Digest: d, Size: int64(len(data))}
}

func (r *rig) pushManifest(repo, tag string, m v1.Manifest) v1.Descriptor {
	r.t.Helper()
	m.SchemaVersion = 2
	m.MediaType = v1.MediaTypeImageManifest
	if m.Layers == nil {
		m.Layers = []v1.Descriptor{}
	}
	data, err := json.Marshal(m)
	if err != nil {
		r.t.Fatal(err)
	}
	d := digest.FromBytes(data)
	if tag == "" {
		tag = d.String()
	}
	r.want(r.do("PUT", "/v2/"+repo+"/manifests/"+tag, data, "Content-Type: "+m.MediaType), http.StatusCreated)
	return v1.Descriptor{MediaType: m.MediaType, Digest: d, Size: int64(len(data))}
}

// pushImage pushes a manifest with a config and some layers.
func (r *rig) pushImage(repo, tag string, layers ...string) (v1.Descriptor, v1.Manifest) {
	r.t.Helper()
	m := v1.Manifest{Config: r.pushBlob(repo, []byte("{}"))}
	m.Config.MediaType = v1.MediaTypeImageConfig
	for _, l := range layers {
		m.Layers = append(m.Layers, r.pushBlob(repo, []byte(l)))
	}
	return r.pushManifest(repo, tag, m), m
}
