// Package chunked pushes and pulls snapshots to and from any OCI registry. It cuts files into content-defined,
// compressed chunks: a registry stores each chunk once, and neither side sends or fetches what the other has. A push of
// memory that was pushed before sends only the pages that changed, and refers to ranges of the earlier chunks.
//
// It starts no VM, keeps no credentials, and decides nothing about the use of a snapshot.
//
// Limits: a push moves 16 blobs at once, a pull eight. Both hold at most 192 MiB of chunks, as much again of compressed
// chunks, and 4 MiB per moving blob; a guest of at most 1 GiB needs a tenth of that. Nothing is spooled to disk.
package chunked

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	pushers = 16        // concurrent uploads: they mostly wait for the registry's disk
	pullers = 8         // concurrent downloads
	budget  = 192 << 20 // bytes of uncompressed chunks in memory

	checkAttempts = 2
	checkPatience = 3 * time.Second
)

// Config tunes a Client.
type Config struct {
	// Index is a private folder for the chunk index of local snapshots; it is created when needed. With it, a second
	// push reads and sends only what changed, and a pull borrows chunks from local snapshots. It can be deleted at any
	// time. "": no index.
	Index string
	// Hypervisors are the drivers of this node. Pull refuses snapshots of another hypervisor. Empty: any.
	Hypervisors []string
	// Whole makes every file one uncompressed layer, for readers from before chunks. Such a push shares no data with
	// another.
	Whole bool
	// Uncompressed leaves the chunks uncompressed, for networks faster than compression.
	Uncompressed bool

	// OwnerOf derives, from its labels, the owner of a snapshot that was saved before snapshots had owners; nil: the
	// operator.
	OwnerOf func(labels map[string]string) vm.Owner

	// LoadsLate says whether guests of the driver with that name can run before their memory is here: only their snapshots are
	// pulled early, see PullEarly. nil: all.
	LoadsLate func(driver string) bool
	// LoadAs is the user of processes that load memory later, see PullEarly; nil: the same.
	LoadAs *proc.User

	HTTP ociclient.Config
	Log  *slog.Logger // nil discards
}

// Client is a snapshot.Remote over one store.
type Client struct {
	cfg   Config
	store snapshot.Store
	index index
}

var _ snapshot.Remote = (*Client)(nil)

// New returns a client that pulls into store. It opens nothing.
func New(cfg Config, store snapshot.Store) *Client {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	return &Client{cfg: cfg, store: store, index: index{dir: cfg.Index, mu: &sync.Mutex{}}}
}

// Digest implements snapshot.Remote.
func (c *Client) Digest(ctx context.Context, ref string, auth snapshot.Auth) (string, error) {
	var digest string
	err := c.session(ctx, ref, auth, ociclient.Pull, func(r ociclient.Ref, s *ociclient.Session) (err error) {
		digest, err = s.Head(ctx, r.Identifier())
		return err
	})
	return digest, err
}

// Delete implements snapshot.Remote.
func (c *Client) Delete(ctx context.Context, ref string, auth snapshot.Auth) error {
	return c.session(ctx, ref, auth, ociclient.Delete, func(r ociclient.Ref, s *ociclient.Session) error {
		return s.DeleteManifest(ctx, r.Identifier())
	})
}

// Check implements snapshot.Remote. It has a short timeout and few retries: its caller wants to know whether to begin
// at all.
func (c *Client) Check(ctx context.Context, ref string, auth snapshot.Auth) error {
	quick := Client{cfg: c.cfg}
	quick.cfg.HTTP.Attempts = checkAttempts
	short, cancel := context.WithTimeoutCause(ctx, checkPatience, errdefs.Unavailablef("the registry does not answer within %s", checkPatience))
	defer cancel()
	err := quick.session(short, ref, auth, ociclient.Push, func(r ociclient.Ref, s *ociclient.Session) error {
		if _, err := s.Head(short, r.Identifier()); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
		return nil
	})
	if err != nil && short.Err() != nil && ctx.Err() == nil {
		return fmt.Errorf("check %s: %w", ref, context.Cause(short))
	}
	return err
}

// session runs do with the repository of ref.
func (c *Client) session(ctx context.Context, ref string, auth snapshot.Auth, scope string, do func(ociclient.Ref, *ociclient.Session) error) error {
	r, err := ociclient.ParseRef(ref)
	if err != nil {
		return err
	}
	s, err := ociclient.Open(ctx, r, ociclient.Auth{Token: auth.Token, Username: auth.Username, Password: auth.Password, CA: auth.CA}, scope, c.cfg.HTTP)
	if err != nil {
		return fmt.Errorf("reach %s: %w", r.Host, err)
	}
	defer s.Close()
	return do(r, s)
}

// meter sums up the progress and reports it, one call at a time.
type meter struct {
	s    *ociclient.Session
	tell func(snapshot.Progress)

	mu sync.Mutex
	p  snapshot.Progress
}

func (m *meter) phase(name string) { m.report(func(p *snapshot.Progress) { p.Phase = name }) }
func (m *meter) total(n int64)     { m.report(func(p *snapshot.Progress) { p.Total = n }) }
func (m *meter) done(n int64)      { m.report(func(p *snapshot.Progress) { p.Done += n }) }

func (m *meter) report(change func(*snapshot.Progress)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.p)
	if m.tell != nil {
		m.p.Moved = m.s.Moved()
		m.tell(m.p)
	}
}
