package fetch

import (
	"net/url"
	"path"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// location is a URL that prints without its possible secrets: userinfo, query and fragment.
type location struct {
	url *url.URL // without userinfo and fragment
	who *url.Userinfo
}

// parseURL accepts absolute http and https URLs. Its errors do not quote the text, which may hold a password.
func parseURL(raw string) (location, error) {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" || u.Hostname() == "" || u.Opaque != "" {
		return location{}, errdefs.Invalidf("this is not an absolute http or https URL; check its spelling")
	}
	if u.Scheme != "http" && u.Scheme != "https" {
		return location{}, errdefs.Invalidf("URL scheme %q is neither http nor https", u.Scheme)
	}
	return located(u), nil
}

func located(u *url.URL) location {
	l := location{url: u, who: u.User}
	u.User, u.Fragment, u.RawFragment = nil, "", ""
	return l
}

// String is l for people and logs, with the query hidden.
func (l location) String() string {
	u := *l.url
	if u.RawQuery != "" || u.ForceQuery {
		u.RawQuery, u.ForceQuery = "...", false
	}
	return u.String()
}

// base is the file name.
func (l location) base() string { return path.Base(l.url.Path) }

func (l location) port() string {
	if p := l.url.Port(); p != "" {
		return p
	}
	return map[string]string{"http": "80", "https": "443"}[l.url.Scheme]
}

// sameOrigin reports whether credentials for one location may be sent to the other.
func (l location) sameOrigin(o location) bool {
	return l.url.Scheme == o.url.Scheme && l.port() == o.port() &&
		strings.EqualFold(l.url.Hostname(), o.url.Hostname())
}

// follow resolves the Location header of a redirect from l.
func (l location) follow(to string) (location, error) {
	ref, err := url.Parse(to)
	if err != nil || to == "" {
		return location{}, errdefs.Preconditionf("%s redirects to an invalid URL", l)
	}
	n := located(l.url.ResolveReference(ref))
	switch {
	case n.url.Scheme != "http" && n.url.Scheme != "https" || n.url.Hostname() == "":
		return location{}, errdefs.Preconditionf("%s redirects to a URL that is neither http nor https", l)
	case l.url.Scheme == "https" && n.url.Scheme == "http":
		return location{}, errdefs.Preconditionf("%s redirects from https to plain http (%s), which is refused; if you want plain http, use the http URL itself", l, n)
	}
	return n, nil
}
