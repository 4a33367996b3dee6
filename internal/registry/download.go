package registry

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"hash"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/reference"
	"cocoonstack.io/cocoon/internal/registry/stream"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
)

// Checksums of a download: in a header if known in advance, and in a trailer for clients that accept trailers.
const (
	sumHex  = "X-Checksum-Sha256"
	sumRepr = "Repr-Digest" // RFC 9530
)

// download serves /dl/NAME: an OS image as the bytes of its disk, a snapshot as a tar stream.
func (g *Registry) download(r *request) error {
	tag := "latest"
	if t := r.URL.Query().Get("tag"); t != "" {
		tag = t
	}
	ref, err := reference.Parse(tag)
	if err != nil {
		return &failure{status: http.StatusNotFound, code: content.ManifestUnknown, err: err}
	}
	d, doc, err := g.image(r.Context(), r.route.Name, ref)
	if err != nil {
		return err
	}
	a := assembly{g: g, repo: r.route.Name, doc: doc}
	var mediaType string
	switch {
	case isOSImage(doc):
		mediaType = octets
		err = a.disk(r.Context())
	case isSnapshot(doc):
		mediaType = "application/x-tar"
		err = a.tar(r.Context())
	default:
		return &failure{status: http.StatusMethodNotAllowed, code: content.Unsupported, err: errdefs.Unsupportedf("%s:%s is neither an OS image nor a snapshot: pull it with a client of OCI registries", r.route.Name, ref)}
	}
	if err != nil {
		return err
	}
	s := stream.New(r.Context(), a.pieces)
	defer s.Close()
	r.w.Header().Set("Content-Type", mediaType)
	r.w.Header().Set("ETag", strconv.Quote("dl-"+d.String()))
	r.w.Header().Set("Docker-Content-Digest", d.String())
	r.w.Header().Set("Cache-Control", "private, no-cache")
	return g.sendSummed(r, s, d, a.sum)
}

// image returns the manifest of a reference; for an index, the one for linux/amd64, or the first.
func (g *Registry) image(ctx context.Context, repo string, ref reference.Reference) (digest.Digest, *content.Document, error) {
	d, _, doc, err := g.content.Manifest(ctx, repo, ref)
	if err != nil || len(doc.Manifests) == 0 {
		return d, doc, err
	}
	pick := doc.Manifests[0]
	for _, m := range doc.Manifests {
		if m.Platform != nil && m.Platform.OS == "linux" && m.Platform.Architecture == "amd64" {
			pick = m
			break
		}
	}
	d, _, doc, err = g.content.Manifest(ctx, repo, reference.Reference{Digest: pick.Digest})
	return d, doc, err
}

func isOSImage(d *content.Document) bool {
	return d.ArtifactType == artifact.TypeOSImage || d.ArtifactType == artifact.TypeWindowsImage
}

func isSnapshot(d *content.Document) bool {
	return artifact.IsSnapshot(d.ArtifactType) || d.ArtifactType == "" && d.Config != nil && d.Config.MediaType == artifact.MediaConfig
}

// sendSummed sends a stream with its checksum. HTTP/1.1 allows either a length or trailers: a client that asks for
// trailers (TE: trailers) gets them, others get the length. HTTP/2 allows both.
func (g *Registry) sendSummed(r *request, s *stream.Stream, d digest.Digest, sum string) error {
	h := r.w.Header()
	if sum == "" {
		sum, _ = g.sums.bodies.get(d)
	}
	body := &summed{ReadSeeker: s, size: s.Size()}
	if sum == "" {
		body.sum = sha256.New()
	}
	whole := r.Method == http.MethodGet && r.Header.Get("Range") == ""
	wanted := whole && (r.ProtoMajor >= 2 || asksForTrailers(r.Request))
	setSum(h, sum)
	if wanted && sum == "" {
		h.Set("Trailer", sumHex+", "+sumRepr)
	}
	if wanted && r.ProtoMajor < 2 {
		if sum != "" { // already known; send it in both places
			h.Set("Trailer", sumHex+", "+sumRepr)
		}
		h.Set("Accept-Ranges", "bytes")
		r.w.WriteHeader(http.StatusOK)
		if _, err := io.Copy(struct{ io.Writer }{r.w}, body); err != nil {
			return err
		}
	} else {
		http.ServeContent(r.w, r.Request, "", time.Time{}, body)
		if r.w.err != nil {
			return r.w.err
		}
	}
	if got := body.result(); got != "" {
		sum = got
		g.sums.bodies.put(d, sum)
	}
	if wanted {
		setSum(h, sum)
	}
	return nil
}

func setSum(h http.Header, sum string) {
	if raw, err := hex.DecodeString(sum); err == nil && sum != "" {
		h.Set(sumHex, sum)
		h.Set(sumRepr, "sha-256=:"+base64.StdEncoding.EncodeToString(raw)+":")
	}
}

func asksForTrailers(r *http.Request) bool {
	for _, v := range r.Header.Values("Te") {
		for part := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(part), "trailers") {
				return true
			}
		}
	}
	return false
}

// summed hashes the bytes read, if all are read in order.
type summed struct {
	io.ReadSeeker
	size int64
	pos  int64     // -1: not in order
	sum  hash.Hash // nil: not needed
}

func (s *summed) Seek(offset int64, whence int) (int64, error) {
	n, err := s.ReadSeeker.Seek(offset, whence)
	s.pos = -1
	if n == 0 {
		s.pos = 0
		if s.sum != nil {
			s.sum.Reset()
		}
	}
	return n, err
}

func (s *summed) Read(p []byte) (int, error) {
	n, err := s.ReadSeeker.Read(p)
	if s.sum != nil && s.pos >= 0 {
		s.sum.Write(p[:n])
		s.pos += int64(n)
	}
	return n, err
}

func (s *summed) result() string {
	if s.sum == nil || s.pos != s.size {
		return ""
	}
	return hex.EncodeToString(s.sum.Sum(nil))
}

// sums caches the checksums of downloads by manifest, and the uncompressed sizes of layers.
type sums struct {
	bodies cache[string]
	layers cache[int64]
}

// size returns the cached size, or the result of measure.
func (s *sums) size(d digest.Digest, measure func() (int64, error)) (int64, error) {
	if n, ok := s.layers.get(d); ok {
		return n, nil
	}
	n, err := measure()
	if err == nil {
		s.layers.put(d, n)
	}
	return n, err
}

// cache keeps a limited number of values by digest.
type cache[V any] struct {
	mu   sync.Mutex
	kept map[digest.Digest]V
}

const maxCached = 10000

func (c *cache[V]) get(d digest.Digest) (V, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	v, ok := c.kept[d]
	return v, ok
}

func (c *cache[V]) put(d digest.Digest, v V) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kept == nil || len(c.kept) >= maxCached {
		c.kept = map[digest.Digest]V{}
	}
	c.kept[d] = v
}

// source returns a source for a blob whose bytes are verified while they are read.
func (g *Registry) source(repo string, d v1.Descriptor) stream.Source {
	return func(ctx context.Context) (io.ReadSeekCloser, error) {
		f, info, err := g.content.OpenBlob(ctx, repo, d.Digest)
		if err != nil {
			return nil, err
		}
		return g.content.Verifying(ctx, f, d.Digest, info), nil
	}
}
