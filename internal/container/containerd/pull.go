package containerd

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"cocoonstack.io/cocoon/internal/container"
	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	parallel  = 3                      // parts of an image that are fetched at a time
	reporting = 250 * time.Millisecond // between two reports of progress
)

// EnsureImage implements container.Images.
func (r *Runtime) EnsureImage(ctx context.Context, p container.Pull) (container.Image, error) {
	name, err := normal(p.Ref)
	if err != nil {
		return container.Image{}, err
	}
	if !p.Always {
		i, err := r.image(ctx, name)
		if err == nil {
			err = unpack(ctx, i)
		}
		if !errdefs.IsNotFound(err) {
			if err != nil {
				return container.Image{}, err
			}
			return r.described(ctx, i)
		}
	}
	resolver, err := r.resolver(name, p)
	if err != nil {
		return container.Image{}, err
	}
	sum := sha256.Sum256([]byte(name))
	ctx, done, err := r.lease(ctx, "pull-"+hex.EncodeToString(sum[:16])) // what an interrupted pull has fetched is kept for the next
	if err != nil {
		return container.Image{}, err
	}
	i, err := r.pull(ctx, name, resolver, p.Progress)
	if err != nil {
		return container.Image{}, errors.Join(unpulled(err, name), done())
	}
	if err := done(); err != nil {
		return container.Image{}, err
	}
	return r.described(ctx, i)
}

func (r *Runtime) described(ctx context.Context, i client.Image) (container.Image, error) {
	used, err := r.used(ctx)
	if err != nil {
		return container.Image{}, err
	}
	return r.describe(ctx, i, used), nil
}

func (r *Runtime) pull(ctx context.Context, name string, resolver remotes.Resolver, progress func(container.Progress)) (client.Image, error) {
	parts := &parts{sizes: map[digest.Digest]int64{}}
	opts := []client.RemoteOpt{
		client.WithResolver(resolver), client.WithPullUnpack, client.WithPullSnapshotter(snapshotter),
		client.WithMaxConcurrentDownloads(parallel), client.WithImageHandler(images.HandlerFunc(parts.add)),
	}
	if progress != nil {
		ctx, cancel := context.WithCancel(ctx)
		var reports sync.WaitGroup
		reports.Go(func() { parts.report(ctx, r.client.ContentStore(), progress) })
		defer reports.Wait()
		defer cancel()
	}
	return r.client.Pull(ctx, name, opts...)
}

// parts are those of an image that are known by now.
type parts struct {
	mu    sync.Mutex
	sizes map[digest.Digest]int64
}

func (p *parts) add(_ context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sizes[d.Digest] = d.Size
	return nil, nil
}

// report calls fn with how much is there, until ctx ends, and then once more.
func (p *parts) report(ctx context.Context, store content.Store, fn func(container.Progress)) {
	tick := time.NewTicker(reporting)
	defer tick.Stop()
	for last := (container.Progress{Done: -1}); ; {
		ended := ctx.Err() != nil
		now, ok := p.progress(context.WithoutCancel(ctx), store)
		if ok && now != last {
			fn(now)
			last = now
		}
		if ended {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

func (p *parts) progress(ctx context.Context, store content.Store) (container.Progress, bool) {
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	p.mu.Lock()
	sizes := make(map[digest.Digest]int64, len(p.sizes))
	for d, n := range p.sizes {
		sizes[d] = n
	}
	p.mu.Unlock()
	coming, err := store.ListStatuses(ctx)
	if err != nil {
		return container.Progress{}, false
	}
	var now container.Progress
	for d, n := range sizes {
		now.Total += n
		if _, err := store.Info(ctx, d); err == nil {
			now.Done += n
			continue
		}
		for _, s := range coming {
			if strings.HasSuffix(s.Ref, d.String()) {
				now.Done += s.Offset
			}
		}
	}
	return now, now.Total > 0
}

// resolver speaks with the registry of an image and its mirrors. Credentials go to the registry only.
func (r *Runtime) resolver(name string, p container.Pull) (remotes.Resolver, error) {
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		return nil, errdefs.Invalidf("image %q: %w", name, err)
	}
	host := reference.Domain(named)
	cfg := r.cfg.Registries[host]
	transport, err := transportOf(host, cfg)
	if err != nil {
		return nil, err
	}
	web := &http.Client{Transport: transport}
	var all []docker.RegistryHost
	for _, m := range cfg.Mirrors {
		at, path, _ := strings.Cut(m, "/")
		if path != "" {
			path = "/" + path
		}
		all = append(all, docker.RegistryHost{
			Client: web, Authorizer: docker.NewDockerAuthorizer(docker.WithAuthClient(web)), Host: at, Scheme: r.scheme(at), Path: "/v2" + path,
			Capabilities: docker.HostCapabilityPull | docker.HostCapabilityResolve,
		})
	}
	at, err := docker.DefaultHost(host)
	if err != nil {
		return nil, errdefs.Invalidf("image %q: %w", name, err)
	}
	all = append(all, docker.RegistryHost{
		Client: web, Authorizer: docker.NewDockerAuthorizer(docker.WithAuthClient(web), docker.WithAuthCreds(func(asking string) (string, string, error) {
			if asking != at {
				return "", "", nil
			}
			return p.Username, p.Password, nil
		})), Host: at, Scheme: r.scheme(host), Path: "/v2", Capabilities: docker.HostCapabilityPull | docker.HostCapabilityResolve,
	})
	return docker.NewResolver(docker.ResolverOptions{Hosts: func(string) ([]docker.RegistryHost, error) { return all, nil }}), nil
}

// scheme is how a registry is spoken to: one on this machine, or one that is configured so, without TLS.
func (r *Runtime) scheme(host string) string {
	if local, err := docker.MatchLocalhost(host); err == nil && local || r.cfg.Registries[host].Insecure {
		return "http"
	}
	return "https"
}

func transportOf(host string, cfg Registry) (*http.Transport, error) {
	t := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: cfg.Insecure} //nolint:gosec // the operator says so
	if cfg.CA != "" {
		pem, err := os.ReadFile(cfg.CA)
		if err != nil {
			return nil, fmt.Errorf("read the authorities of registry %s: %w", host, err)
		}
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		if !pool.AppendCertsFromPEM(pem) {
			return nil, errdefs.Preconditionf("read the authorities of registry %s: %s has no certificate", host, cfg.CA)
		}
		t.RootCAs = pool
	}
	return docker.DefaultHTTPTransport(t), nil
}
