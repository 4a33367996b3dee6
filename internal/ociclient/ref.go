package ociclient

import (
	"cmp"
	"net"
	"regexp"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociname"
)

// Ref names something in a registry: [http[s]://]HOST[:PORT]/REPOSITORY[:TAG|@DIGEST].
type Ref struct {
	Scheme     string // http or https
	Host       string // HOST[:PORT]
	Repository string
	Tag        string // "latest" if neither is given, "" if Digest is set
	Digest     string // sha256:<hex> or sha512:<hex>
}

// Identifier returns what follows the repository in a request: the digest or the tag.
func (r Ref) Identifier() string { return cmp.Or(r.Digest, r.Tag) }

// String returns the reference for display. It can be parsed again.
func (r Ref) String() string {
	s := r.Scheme + "://" + r.Host + "/" + r.Repository
	if r.Digest != "" {
		return s + "@" + r.Digest
	}
	return s + ":" + r.Tag
}

const (
	maxRef     = 1024 // bytes
	defaultTag = "latest"
)

var hostLabel = regexp.MustCompile(`^[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?$`)

// ParseRef parses a reference. Without a scheme it is https, but http for loopback hosts. Errors are InvalidArgument
// and name the wrong part; a reference that contains a user or password is refused without being quoted.
func ParseRef(s string) (Ref, error) {
	const form = "a reference is [http[s]://]HOST[:PORT]/REPOSITORY[:TAG|@DIGEST]"
	r := Ref{}
	rest := s
	if before, after, ok := strings.Cut(s, "://"); ok {
		r.Scheme, rest = strings.ToLower(before), after
		if r.Scheme != "http" && r.Scheme != "https" {
			return Ref{}, errdefs.Invalidf("the scheme of a registry reference is http or https, not %q", clip(before))
		}
	}
	host, path, ok := strings.Cut(rest, "/")
	switch {
	case strings.Contains(host, "@"):
		return Ref{}, errdefs.Invalidf("the reference holds a user or password; give credentials by a token instead")
	case len(s) > maxRef:
		return Ref{}, errdefs.Invalidf("the reference is %d bytes long; at most %d are allowed", len(s), maxRef)
	case !ok || host == "" || path == "":
		return Ref{}, errdefs.Invalidf("%q names no registry or no repository: %s", s, form)
	}
	name, err := checkHost(host)
	if err != nil {
		return Ref{}, errdefs.Invalidf("the reference %q: %w", s, err)
	}
	r.Host = host
	if r.Scheme == "" {
		r.Scheme = "https"
		if Loopback(name) {
			r.Scheme = "http"
		}
	}
	if repository, digest, ok := strings.Cut(path, "@"); ok {
		if !ociname.IsDigest(digest) {
			return Ref{}, errdefs.Invalidf("the digest of %q is not sha256:<64 hexadecimal digits>", s)
		}
		r.Digest, path = digest, repository
	}
	if i := strings.LastIndexByte(path, ':'); i >= 0 {
		if r.Tag, path = path[i+1:], path[:i]; !ociname.IsTag(r.Tag) {
			return Ref{}, errdefs.Invalidf("the tag of %q is not 1 to 128 letters, digits, %q, %q or %q", s, "_", ".", "-")
		}
	}
	switch { // a tag has no meaning beside a digest
	case r.Digest != "":
		r.Tag = ""
	case r.Tag == "":
		r.Tag = defaultTag
	}
	if len(path) > ociname.MaxRepository {
		return Ref{}, errdefs.Invalidf("the repository of %q is %d bytes long; at most %d are allowed", s, len(path), ociname.MaxRepository)
	}
	for part := range strings.SplitSeq(path, "/") {
		if !ociname.IsComponent(part) {
			return Ref{}, errdefs.Invalidf("the part %q of the repository in %q is not lower-case letters and digits, with single %q, %q or %q between", part, s, ".", "_", "-")
		}
	}
	r.Repository = path
	return r, nil
}

func clip(s string) string {
	if len(s) > 16 {
		return s[:16] + "..."
	}
	return s
}

// checkHost returns the host without its port.
func checkHost(host string) (string, error) {
	name := host
	if strings.HasPrefix(host, "[") || strings.Contains(host, ":") {
		n, p, err := net.SplitHostPort(host)
		switch {
		case err == nil:
			name = n
			if v, perr := strconv.ParseUint(p, 10, 16); perr != nil || v == 0 {
				return "", errdefs.Invalidf("the port %q is not a number from 1 to 65535", p)
			}
		case strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]"):
			name = host[1 : len(host)-1]
		default:
			return "", errdefs.Invalidf("the host %q is not HOST or HOST:PORT", host)
		}
	}
	if strings.HasPrefix(host, "[") {
		if ip := net.ParseIP(name); ip == nil || ip.To4() != nil && !strings.Contains(name, ":") {
			return "", errdefs.Invalidf("the host %q is not an IPv6 address", host)
		}
		return name, nil
	}
	if len(name) > 253 {
		return "", errdefs.Invalidf("the host is %d bytes long; at most 253 are allowed", len(name))
	}
	for label := range strings.SplitSeq(name, ".") {
		if !hostLabel.MatchString(label) {
			return "", errdefs.Invalidf("the host %q is not a host name", host)
		}
	}
	return name, nil
}

// Loopback reports whether a host name or address is this machine itself.
func Loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
