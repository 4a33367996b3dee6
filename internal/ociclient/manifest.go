package ociclient

import (
	"bytes"
	"context"
	_ "crypto/sha512" // a digest's algorithm works only if it is linked in
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/cenkalti/backoff/v5"
	"github.com/opencontainers/go-digest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociname"
)

// Media types of manifests.
const (
	MediaManifest       = "application/vnd.oci.image.manifest.v1+json"
	MediaIndex          = "application/vnd.oci.image.index.v1+json"
	MediaDockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	MediaDockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"

	mediaSchema1       = "application/vnd.docker.distribution.manifest.v1+json" // accepted so that it can be refused by name
	mediaSchema1Signed = "application/vnd.docker.distribution.manifest.v1+prettyjws"
)

// MaxManifest is the maximum size of a manifest, in bytes. Registries refuse larger ones.
const MaxManifest = 4 << 20

// Descriptor names a blob or a manifest.
type Descriptor struct {
	MediaType    string            `json:"mediaType"`
	ArtifactType string            `json:"artifactType,omitempty"`
	Digest       string            `json:"digest"`
	Size         int64             `json:"size"`
	Annotations  map[string]string `json:"annotations,omitempty"`
	Platform     *Platform         `json:"platform,omitempty"`
}

// Platform is the platform of a manifest in an index.
type Platform struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
}

// Manifest is an OCI image manifest.
type Manifest struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	ArtifactType  string            `json:"artifactType,omitempty"`
	Config        Descriptor        `json:"config"`
	Layers        []Descriptor      `json:"layers"`
	Annotations   map[string]string `json:"annotations,omitempty"`
}

// retryError is an error after which the server asks for a pause.
type retryError struct {
	error

	after error
}

func (e retryError) Unwrap() []error { return []error{e.error, e.after} }

// quota reports whether a refusal is about lack of space, which registries report in many ways.
func quota(resp *http.Response) bool {
	switch resp.StatusCode {
	case http.StatusForbidden, http.StatusBadRequest, http.StatusConflict:
		return resp.Request.Method != http.MethodHead && mentions(resp, "QUOTA_EXCEEDED", "INSUFFICIENT_STORAGE")
	}
	return false
}

func (s *Session) manifestURL(id string) string { return s.base + "manifests/" + id }

func (s *Session) named(id string) string {
	r := s.ref
	r.Tag, r.Digest = id, ""
	if strings.Contains(id, ":") {
		r.Digest = id
	}
	return r.String()
}

var accepted = http.Header{"Accept": {strings.Join([]string{MediaManifest, MediaIndex, MediaDockerManifest, MediaDockerList, mediaSchema1Signed, mediaSchema1}, ", ")}}

// Head returns the digest of the manifest that id, a tag or a digest, names. Error: NotFound.
func (s *Session) Head(ctx context.Context, id string) (string, error) {
	what := "manifest " + s.named(id)
	resp, err := s.do(ctx, request{method: http.MethodHead, url: s.manifestURL(id), header: accepted, what: what})
	if err != nil {
		return "", err
	}
	discard(resp)
	if resp.StatusCode != http.StatusOK {
		return "", s.explain(resp, what)
	}
	if d := resp.Header.Get("Docker-Content-Digest"); ociname.IsDigest(d) {
		return d, nil
	}
	raw, _, err := s.Manifest(ctx, id) // the header is optional
	if err != nil {
		return "", err
	}
	return Digest(raw), nil
}

// Manifest reads a manifest or an index and verifies it if id is a digest. It also returns its media type.
// Errors: NotFound, DataLoss, InvalidArgument (too large).
func (s *Session) Manifest(ctx context.Context, id string) ([]byte, string, error) {
	what := "manifest " + s.named(id)
	var media string
	raw, err := retry(ctx, s, s.cfg.Attempts, func() (raw []byte, err error) {
		if raw, media, err = s.manifest(ctx, id, what); !errdefs.IsUnavailable(err) {
			err = backoff.Permanent(err)
		}
		return raw, err
	})
	return raw, media, err
}

func (s *Session) manifest(ctx context.Context, id, what string) ([]byte, string, error) {
	resp, err := s.do(ctx, request{method: http.MethodGet, url: s.manifestURL(id), header: accepted, what: what, single: true})
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, "", s.explain(resp, what)
	}
	raw, err := io.ReadAll(io.LimitReader(resp.Body, MaxManifest+1))
	s.recv.Add(int64(len(raw)))
	switch {
	case err != nil:
		return nil, "", s.unreachable(ctx, err)
	case len(raw) > MaxManifest:
		return nil, "", errdefs.Invalidf("the %s is larger than the allowed %d bytes", what, MaxManifest)
	}
	if named := digest.Digest(id); ociname.IsDigest(id) && named.Algorithm().FromBytes(raw) != named {
		return nil, "", errdefs.DataLossf("the %s is damaged: %s serves bytes with the digest %s", what, s.ref.Host, named.Algorithm().FromBytes(raw))
	}
	media, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
	return raw, strings.TrimSpace(media), nil
}

// PutManifest stores a manifest under a tag or its digest. It then reads the digest back and returns when the
// registry has confirmed it. DataLoss if the registry has another one.
func (s *Session) PutManifest(ctx context.Context, id, media string, raw []byte) (string, error) {
	what := "manifest " + s.named(id)
	want := Digest(raw)
	if len(raw) > MaxManifest {
		return "", errdefs.Exhaustedf("the %s has %d bytes; registries take at most %d", what, len(raw), MaxManifest)
	}
	resp, err := s.do(ctx, request{
		method: http.MethodPut, url: s.manifestURL(id), what: what, size: int64(len(raw)),
		header: http.Header{"Content-Type": {media}}, body: func() io.Reader { return bytes.NewReader(raw) },
	})
	if err != nil {
		return "", err
	}
	defer discard(resp)
	switch {
	case resp.StatusCode == http.StatusCreated || resp.StatusCode == http.StatusOK || resp.StatusCode == http.StatusAccepted:
	case resp.StatusCode/100 == 4 && mentions(resp, "MANIFEST_BLOB_UNKNOWN", "BLOB_UNKNOWN"):
		return "", errdefs.DataLossf("%s lost a blob of the %s while it was pushed; push it again", s.ref.Host, what)
	default:
		return "", s.explain(resp, what)
	}
	got, err := s.Head(ctx, id)
	if err != nil {
		return "", fmt.Errorf("verify the push: %w", err)
	}
	if got != want {
		return "", errdefs.DataLossf("%s has the %s with the digest %s, not %s; somebody else may have pushed it meanwhile", s.ref.Host, what, got, want)
	}
	return want, nil
}

// DeleteManifest removes a tag or a manifest. One that does not exist is no error.
func (s *Session) DeleteManifest(ctx context.Context, id string) error {
	what := "manifest " + s.named(id)
	resp, err := s.do(ctx, request{method: http.MethodDelete, url: s.manifestURL(id), what: what})
	if err != nil {
		return err
	}
	defer discard(resp)
	switch resp.StatusCode {
	case http.StatusAccepted, http.StatusOK, http.StatusNoContent, http.StatusNotFound:
		return nil
	}
	return s.explain(resp, what)
}

// Image reads the manifest of an image or artifact: for an index, the one in it for linux on arch. It returns the digest
// of what the reference names, and the manifest.
// Errors: as Manifest, and Unsupported (no such platform).
func (s *Session) Image(ctx context.Context, id, arch string) (string, Manifest, error) {
	raw, media, err := s.Manifest(ctx, id)
	if err != nil {
		return "", Manifest{}, err
	}
	top := Digest(raw)
	for range 3 { // an index in an index
		var head struct {
			MediaType string       `json:"mediaType"`
			Manifests []Descriptor `json:"manifests"`
		}
		if err := json.Unmarshal(raw, &head); err != nil {
			return "", Manifest{}, errdefs.Invalidf("the manifest %s cannot be read: it is not the JSON of a manifest", s.named(id))
		}
		if head.MediaType != "" {
			media = head.MediaType
		}
		if media != MediaIndex && media != MediaDockerList && len(head.Manifests) == 0 {
			var m Manifest
			if err := json.Unmarshal(raw, &m); err != nil {
				return "", Manifest{}, errdefs.Invalidf("the manifest %s cannot be read: it is not the manifest of an image", s.named(id))
			}
			return top, m, nil
		}
		next := ""
		for _, d := range head.Manifests {
			if p := d.Platform; ociname.IsDigest(d.Digest) && (p == nil && next == "" || p != nil && p.OS == "linux" && p.Architecture == arch) {
				if next = d.Digest; p != nil {
					break
				}
			}
		}
		if next == "" {
			return "", Manifest{}, errdefs.Unsupportedf("the index %s lists nothing for linux/%s", s.named(id), arch)
		}
		if raw, media, err = s.Manifest(ctx, next); err != nil {
			return "", Manifest{}, err
		}
	}
	return "", Manifest{}, errdefs.Invalidf("the index %s is nested more than 3 levels deep: refused", s.named(id))
}
