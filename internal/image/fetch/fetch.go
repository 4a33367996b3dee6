// Package fetch downloads over HTTP and HTTPS as a stream: through proxies and redirects, with client certificates. It
// resumes broken downloads and hashes the served bytes while it reads them.
//
// It does not decompress or store, knows no image names and uses no registry protocol.
package fetch

import (
	"cmp"
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
	Log       *slog.Logger  // nil: no log
	UserAgent string        // "": cocoon
	Stall     time.Duration // a connection without a byte for this long is closed; 30 s
	Dial      time.Duration // timeout to connect; 30 s
	Handshake time.Duration // timeout of the TLS handshake; 10 s
	Attempts  int           // attempts in a row without progress before a fetch fails; 5
	Backoff   time.Duration // before the second attempt, doubled for each further one; 500 ms
	MaxWait   time.Duration // maximum wait between attempts, whatever a server asks for; 30 s
	Reach     *reach.Policy // allowed destinations of URLs; nil: all
}

// Client fetches files. It is safe for concurrent use and reuses connections between fetches of one transport profile.
type Client struct {
	opts Options

	mu         sync.Mutex
	transports map[[sha256.Size]byte]*http.Transport // by hash of the configuration: the key holds no secret
}

// New returns a client. It opens nothing.
func New(o Options) *Client {
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	o.UserAgent = cmp.Or(o.UserAgent, "cocoon")
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

// Close closes idle connections. Running fetches continue.
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
	ETag         string             // of our copy: the server may answer that nothing changed
	LastModified string             // of our copy, as the server sent it
	Digest       string             // required "sha256:<hex>" of the bytes as served; "": any
	Checksums    string             // URL of a SHA256SUMS file that lists the URL's base name; "": none
}

// errTimeout is the cause when a profile's timeout ends a context.
var errTimeout = errors.New("the timeout of the transport profile passed")

// Get starts the fetch of r.URL. It returns when the body can be read, or when the file is known not to have changed. ctx
// ends the whole fetch, including reads.
//
// Errors, of Get and of reads: InvalidArgument (URL, digest, profile), NotFound (404, 410), FailedPrecondition (refused:
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
	b := &Body{s: s, ctx: ctx, cancel: cancel, from: from, want: want, size: -1, pauses: c.opts.pauses()}
	if err := b.connect(ctx, validators{etag: r.ETag, modified: r.LastModified}, nil); err != nil {
		cancel()
		return nil, err
	}
	return b, nil
}

// session is shared by all requests of one Get.
type session struct {
	c         *Client
	transport *http.Transport
	profile   *translate.Profile
}

// parseDigest returns the hex digits of d, "" if d is empty.
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

// checkProfile refuses settings that would fail only later.
func checkProfile(p *translate.Profile) error {
	if p != nil && p.MaxRedirects != nil && *p.MaxRedirects < 0 {
		return errdefs.Invalidf("maxRedirects is %d; it must not be negative", *p.MaxRedirects)
	}
	return nil
}
