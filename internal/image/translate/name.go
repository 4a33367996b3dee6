package translate

import (
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociname"
)

// Limits of names, in bytes.
const (
	maxName = 255
	maxURL  = 2048 // signed URLs are long
	maxKey  = 240  // leaves room for a suffix in a file name
)

// vmPrefixes mark the name of a VM image.
var vmPrefixes = []string{"virtlet.cloud/", "cocoon.cocoonstack.io/"}

var (
	schemeRE    = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9+.-]*$`)
	hostRE      = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?$`)
	digestishRE = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9+._-]*:[0-9A-Za-z]*$`)
	algorithmRE = regexp.MustCompile(`^sha(256|384|512):[0-9A-Za-z]*$`)
	idRE        = regexp.MustCompile(`^sha256:[0-9a-f]{4,64}$`)
	bareIDRE    = regexp.MustCompile(`^[0-9a-f]{64}$`)
	diskFileRE  = regexp.MustCompile(`(?i)\.(img|qcow2|raw|vmdk|vhd|vhdx)(\.(gz|xz|zst))?$`)
)

// Name is a parsed image name. It prints itself without credentials.
type Name struct {
	ID     string // id of an image in the store: sha256:HEX, perhaps only the first digits; then all else is empty
	Forced string // the prefix that marks a VM image, without its slash; "": none
	Scheme string // http, https or oci; "": none given
	Repo   string // without scheme, prefix, tag and digest; for a URL: host and path
	Tag    string // "": none
	Digest string // required sha256:HEX; "": none

	url *url.URL // for http and https; it may hold credentials
}

// Parse parses a name.
// Errors: InvalidArgument, which says which character or part is wrong.
func Parse(name string) (Name, error) {
	if name == "" {
		return Name{}, errdefs.Invalidf("an image needs a name")
	}
	var n Name
	rest := name
	for _, p := range vmPrefixes {
		if after, ok := strings.CutPrefix(name, p); ok {
			n.Forced, rest = strings.TrimSuffix(p, "/"), after
			break
		}
	}
	if rest == "" {
		return Name{}, errdefs.Invalidf("the image name %q ends after its prefix; say which image is meant", name)
	}
	switch {
	case bareIDRE.MatchString(rest):
		return Name{ID: "sha256:" + rest}, nil
	case idRE.MatchString(rest):
		return Name{ID: rest}, nil
	case strings.HasPrefix(rest, "sha256:"):
		return Name{}, errdefs.Invalidf("the image name %s is not an id: an id is sha256: and 4 to 64 lower-case hexadecimal digits", show(name))
	}
	scheme, after, has := strings.Cut(rest, "://")
	if !has || !schemeRE.MatchString(scheme) {
		return n.parsePlain(name, rest)
	}
	switch n.Scheme = strings.ToLower(scheme); n.Scheme {
	case "http", "https":
		return n.parseURL(name, after)
	case "oci", "docker":
		n.Scheme = "oci"
		if n.Forced != "" {
			return Name{}, errdefs.Invalidf("the image name %s asks for a VM image by its prefix and for a registry by its scheme; remove one of them", show(name))
		}
		if strings.Contains(after, "://") {
			return Name{}, errdefs.Invalidf("the image name %s has two schemes", show(name))
		}
		n, err := n.parsePlain(name, after)
		if err != nil {
			return Name{}, err
		}
		_, err = n.registry()
		return n, err
	}
	return Name{}, errdefs.Invalidf("the image name %s has the unknown scheme %q; use http, https or oci", show(name), scheme)
}

// parsePlain reads NAME[:TAG][@DIGEST]. whole is the full name for messages.
func (n Name) parsePlain(whole, s string) (Name, error) {
	if len(whole) > maxName {
		return Name{}, errdefs.Invalidf("the image name %s has %d characters; at most %d are allowed", show(whole), len(whole), maxName)
	}
	if c, bad := firstBad(s, plainChar); bad {
		return Name{}, errdefs.Invalidf("the image name %s contains %s; use only letters, digits and ._-/:@", show(whole), c)
	}
	s, digest, has := strings.Cut(s, "@")
	if has {
		if err := checkDigest(whole, digest); err != nil {
			return Name{}, err
		}
		n.Digest = digest
	}
	n.Repo = s
	if i := strings.LastIndexByte(s, ':'); i > strings.LastIndexByte(s, '/') {
		n.Repo, n.Tag = s[:i], s[i+1:]
		if !ociname.IsTag(n.Tag) {
			return Name{}, errdefs.Invalidf("the image name %s has the invalid tag %q; a tag is 1 to 128 letters, digits, '_', '.' and '-' and starts with neither '.' nor '-'", show(whole), n.Tag)
		}
	}
	parts := strings.Split(n.Repo, "/")
	for i, p := range parts {
		switch {
		case p == "":
			return Name{}, errdefs.Invalidf("the image name %s has an empty part: '/' and ':' stand between two", show(whole))
		case p[0] == '-' || p[0] == '.':
			return Name{}, errdefs.Invalidf("the image name %s has the part %q; none may start with %q", show(whole), p, p[0])
		case !strings.Contains(p, ":"):
		case i == 0 && len(parts) > 1 && hostRE.MatchString(p) && portOK(p):
		default:
			return Name{}, errdefs.Invalidf("the image name %s has a ':' in %q, where neither a port nor a tag is possible", show(whole), p)
		}
	}
	return n, nil
}

// parseURL reads the part after http:// or https://.
func (n Name) parseURL(whole, s string) (Name, error) {
	if len(whole) > maxURL {
		return Name{}, errdefs.Invalidf("the image URL has %d characters; at most %d are allowed", len(whole), maxURL)
	}
	path := strings.IndexAny(s, "/?#")
	if i := strings.LastIndexByte(s, '@'); path >= 0 && i > path && digestishRE.MatchString(s[i+1:]) {
		n.Digest = s[i+1:]
		if err := checkDigest(whole, n.Digest); err != nil {
			return Name{}, err
		}
		s = s[:i]
	}
	u, err := parseHTTP(n.Scheme + "://" + s)
	if err != nil {
		return Name{}, errdefs.Invalidf("the image name %s: %w", show(whole), err)
	}
	n.url, n.Repo = u, u.Host+u.EscapedPath()
	return n, nil
}

func checkDigest(whole, digest string) error {
	algorithm, _, _ := strings.Cut(digest, ":")
	switch {
	case ociname.IsSHA256(digest):
		return nil
	case !digestishRE.MatchString(digest):
		// There may be a password before the '@'.
		return errdefs.Invalidf("the image name %s has an '@' without a digest after it; put credentials into the URL of a mapping", show(whole))
	case algorithm != "sha256":
		return errdefs.Invalidf("the image name %s has a digest by %q; only sha256 is supported", show(whole), algorithm)
	}
	return errdefs.Invalidf("the image name %s has an invalid digest; use sha256: and 64 lower-case hexadecimal digits", show(whole))
}

// registryRef is a name in the form of registries and docker.
type registryRef struct {
	full     string // registry/repository:tag or @digest, complete
	familiar string // without the parts that docker omits
}

// hubs are the names of the default registry.
var hubs = []string{"docker.io", "index.docker.io", "registry-1.docker.io"}

// registry reads n as the name of a registry's image.
// Errors: InvalidArgument for a name that no registry allows, but other images may have.
func (n Name) registry() (registryRef, error) {
	host, path := "docker.io", n.Repo
	if first, rest, ok := strings.Cut(n.Repo, "/"); ok && looksLikeHost(first) {
		host, path = strings.ToLower(first), rest
	}
	if i := strings.IndexFunc(path, func(r rune) bool { return r >= 'A' && r <= 'Z' }); i >= 0 {
		return registryRef{}, errdefs.Invalidf("the image name %q has the upper-case letter %q, which registries do not allow", n.Repo, path[i])
	}
	for p := range strings.SplitSeq(path, "/") {
		if !ociname.IsComponent(p) {
			return registryRef{}, errdefs.Invalidf("the image name %q has the part %q, which registries do not allow: use lower-case letters and digits with one '.', '_', '__' or some '-' between them", n.Repo, p)
		}
	}
	if slices.Contains(hubs, host) {
		host = "docker.io"
		if short := strings.TrimPrefix(path, "library/"); !strings.Contains(short, "/") {
			path = short
		}
	}
	suffix := ":" + n.Tag
	switch {
	case n.Digest != "":
		suffix = "@" + n.Digest
	case n.Tag == "":
		suffix = ":latest"
	}
	r := registryRef{full: host + "/" + path + suffix, familiar: host + "/" + path + suffix}
	if host == "docker.io" {
		r.familiar = path + suffix
		if !strings.Contains(path, "/") {
			r.full = host + "/library/" + path + suffix
		}
	}
	if len(r.familiar) > maxKey {
		return registryRef{}, errdefs.Invalidf("the image name %.40q… is too long: with tag or digest it has %d characters, at most %d are allowed", n.Repo, len(r.familiar), maxKey)
	}
	return r, nil
}

// looksLikeHost implements docker's rule.
func looksLikeHost(first string) bool {
	return strings.ContainsAny(first, ".:") || first == "localhost"
}

// diskURL reports whether a name without scheme and prefix names a disk image file on a host.
func (n Name) diskURL() bool {
	first, rest, ok := strings.Cut(n.Repo, "/")
	return ok && looksLikeHost(first) && diskFileRE.MatchString(rest)
}

// String is the name without credentials and query.
func (n Name) String() string {
	if n.ID != "" {
		return n.ID
	}
	s := n.Repo
	if n.url != nil {
		s = printable(n.url.String())
	} else if n.Scheme != "" {
		s = n.Scheme + "://" + s
	}
	if n.Forced != "" {
		s = n.Forced + "/" + s
	}
	if n.Tag != "" {
		s += ":" + n.Tag
	}
	if n.Digest != "" {
		s += "@" + n.Digest
	}
	return s
}

// Format hides credentials for every verb.
func (n Name) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(n.String())) }

// portOK checks the port of HOST:PORT, if there is one.
func portOK(host string) bool {
	_, port, has := strings.Cut(host, ":")
	if !has {
		return true
	}
	n, err := strconv.Atoi(port)
	return err == nil && n > 0 && n < 1<<16
}

func plainChar(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-/:@", r)
}

// firstBad returns the first character of s that is not ok, in readable form.
func firstBad(s string, ok func(rune) bool) (string, bool) {
	for i, r := range s {
		switch {
		case ok(r):
		case r == ' ':
			return "a space", true
		case r == 0xFFFD && s[i] != 0xEF:
			return fmt.Sprintf("the byte 0x%02x", s[i]), true
		case r < ' ' || r == 0x7f || r > 0x7f && !strconv.IsPrint(r):
			return fmt.Sprintf("the character %U", r), true
		default:
			return fmt.Sprintf("the character %q", r), true
		}
	}
	return "", false
}

// show quotes a name for a message. It hides what may be credentials: all before an '@' that does not start a digest, and
// all after a '?'.
func show(name string) string {
	name, _, query := strings.Cut(name, "?")
	body, digest := name, ""
	if i := strings.LastIndexByte(name, '@'); i >= 0 && algorithmRE.MatchString(name[i+1:]) {
		body, digest = name[:i], name[i:]
	}
	hidden := ""
	if i := strings.LastIndexByte(body, '@'); i >= 0 {
		hidden, body = "…", body[i:]
	}
	s := body + digest
	if query {
		s += "?…"
	}
	if len(s) > 100 {
		s = s[:60] + "…"
	}
	return hidden + strconv.Quote(s)
}
