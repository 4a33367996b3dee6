// Package fetch downloads over HTTP and HTTPS as a stream: through proxies and redirects, with client certificates, going
// on where a broken connection left off, and hashing what is served while it is read.
//
// It neither decompresses nor stores, knows no image names, and speaks to no registry.
package fetch

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/translate"
	"cocoonstack.io/cocoon/internal/reach"
)

// Options tune a Client. Zero values are replaced by the defaults named here.
type Options struct {
	Log       *slog.Logger  // nil: silence
	UserAgent string        // "": cocoon
	Stall     time.Duration // a connection that brings no byte for this long is given up; 30 s
	Dial      time.Duration // for a connection to be made; 30 s
	Handshake time.Duration // for TLS; 10 s
	Attempts  int           // in a row that bring nothing, before a fetch fails; 5
	Backoff   time.Duration // before the second attempt, doubled for each further one; 500 ms
	MaxWait   time.Duration // the longest wait between attempts, whatever a server asks for; 30 s
	Reach     *reach.Policy // where URLs may lead; nil: everywhere
}

// Client fetches. It is safe for concurrent use and reuses connections between fetches of one transport profile.
type Client struct {
	opts Options

	mu         sync.Mutex
	transports map[[sha256.Size]byte]*http.Transport // by hash of what is configured: the key holds no secret
}

// New returns a client. It opens nothing.
func New(o Options) *Client {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.UserAgent == "" {
		o.UserAgent = "cocoon"
	}
	fill(&o.Stall, 30*time.Second)
	fill(&o.Dial, 30*time.Second)
	fill(&o.Handshake, 10*time.Second)
	fill(&o.Backoff, 500*time.Millisecond)
	fill(&o.MaxWait, 30*time.Second)
	if o.Attempts <= 0 {
		o.Attempts = 5
	}
	return &Client{opts: o, transports: map[[sha256.Size]byte]*http.Transport{}}
}

func fill(d *time.Duration, def time.Duration) {
	if *d <= 0 {
		*d = def
	}
}

// Close drops the connections that are kept for later. Fetches under way go on.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range c.transports {
		t.CloseIdleConnections()
	}
	clear(c.transports)
	return nil
}

// Request asks for one file. It may hold secrets (userinfo and query of the URLs, the profile's keys): do not print it.
type Request struct {
	URL          string             // http or https; its userinfo becomes Basic authorization
	Profile      *translate.Profile // nil: the defaults of the system
	ETag         string             // of the copy we have: the answer may be that nothing changed
	LastModified string             // likewise, as the server said it
	Digest       string             // "sha256:<hex>" that the bytes must have as served; "": any
	Checksums    string             // URL of a SHA256SUMS file that lists the URL's base name; "": none
}

// errTimeout is the cause of a context that a profile's timeout ended.
var errTimeout = errors.New("the timeout of the transport profile passed")

// Get starts the fetch of r.URL and returns when its body can be read, or it is known not to have changed. ctx ends the
// whole fetch, reading included.
//
// Errors, of Get and of reading: InvalidArgument (URL, digest, profile), NotFound (404, 410), FailedPrecondition (refused:
// credentials, certificates, redirects), DataLoss (digest), Unavailable (network, server, profile's timeout).
func (c *Client) Get(ctx context.Context, r Request) (*Body, error) {
	from, err := parseURL(r.URL)
	if err != nil {
		return nil, err
	}
	if err := checkProfile(r.Profile); err != nil {
		return nil, fmt.Errorf("fetch %s: %w", from, err)
	}
	want, err := parseDigest(r.Digest)
	if err != nil {
		return nil, fmt.Errorf("fetch %s: %w", from, err)
	}
	transport, err := c.transport(r.Profile)
	if err != nil {
		return nil, fmt.Errorf("fetch %s: %w", from, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	if r.Profile != nil && r.Profile.Timeout > 0 {
		undo := cancel
		timed, stop := context.WithTimeoutCause(ctx, r.Profile.Timeout, errTimeout)
		ctx, cancel = timed, func() { stop(); undo() }
	}
	s := &session{c: c, transport: transport, profile: r.Profile}
	if r.Checksums != "" {
		if want, err = s.listed(ctx, r.Checksums, from, want); err != nil {
			cancel()
			return nil, err
		}
	}
	b := &Body{s: s, ctx: ctx, cancel: cancel, from: from, want: want, size: -1}
	if err := b.connect(ctx, validators{etag: r.ETag, modified: r.LastModified}, nil); err != nil {
		cancel()
		return nil, err
	}
	return b, nil
}

// session is what the requests of one Get have in common.
type session struct {
	c         *Client
	transport *http.Transport
	profile   *translate.Profile
}

// parseDigest returns the hex digits of d, "" for none.
func parseDigest(d string) (string, error) {
	if d == "" {
		return "", nil
	}
	algorithm, digits, ok := strings.Cut(d, ":")
	if !ok || algorithm != "sha256" {
		return "", errdefs.Invalidf("digest %q is not of the form sha256:<hex>; no other algorithm is supported", d)
	}
	return hexDigest(digits)
}

func hexDigest(digits string) (string, error) {
	if sum, err := hex.DecodeString(digits); err != nil || len(sum) != sha256.Size {
		return "", errdefs.Invalidf("digest %q is not 64 hexadecimal digits", digits)
	}
	return strings.ToLower(digits), nil
}

// checkProfile refuses what could only fail later, half-way.
func checkProfile(p *translate.Profile) error {
	if p != nil && p.MaxRedirects != nil && *p.MaxRedirects < 0 {
		return errdefs.Invalidf("maxRedirects is %d; it must not be negative", *p.MaxRedirects)
	}
	return nil
}
