// Package distribution pulls images from OCI registries into the local store, layer by layer.
//
// It speaks only the distribution protocol. It does not decide what a name means; the store decides how a layer is stored.
package distribution

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/oci"
	"cocoonstack.io/cocoon/internal/reach"
	"cocoonstack.io/cocoon/internal/vm"
)

// Config says how registries are reached.
type Config struct {
	Registries map[string]RegistryConfig // by host[:port]
	Reach      *reach.Policy             // where registries may be that are not listed here; nil: everywhere
	Arch       string                    // GOARCH of the guests; "" is the store's
	Log        *slog.Logger              // nil discards

	// Of tests; zero values mean the values named here.
	Stall    time.Duration  // how long a transfer may bring no bytes: 60 s
	Backoff  time.Duration  // before the first retry: 1 s, doubled each time
	Keychain authn.Keychain // credentials of the host: docker's
	Part     int64          // bytes of a disk in one layer of a push: 1 GiB
}

// RegistryConfig holds the special settings of one registry.
type RegistryConfig struct {
	Mirrors  []string // host[:port][/path], asked first, in order
	CA       string   // path of a PEM file whose certificates are trusted in addition to the system's
	Insecure bool     // plain HTTP is allowed, and certificates are not verified
}

// Store is the part of the image store that a Client fills and reads.
type Store interface {
	Arch() string
	Origin(ctx context.Context, key string) (image.Origin, image.Image, error)
	Touch(id string)
	MissingLayers(img *oci.Image) []int
	Put(ctx context.Context, key string, r io.Reader, o image.Fetched) (image.Image, error)
	PutImage(ctx context.Context, key string, img *oci.Image, open image.Layers, o image.Fetched) (image.Image, error)
	Parts(ctx context.Context, ref string) (*image.Parts, error)
}

// Client pulls from registries into one store.
type Client struct {
	cfg   Config
	store Store
}

// New returns a client that puts images into store.
func New(cfg Config, store Store) *Client {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	cfg.Arch = cmp.Or(cfg.Arch, store.Arch())
	cfg.Stall = cmp.Or(cfg.Stall, time.Minute)
	cfg.Backoff = cmp.Or(cfg.Backoff, time.Second)
	cfg.Keychain = cmp.Or[authn.Keychain](cfg.Keychain, authn.DefaultKeychain)
	return &Client{cfg: cfg, store: store}
}

// Pull stores the image that ref names (repository:tag or repository@digest) under the store's key. When the registry
// still has the digest of the key's origin, nothing is transferred unless force is set. auth is tried before the host's
// own docker configuration. progress may be nil; it is called by one goroutine at a time.
//
// An image named by its digest that is already here is not requested again. If somebody other than the operator asks, the
// registry must still allow the read, and the result says with which credentials.
// Errors: InvalidArgument (reference, content), NotFound, FailedPrecondition (credentials), DataLoss (digest, truncated),
// Unavailable (server, network), ResourceExhausted (disk), Unsupported (platform, schema).
func (c *Client) Pull(ctx context.Context, ref, key string, auth []image.RegistryAuth, force bool, progress func(image.Progress)) (Pulled, error) {
	r, err := name.ParseReference(ref)
	if err != nil {
		return Pulled{}, errdefs.Invalidf("invalid image reference %q: %w", ref, err)
	}
	o, img, err := c.store.Origin(ctx, key)
	if errdefs.IsInvalid(err) {
		return Pulled{}, err // the store refuses the key
	}
	known := ""
	if !force && err == nil && o.Digest != "" {
		if known = o.Digest; r.Identifier() == known && vm.Behalf(ctx).Operator() {
			c.store.Touch(img.ID)
			return Pulled{Image: img}, nil // an image named by its digest cannot have changed
		}
	}
	var failed error
	for _, e := range c.endpoints(r.Context()) {
		p := &pull{c: c, key: key, known: known, name: r.Name(), id: r.Identifier(), progress: progress}
		img, err := p.from(ctx, e, auth)
		if err == nil {
			return Pulled{Image: img, Proof: p.remote.proof(r.Context())}, nil
		}
		if ctx.Err() != nil {
			return Pulled{}, fmt.Errorf("pull %s: %w", r.Name(), ctx.Err())
		}
		if e.mirror {
			c.cfg.Log.Warn("mirror failed", "image", r.Name(), "mirror", e.repo.RegistryStr(), "err", err)
		}
		failed = err // the last is the registry itself
	}
	return Pulled{}, fmt.Errorf("pull %s: %w", r.Name(), failed)
}

// Verify asks whether the registry allows ref to be read, with auth or the host's credentials. Nothing is transferred.
// Errors: as of Pull.
func (c *Client) Verify(ctx context.Context, ref string, auth []image.RegistryAuth) (Proof, error) {
	r, err := name.ParseReference(ref)
	if err != nil {
		return Proof{}, errdefs.Invalidf("invalid image reference %q: %w", ref, err)
	}
	for _, e := range c.endpoints(r.Context()) {
		var proof Proof
		if proof, err = c.verify(ctx, r, e, auth); err == nil {
			return proof, nil
		}
		if ctx.Err() != nil {
			return Proof{}, ctx.Err()
		}
	}
	return Proof{}, fmt.Errorf("ask for %s: %w", r.Name(), err)
}

func (c *Client) verify(ctx context.Context, r name.Reference, e endpoint, auth []image.RegistryAuth) (Proof, error) {
	at, err := c.connect(ctx, e, r.Identifier(), auth)
	if err != nil {
		return Proof{}, err
	}
	defer at.Close()
	if _, err := at.Head(ctx, r.Identifier()); err != nil { // not all registries answer HEAD
		if _, _, _, err := at.manifest(ctx, r.Identifier()); err != nil {
			return Proof{}, err
		}
	}
	return at.proof(r.Context()), nil
}

// proof is what the session proves about an image of repo. r may be a mirror of repo.
func (r *remote) proof(repo name.Repository) Proof {
	return Proof{Repository: repo.Name(), Public: r.entry == nil, Auth: r.entry}
}

// Pulled is an image that was pulled.
type Pulled struct {
	image.Image

	Proof Proof // zero: the registry was not asked
}

// pull is one image from one endpoint.
type pull struct {
	c        *Client
	key      string
	known    string // digest that the store already has
	name     string
	id       string // tag or digest
	progress func(image.Progress)

	remote *remote

	mu          sync.Mutex // held while progress is called: layers arrive in parallel
	done, total int64
}

// report adds to the bytes transferred and calls progress.
func (p *pull) report(phase string, more int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += more
	if p.progress != nil {
		p.progress(image.Progress{Phase: phase, Done: p.done, Total: p.total})
	}
}

func (p *pull) from(ctx context.Context, e endpoint, auth []image.RegistryAuth) (image.Image, error) {
	p.total = -1
	p.report(image.PhaseResolve, 0)
	var err error
	if p.remote, err = p.c.connect(ctx, e, p.id, auth); err != nil {
		return image.Image{}, err
	}
	defer p.remote.Close()
	if p.known != "" {
		if d, err := p.remote.Head(ctx, p.id); err == nil && d == p.known {
			_, img, err := p.c.store.Origin(ctx, p.key)
			if err == nil {
				p.c.store.Touch(img.ID)
				return img, nil
			}
		}
	}
	m, top, err := p.resolve(ctx)
	if err != nil {
		return image.Image{}, err
	}
	if isDisk(m) {
		return p.disk(ctx, m, top)
	}
	if m.Config.Size > maxMetadata {
		return image.Image{}, errdefs.Invalidf("the image configuration is %d bytes long; at most %d are allowed", m.Config.Size, maxMetadata)
	}
	config, err := p.small(ctx, m.Config)
	if err != nil {
		return image.Image{}, err
	}
	img, err := oci.NewImage(config, len(m.Layers), p.c.cfg.Arch)
	if err != nil {
		return image.Image{}, err
	}
	p.total = 0
	for _, n := range p.c.store.MissingLayers(img) {
		p.total += m.Layers[n].Size
	}
	p.report(image.PhaseDownload, 0)
	o := image.Fetched{Origin: image.Origin{URL: p.url(), Digest: top, FetchedAt: time.Now().UTC()}, Total: p.total}
	return p.c.store.PutImage(ctx, p.key, img, func(ctx context.Context, n int) (io.ReadCloser, error) {
		return p.layer(ctx, m.Layers[n])
	}, o)
}

// url is the printable form of the origin, without credentials.
func (p *pull) url() string { return "docker://" + p.name }

func (p *pull) layer(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	if d.Digest.Algorithm != "sha256" {
		return nil, errdefs.Invalidf("the layer %s uses the digest algorithm %q; only sha256 is supported", d.Digest, d.Digest.Algorithm)
	}
	return &metered{p.remote.blob(ctx, d), func(n int64) { p.report(image.PhaseDownload, n) }}, nil
}

// small reads a whole blob.
func (p *pull) small(ctx context.Context, d v1.Descriptor) ([]byte, error) {
	b := p.remote.blob(ctx, d)
	defer b.Close()
	return io.ReadAll(b)
}
