// Package pull brings images into the local store from where their names say: it decides what a name means, fetches over
// HTTP or from an OCI registry, and hands the bytes to the store.
package pull

import (
	"context"
	"log/slog"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
)

// Config says where names lead.
type Config struct {
	Log *slog.Logger
}

// Puller implements image.Puller.
type Puller struct {
	cfg   Config
	store *local.Store
}

var _ image.Puller = (*Puller)(nil)

// New returns a puller into store.
func New(cfg Config, store *local.Store) (*Puller, error) {
	return &Puller{cfg: cfg, store: store}, nil
}

// Pull implements image.Puller.
func (p *Puller) Pull(ctx context.Context, r image.PullRequest, _ func(image.Progress)) (image.Image, error) {
	return p.store.Get(ctx, r.Name)
}

// Explain implements image.Puller.
func (p *Puller) Explain(context.Context, string) (image.Explanation, error) {
	return image.Explanation{}, errdefs.Unsupportedf("names cannot be explained yet")
}

// SyncMappings implements image.Puller.
func (p *Puller) SyncMappings(context.Context, string, []image.Mapping) ([]image.MappingProblem, error) {
	return nil, nil
}

// Problems implements image.Puller.
func (p *Puller) Problems(context.Context) ([]image.MappingProblem, error) { return nil, nil }
