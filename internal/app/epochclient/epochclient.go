// Package epochclient reads the URL of the snapshot registry and the credentials for it, in the same way for every
// binary that uses it. It sends nothing.
package epochclient

import (
	"crypto/x509"
	"net/url"
	"os"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
)

// Settings are the user's settings for the registry.
type Settings struct {
	URL       string // [http[s]://]HOST[:PORT][/PREFIX]; "": none
	Token     string // bearer token; secret
	TokenFile string // file that holds the token, when Token is empty
	CACert    string // PEM file with the authority of its certificate, in addition to the system's
}

// Read returns the URL, without a slash at its end, and the credentials.
// Errors: InvalidArgument, FailedPrecondition for a file that cannot be read.
func (s Settings) Read() (string, snapshot.Auth, error) {
	auth := snapshot.Auth{Token: s.Token}
	base, err := checkURL(s.URL)
	if err != nil {
		return "", auth, err
	}
	if s.TokenFile != "" && s.Token == "" {
		text, err := os.ReadFile(s.TokenFile)
		if err != nil {
			return "", auth, errdefs.Preconditionf("read the token for the snapshot registry: %w", err)
		}
		if auth.Token = strings.TrimSpace(string(text)); auth.Token == "" {
			return "", auth, errdefs.Preconditionf("the file %s for the snapshot registry's token is empty", s.TokenFile)
		}
	}
	if strings.ContainsAny(auth.Token, " \t\r\n") {
		return "", auth, errdefs.Invalidf("the token for the snapshot registry has white space in it; it must be one word")
	}
	if s.CACert != "" {
		pem, err := os.ReadFile(s.CACert)
		if err != nil {
			return "", auth, errdefs.Preconditionf("read the certificate authority of the snapshot registry: %w", err)
		}
		if !x509.NewCertPool().AppendCertsFromPEM(pem) {
			return "", auth, errdefs.Invalidf("%s holds no certificate in PEM", s.CACert)
		}
		auth.CA = pem
	}
	return base, auth, nil
}

// checkURL rejects what is not a registry's URL. Credentials in it would appear in logs.
func checkURL(text string) (string, error) {
	if text == "" {
		return "", nil
	}
	full := text
	if !strings.Contains(text, "://") {
		full = "https://" + text
	}
	u, err := url.Parse(full)
	switch {
	case err != nil: // the text of err may contain a password
		return "", errdefs.Invalidf("the URL of the snapshot registry cannot be read; it is like https://epoch.example:8443")
	case u.User != nil:
		return "", errdefs.Invalidf("the URL of the snapshot registry must not hold credentials; use EPOCH_TOKEN")
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "", u.RawQuery != "", u.Fragment != "":
		return "", errdefs.Invalidf("%q is not the URL of a snapshot registry, like https://epoch.example:8443", text)
	}
	return strings.TrimRight(text, "/"), nil
}
