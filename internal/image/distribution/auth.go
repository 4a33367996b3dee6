package distribution

import (
	"cmp"
	"context"
	"path"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/ociclient"
)

// Proof says with which credentials a registry allowed an image to be read.
type Proof struct {
	Repository string              // host/path in full form: index.docker.io/library/alpine
	Public     bool                // without credentials, or with the host's own
	Auth       *image.RegistryAuth // unless Public: the entry of the request; SECRET
}

// Repository returns the repository of a reference, in the form of Proof.
func Repository(ref string) (string, error) {
	r, err := name.ParseReference(ref)
	if err != nil {
		return "", errdefs.Invalidf("invalid image reference %q: %w", ref, err)
	}
	return r.Context().Name(), nil
}

// Covering returns the entries of auth that apply to a repository in the form of Proof, in the order in which Pull would
// try them. An invalid repository has no entries.
func Covering(repository string, auth []image.RegistryAuth) []image.RegistryAuth {
	repo, err := name.NewRepository(repository)
	if err != nil {
		return nil
	}
	return covering(repo, auth)
}

// covering returns the entries that apply to repo, the longest first.
func covering(repo name.Repository, auth []image.RegistryAuth) []image.RegistryAuth {
	type match struct {
		length int
		auth   image.RegistryAuth
	}
	var matches []match
	for _, a := range auth {
		if n, ok := covers(a.Registry, repo); ok {
			matches = append(matches, match{n, a})
		}
	}
	slices.SortStableFunc(matches, func(a, b match) int { return cmp.Compare(b.length, a.length) })
	var out []image.RegistryAuth
	for _, m := range matches {
		out = append(out, m.auth)
	}
	return out
}

// credential is one credential to try, and what it would prove.
type credential struct {
	ociclient.Auth

	entry *image.RegistryAuth // from the request; nil: the host's, or none
}

// credentials returns what to try for a repository, in order: entries of the request that match it, the longest first,
// then the host's own. No credentials at all is tried only if there are no others.
func (c *Client) credentials(ctx context.Context, repo name.Repository, auth []image.RegistryAuth) []credential {
	var out []credential
	for _, a := range covering(repo, auth) {
		out = append(out, credential{authOf(a), &a})
	}
	if host, ok := c.hostAuth(ctx, repo); ok {
		out = append(out, credential{Auth: host})
	}
	if len(out) == 0 {
		out = append(out, credential{})
	}
	return out
}

// hostAuth returns the host's credentials for a repository; false if it has none. A broken file of the host must not block
// public images.
func (c *Client) hostAuth(ctx context.Context, repo name.Repository) (ociclient.Auth, bool) {
	found, err := authn.Resolve(ctx, c.cfg.Keychain, repo)
	if err != nil {
		c.cfg.Log.Warn("docker configuration of the host unusable", "registry", repo.RegistryStr())
		return ociclient.Auth{}, false
	}
	if found == authn.Anonymous {
		return ociclient.Auth{}, false
	}
	a, err := authn.Authorization(ctx, found)
	if err != nil {
		c.cfg.Log.Warn("credentials of the host unusable", "registry", repo.RegistryStr())
		return ociclient.Auth{}, false
	}
	return ociclient.Auth{Token: a.RegistryToken, Username: a.Username, Password: a.Password, Identity: a.IdentityToken}, true
}

// authOf converts an entry of a request for a session.
func authOf(a image.RegistryAuth) ociclient.Auth {
	const byToken = "<token>" // user name that means no user
	switch {
	case a.Token == "":
		return ociclient.Auth{Username: a.Username, Password: a.Password}
	case a.Username == "" || a.Username == byToken && a.Password != "":
		return ociclient.Auth{Token: a.Token}
	default:
		return ociclient.Auth{Identity: a.Token}
	}
}

// dockerHub are the names of Docker Hub in docker configurations.
var dockerHub = []string{"index.docker.io", "docker.io", "registry-1.docker.io", "registry.hub.docker.com"}

// covers reports whether a key of docker's "auths" applies to repo, and how precisely.
func covers(key string, repo name.Repository) (int, bool) {
	for _, scheme := range []string{"https://", "http://"} {
		key = strings.TrimPrefix(key, scheme)
	}
	host, prefix, _ := strings.Cut(strings.TrimSuffix(key, "/"), "/")
	if prefix == "v1" || prefix == "v2" { // as in https://index.docker.io/v1/
		prefix = ""
	}
	want := repo.RegistryStr()
	if !sameHost(host, want) {
		return 0, false
	}
	full := repo.RepositoryStr()
	if prefix != "" && full != prefix && !strings.HasPrefix(full, prefix+"/") {
		return 0, false
	}
	return len(prefix), true
}

// sameHost compares hosts. A label of the pattern may contain a *.
func sameHost(pattern, host string) bool {
	pattern, host = strings.ToLower(pattern), strings.ToLower(host)
	if pattern == host || slices.Contains(dockerHub, pattern) && slices.Contains(dockerHub, host) {
		return true
	}
	p, h := strings.Split(pattern, "."), strings.Split(host, ".")
	if len(p) != len(h) {
		return false
	}
	for i := range p {
		if ok, err := path.Match(p[i], h[i]); err != nil || !ok {
			return false
		}
	}
	return true
}
