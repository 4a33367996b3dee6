package local

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociname"
)

// maxKey is the maximum length of a key, so that it is still a legal file name when escaped and with a suffix.
const maxKey = 240

var keyPartRE = regexp.MustCompile(`^[A-Za-z0-9._~+=,:-]+$`)

// CheckKey checks whether key can name an image here. Keys allow more than the names of Import: the tag is optional, a
// digest (repo@sha256:<hex>) is possible, and so are the characters of web addresses. A percent sign is not allowed,
// because it stands for a slash in the name of a link.
// Errors: InvalidArgument that says what is wrong.
func CheckKey(key string) error {
	repo, digest, has := strings.Cut(key, "@")
	switch {
	case key == "":
		return errdefs.Invalidf("an image needs a name")
	case len(key) > maxKey:
		return errdefs.Invalidf("the image name %.40q… has %d characters; at most %d are allowed", key, len(key), maxKey)
	case has && !ociname.IsSHA256(digest):
		return badDigest(key, digest)
	}
	for i, p := range strings.Split(repo, "/") {
		if !keyPartRE.MatchString(p) || p == "." || p == ".." || i == 0 && strings.ContainsRune(".-:", rune(p[0])) {
			return errdefs.Invalidf("the image name %q has the invalid part %q; use letters, digits and ._~+=,:-, not . or .. alone, and no . or - at the start", key, p)
		}
	}
	return nil
}

func badDigest(ref, digest string) error {
	return errdefs.Invalidf("the image name %q has the unsupported digest %q; use sha256: and 64 lower-case hexadecimal digits", ref, digest)
}

// wanted is a parsed reference by name.
type wanted struct {
	ref    string
	repos  []string // possible spellings of the same repository, the most likely first
	tag    string   // "" when none was given
	digest string   // sha256:<hex>; "" when not required
}

// vmPrefixes only mark VM images. The store does not keep them.
var vmPrefixes = []string{"virtlet.cloud/", "cocoon.cocoonstack.io/"}

// hubPrefixes all mean the default registry.
var hubPrefixes = []string{"docker.io/", "index.docker.io/", "registry-1.docker.io/"}

func parseRef(ref string) (wanted, error) {
	w := wanted{ref: ref}
	base, digest, has := strings.Cut(ref, "@")
	if has {
		if !ociname.IsSHA256(digest) {
			return wanted{}, badDigest(ref, digest)
		}
		w.digest = digest
	}
	if err := CheckKey(base); err != nil {
		return wanted{}, err
	}
	var repo string
	repo, w.tag = ociname.SplitTag(base)
	for _, r := range []string{repo, shortRepo(repo)} {
		if !slices.Contains(w.repos, r) {
			w.repos = append(w.repos, r)
		}
	}
	return w, nil
}

// shortRepo is a repository in the form of the store's keys: docker.io/library/x, library/x and virtlet.cloud/x are x.
func shortRepo(repo string) string {
	for _, p := range slices.Concat(vmPrefixes, hubPrefixes) {
		if rest, ok := strings.CutPrefix(repo, p); ok && rest != "" {
			repo = rest
			break
		}
	}
	if rest, ok := strings.CutPrefix(repo, "library/"); ok && rest != "" && !strings.Contains(rest, "/") {
		return rest
	}
	return repo
}

// keys returns the links that a reference without a digest may mean; the first that exists is used. Images of web
// addresses have keys without a tag and match any tag.
func (w wanted) keys() (out []string) {
	tag := cmp.Or(w.tag, DefaultTag)
	for _, r := range w.repos {
		out = append(out, r+":"+tag)
	}
	return append(out, w.repos...)
}

// repository reports whether key belongs to the wanted repository and, if a tag is given, to that tag.
func (w wanted) repository(key string) bool {
	base, _, pinned := strings.Cut(key, "@")
	repo, tag := ociname.SplitTag(base)
	return slices.Contains(w.repos, repo) && (w.tag == "" || tag == "" || tag == w.tag) && !pinned
}
