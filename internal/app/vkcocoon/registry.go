package vkcocoon

import (
	"crypto/x509"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/podprovider"
	"cocoonstack.io/cocoon/internal/snapshot"
)

// Environment takes from the environment what is said there of the registry and not in c. The token is only there.
func (c *Config) Environment(env func(string) string) {
	for _, v := range []struct {
		key string
		to  *string
	}{{"EPOCH_URL", &c.EpochURL}, {"EPOCH_TOKEN", &c.EpochToken}, {"VK_EPOCH_TOKEN_FILE", &c.EpochTokenFile}, {"EPOCH_CA_CERT", &c.EpochCACert}, {"VK_PEERS", &c.Peers}} {
		if *v.to == "" {
			*v.to = env(v.key)
		}
	}
}

// registry reads where snapshots are kept, and the credentials for it. Nothing is sent.
func (c Config) registry() (podprovider.Registry, error) {
	r := podprovider.Registry{Auth: snapshot.Auth{Token: c.EpochToken}}
	var err error
	if r.URL, err = registryURL(c.EpochURL); err != nil {
		return r, err
	}
	if c.EpochTokenFile != "" && c.EpochToken == "" {
		text, err := os.ReadFile(c.EpochTokenFile)
		if err != nil {
			return r, errdefs.Preconditionf("read the token for the snapshot registry: %w", err)
		}
		if r.Auth.Token = strings.TrimSpace(string(text)); r.Auth.Token == "" {
			return r, errdefs.Preconditionf("the file %s for the snapshot registry's token is empty", c.EpochTokenFile)
		}
	}
	if strings.ContainsAny(r.Auth.Token, " \t\r\n") {
		return r, errdefs.Invalidf("the token for the snapshot registry has white space in it; it must be one word")
	}
	if c.EpochCACert != "" {
		pem, err := os.ReadFile(c.EpochCACert)
		if err != nil {
			return r, errdefs.Preconditionf("read the certificate authority of the snapshot registry: %w", err)
		}
		if !x509.NewCertPool().AppendCertsFromPEM(pem) {
			return r, errdefs.Invalidf("%s holds no certificate in PEM", c.EpochCACert)
		}
		r.Auth.CA = pem
	}
	for peer := range strings.SplitSeq(c.Peers, ",") {
		if peer = strings.TrimSpace(peer); peer == "" {
			continue
		}
		host, port, err := net.SplitHostPort(peer)
		if n, numErr := strconv.ParseUint(port, 10, 16); err != nil || host == "" || numErr != nil || n == 0 {
			return r, errdefs.Invalidf("peer %q is not HOST:PORT of a node API", peer)
		}
		r.Peers = append(r.Peers, peer)
	}
	return r, nil
}

// registryURL checks [http[s]://]HOST[:PORT][/PREFIX]. Credentials in it would end up in logs and are refused.
func registryURL(text string) (string, error) {
	if text == "" {
		return "", nil
	}
	full := text
	if !strings.Contains(text, "://") {
		full = "https://" + text
	}
	u, err := url.Parse(full)
	switch {
	case err != nil: // whose text may hold a password
		return "", errdefs.Invalidf("the URL of the snapshot registry cannot be read; it is like https://epoch.example:8443")
	case u.User != nil:
		return "", errdefs.Invalidf("the URL of the snapshot registry must not hold credentials; use EPOCH_TOKEN")
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "", u.RawQuery != "", u.Fragment != "":
		return "", errdefs.Invalidf("%q is not the URL of a snapshot registry, like https://epoch.example:8443", text)
	}
	return strings.TrimRight(text, "/"), nil
}
