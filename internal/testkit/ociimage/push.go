package ociimage

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
)

// Push puts a layout's blobs and manifests into a repository of the registry at url, and gives d a tag.
func (l *Layout) Push(t testing.TB, url, repo, tag string, d Descriptor) {
	t.Helper()
	l.PushWith(t, http.DefaultClient, url, repo, tag, d)
}

// PushWith is Push with a client that trusts the registry.
func (l *Layout) PushWith(t testing.TB, client *http.Client, url, repo, tag string, d Descriptor) {
	t.Helper()
	send := func(method, path, media, body string) {
		req, err := http.NewRequestWithContext(t.Context(), method, url+"/v2/"+repo+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", media)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode >= http.StatusMultipleChoices {
			msg, _ := io.ReadAll(resp.Body)
			t.Fatalf("%s %s: %s %s", method, path, resp.Status, bytes.TrimSpace(msg))
		}
	}
	for _, f := range l.Files {
		digest := "sha256:" + strings.TrimPrefix(f.Name, "blobs/sha256/")
		send(http.MethodPost, "/blobs/uploads/?digest="+digest, "application/octet-stream", f.Body)
		var head struct{ MediaType string }
		if json.Unmarshal([]byte(f.Body), &head) == nil && head.MediaType != "" {
			send(http.MethodPut, "/manifests/"+digest, head.MediaType, f.Body)
		}
		if digest == d.Digest {
			send(http.MethodPut, "/manifests/"+tag, d.MediaType, f.Body)
		}
	}
}
