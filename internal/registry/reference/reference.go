// Package reference parses client input in registry requests: names, tags, digests, routes and ranges.
//
// All of it is untrusted until parsed. The package is pure and decides nothing about rights or existence.
package reference

import (
	"cmp"
	_ "crypto/sha256" // a digest algorithm is usable only if it is linked in
	_ "crypto/sha512"
	"strconv"
	"strings"

	"github.com/opencontainers/go-digest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociname"
)

// Name validates the name of a repository.
func Name(s string) error {
	if !ociname.IsRepository(s) {
		return errdefs.Invalidf("%s is not a repository name: use parts of a-z, 0-9, '.', '_' and '-', joined by '/', at most %d bytes", quote(s), ociname.MaxRepository)
	}
	return nil
}

// Tag validates a tag.
func Tag(s string) error {
	if !ociname.IsTag(s) {
		return errdefs.Invalidf("%s is not a tag: use letters, digits, '_', '.' and '-', at most %d, the first neither '.' nor '-'", quote(s), ociname.MaxTag)
	}
	return nil
}

// Digest validates a digest: sha256 or sha512 with lower-case hex digits.
func Digest(s string) (digest.Digest, error) {
	d, err := digest.Parse(s)
	if err != nil || d.Algorithm() != digest.SHA256 && d.Algorithm() != digest.SHA512 {
		return "", errdefs.Invalidf("%s is not a digest: use sha256: or sha512: and lower-case hex digits", quote(s))
	}
	return d, nil
}

// Reference is a tag, or a digest if Digest is not empty.
type Reference struct {
	Tag    string
	Digest digest.Digest
}

// Parse reads a tag or digest. Text with a colon is a digest.
func Parse(s string) (Reference, error) {
	if strings.Contains(s, ":") {
		d, err := Digest(s)
		return Reference{Digest: d}, err
	}
	return Reference{Tag: s}, Tag(s)
}

// String returns the reference as it was written.
func (r Reference) String() string { return cmp.Or(r.Digest.String(), r.Tag) }

// quote quotes a client's text for an error, and shortens long text.
func quote(s string) string {
	const most = 80
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strconv.QuoteToASCII(s)
}

// Kind is the resource that a path names.
type Kind int

// The resources of a registry. None: the path names no resource.
const (
	None      Kind = iota
	Base           // /v2/
	Token          // /v2/token
	Catalog        // /v2/_catalog
	Manifest       // /v2/NAME/manifests/REFERENCE
	Blob           // /v2/NAME/blobs/DIGEST
	Uploads        // /v2/NAME/blobs/uploads/
	Upload         // /v2/NAME/blobs/uploads/ID
	Tags           // /v2/NAME/tags/list
	Referrers      // /v2/NAME/referrers/DIGEST
	Download       // /dl/NAME
)

var kindNames = [...]string{"none", "base", "token", "catalog", "manifest", "blob", "uploads", "upload", "tags", "referrers", "download"}

// String returns the name of the resource for logs and metrics.
func (k Kind) String() string { return kindNames[k] }

// Route is a parsed path. Name and Rest are not validated yet.
type Route struct {
	Kind Kind
	Name string
	Rest string // reference, digest or upload id
}

// Path parses a URL's decoded path. Names may contain slashes and words such as "blobs", so it parses from the end.
func Path(p string) Route {
	if name, ok := strings.CutPrefix(p, "/dl/"); ok && name != "" {
		return Route{Kind: Download, Name: name}
	}
	switch p {
	case "/v2", "/v2/":
		return Route{Kind: Base}
	case "/v2/token":
		return Route{Kind: Token}
	case "/v2/_catalog":
		return Route{Kind: Catalog}
	}
	p, ok := strings.CutPrefix(p, "/v2/")
	if !ok {
		return Route{}
	}
	if name, ok := strings.CutSuffix(p, "/tags/list"); ok && name != "" {
		return Route{Kind: Tags, Name: name}
	}
	for _, end := range []string{"/blobs/uploads", "/blobs/uploads/"} {
		if name, ok := strings.CutSuffix(p, end); ok && name != "" {
			return Route{Kind: Uploads, Name: name}
		}
	}
	i := strings.LastIndexByte(p, '/')
	if i < 0 || i == len(p)-1 {
		return Route{}
	}
	head, rest := p[:i], p[i+1:]
	for _, r := range []struct {
		end  string
		kind Kind
	}{{"/blobs/uploads", Upload}, {"/manifests", Manifest}, {"/blobs", Blob}, {"/referrers", Referrers}} {
		if name, ok := strings.CutSuffix(head, r.end); ok && name != "" {
			return Route{Kind: r.kind, Name: name, Rest: rest}
		}
	}
	return Route{}
}

// ContentRange reads the Content-Range of an upload's chunk: "START-END", both inclusive, as in the distribution
// specification; it also accepts the "bytes " and "/SIZE" of RFC 9110.
func ContentRange(s string) (start, end int64, err error) {
	bad := errdefs.Invalidf("content range %s is not START-END", quote(s))
	text := strings.TrimPrefix(s, "bytes ")
	text, _, _ = strings.Cut(text, "/")
	a, b, ok := strings.Cut(text, "-")
	if !ok {
		return 0, 0, bad
	}
	if start, err = number(a); err != nil {
		return 0, 0, bad
	}
	if end, err = number(b); err != nil || end < start || end == 1<<63-1 {
		return 0, 0, bad
	}
	return start, end, nil
}

// number parses a decimal number without sign or underscores.
func number(s string) (int64, error) {
	n, err := strconv.ParseUint(s, 10, 63) // ParseInt accepts a sign
	return int64(n), err
}
