package distribution

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/ociclient"
)

// endpoint is one place that may hold a repository.
type endpoint struct {
	repo   name.Repository
	cfg    RegistryConfig
	mirror bool
	known  bool  // the operator configured it
	err    error // the configuration of this place is wrong
}

// endpoints returns the mirrors of a repository's registry and the registry itself.
func (c *Client) endpoints(repo name.Repository) []endpoint {
	host := repo.RegistryStr()
	cfg, ok := c.cfg.Registries[host]
	if !ok && sameHost("docker.io", host) {
		for _, alias := range dockerHub {
			if cfg, ok = c.cfg.Registries[alias]; ok {
				break
			}
		}
	}
	var out []endpoint
	for _, m := range cfg.Mirrors {
		m = strings.TrimSuffix(m, "/")
		for _, scheme := range []string{"https://", "http://"} {
			m = strings.TrimPrefix(m, scheme)
		}
		mcfg := c.cfg.Registries[strings.SplitN(m, "/", 2)[0]]
		r, err := name.NewRepository(m+"/"+repo.RepositoryStr(), nameOptions(mcfg)...)
		if err != nil {
			err = errdefs.Invalidf("the mirror %q of %s is not a registry: %w", m, host, err)
		}
		out = append(out, endpoint{repo: r, cfg: mcfg, mirror: true, known: true, err: err})
	}
	self, err := name.NewRepository(repo.Name(), nameOptions(cfg)...)
	return append(out, endpoint{repo: self, cfg: cfg, known: ok, err: err})
}

func nameOptions(cfg RegistryConfig) []name.Option {
	if cfg.Insecure {
		return []name.Option{name.Insecure}
	}
	return nil
}

// maxAnswer is how long a registry may take to begin an answer: another one may be asked after it.
const maxAnswer = 30 * time.Second

// attempts is how often a request is tried, and a transfer that makes no progress is resumed.
const attempts = 4

// remote is a repository that admits the caller.
type remote struct {
	*ociclient.Session

	repo  name.Repository
	entry *image.RegistryAuth // entry of the request that was accepted; nil: the host's credentials, or none
}

// connect finds credentials that the registry accepts.
func (c *Client) connect(ctx context.Context, e endpoint, id string, auth []image.RegistryAuth) (*remote, error) {
	if e.err != nil {
		return nil, e.err
	}
	host := e.repo.RegistryStr()
	ca, err := readCA(host, e.cfg)
	if err != nil {
		return nil, err
	}
	cfg := ociclient.Config{
		Stall: c.cfg.Stall, Answer: min(c.cfg.Stall, maxAnswer), Backoff: c.cfg.Backoff, Attempts: attempts, FailFast: true,
		AnyScheme: true, Insecure: e.cfg.Insecure,
	}
	if !e.known {
		cfg.Reach = c.cfg.Reach
	}
	ref := ociclient.Ref{Scheme: "https", Host: host, Repository: e.repo.RepositoryStr()}
	tries := c.credentials(ctx, e.repo, auth)
	for _, a := range tries {
		a.CA = ca
		var s *ociclient.Session
		if s, err = ociclient.Open(ctx, ref, a.Auth, ociclient.Pull, cfg); err == nil {
			r := &remote{Session: s, repo: e.repo, entry: a.entry}
			if err = r.admits(ctx, id, len(tries) > 1); err == nil {
				return r, nil
			}
			s.Close()
		}
		err = trusted(err)
		if !errdefs.IsFailedPrecondition(err) {
			break
		}
	}
	return nil, err
}

// trusted turns the error about an untrusted certificate into Unavailable: other credentials do not help.
func trusted(err error) error {
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return errdefs.As(errdefs.Unavailable, err)
	}
	return err
}

// admits asks whether the credentials are good for this image, when there are others that may be better. Only a refusal
// counts: every other error shows later.
func (r *remote) admits(ctx context.Context, id string, others bool) error {
	if !others {
		return nil
	}
	if _, err := r.Head(ctx, id); errdefs.IsFailedPrecondition(err) {
		return err
	}
	return nil
}

// manifest reads a manifest or an index. It returns its media type and digest.
func (r *remote) manifest(ctx context.Context, id string) (raw []byte, media types.MediaType, digest string, err error) {
	raw, kind, err := r.Manifest(ctx, id)
	if err != nil {
		return nil, "", "", err
	}
	return raw, types.MediaType(kind), ociclient.Digest(raw), nil
}

// blob reads one blob.
func (r *remote) blob(ctx context.Context, d v1.Descriptor) io.ReadCloser {
	return r.Blob(ctx, d.Digest.String(), d.Size)
}

// metered reports how much is read.
type metered struct {
	io.ReadCloser

	tell func(n int64)
}

func (m *metered) Read(p []byte) (int, error) {
	n, err := m.ReadCloser.Read(p)
	if n > 0 {
		m.tell(int64(n))
	}
	return n, err
}
