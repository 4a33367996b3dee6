// Package registry brings images from OCI registries into the local store, layer by layer.
//
// It speaks the distribution protocol only: it does not decide what a name means, and what a layer becomes is the
// store's business.
package registry

import (
	"context"
	"log/slog"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
)

// Config says how registries are reached.
type Config struct {
	Registries map[string]RegistryConfig // by host[:port]
	Log        *slog.Logger              // nil discards
}

// RegistryConfig is what is special about one registry.
type RegistryConfig struct {
	Mirrors  []string // host[:port][/path], asked first, in order
	CA       string   // path of a PEM file whose certificates are trusted besides the system's
	Insecure bool     // plain HTTP is allowed, and certificates are not verified
}

// Client pulls from registries into one store.
type Client struct {
	cfg   Config
	store *local.Store
}

// New returns a client that puts images into store.
func New(cfg Config, store *local.Store) *Client {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Client{cfg: cfg, store: store}
}

// Pull makes the image that ref names (repository:tag or repository@digest) the content of the store's key. When the
// registry still has what the key's origin says, nothing is transferred unless force is set. auth is tried before the
// host's own docker configuration. progress may be nil.
// Errors: InvalidArgument (reference, content), NotFound, PermissionDenied (credentials), DataLoss (digest, truncated),
// Unavailable (server, network), ResourceExhausted (disk), Unsupported (platform, schema).
func (c *Client) Pull(context.Context, string, string, []image.RegistryAuth, bool, func(image.Progress)) (image.Image, error) {
	return image.Image{}, errdefs.Unsupportedf("registries cannot be pulled from yet")
}
