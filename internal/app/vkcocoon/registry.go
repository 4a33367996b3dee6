package vkcocoon

import (
	"net"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/app/epochclient"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/kube/storage"
	"cocoonstack.io/cocoon/internal/ociclient"
)

// Environment reads registry settings that c lacks from the environment. The token comes only from there.
func (c *Config) Environment(env func(string) string) {
	for _, v := range []struct {
		key string
		to  *string
	}{{"EPOCH_URL", &c.EpochURL}, {"EPOCH_TOKEN", &c.EpochToken}, {"VK_EPOCH_TOKEN_FILE", &c.EpochTokenFile}, {"EPOCH_CA_CERT", &c.EpochCACert}, {"VK_PEERS", &c.Peers}, {"VK_PUBLIC_REPOSITORIES", &c.PublicRepositories}} {
		if *v.to == "" {
			*v.to = env(v.key)
		}
	}
}

// registry reads the address of the snapshot registry and the credentials for it. It sends nothing.
func (c Config) registry() (podsnapshots.Registry, error) {
	var r podsnapshots.Registry
	var err error
	if r.URL, r.Auth, err = (epochclient.Settings{URL: c.EpochURL, Token: c.EpochToken, TokenFile: c.EpochTokenFile, CACert: c.EpochCACert}).Read(); err != nil {
		return r, err
	}
	r.TrustOld = c.TrustOldSnapshots
	for repo := range strings.SplitSeq(c.PublicRepositories, ",") {
		if repo = strings.TrimSpace(repo); repo == "" {
			continue
		}
		if ref, err := contract.ParseSnapshotRef(strings.TrimSuffix(repo, "/")); err != nil || ref.Repo != strings.TrimSuffix(repo, "/") {
			return r, errdefs.Invalidf("public repository %q must be a repository such as team/base, or a prefix such as team/", repo)
		}
		r.Public = append(r.Public, repo)
	}
	for peer := range strings.SplitSeq(c.Peers, ",") {
		if peer = strings.TrimSpace(peer); peer == "" {
			continue
		}
		host, port, err := net.SplitHostPort(peer)
		if n, numErr := strconv.ParseUint(port, 10, 16); err != nil || host == "" || numErr != nil || n == 0 {
			return r, errdefs.Invalidf("peer %q must be HOST:PORT of a node API", peer)
		}
		r.Peers = append(r.Peers, peer)
	}
	return r, nil
}

// uploads finds what was uploaded for claims in the registry. nil: there is none.
func (c Config) uploads() (storage.Uploads, error) {
	r, err := c.registry()
	if err != nil || r.URL == "" {
		return nil, err
	}
	return func(namespace, claim, digest string) (image.PullRequest, error) {
		ref, err := ociclient.ParseRef(r.URL + "/" + contract.UploadRepository(namespace, claim) + "@" + digest)
		if err != nil {
			return image.PullRequest{}, err
		}
		p := image.PullRequest{Name: "docker://" + ref.Host + "/" + ref.Repository + "@" + ref.Digest, Policy: image.PullAlways}
		if r.Auth.Token != "" {
			p.Auth = []image.RegistryAuth{{Registry: ref.Host + "/" + ref.Repository, Token: r.Auth.Token}}
		}
		return p, nil
	}, nil
}
