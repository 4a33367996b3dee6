package local

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociname"
)

// DefaultTag is the tag of a name without one.
const DefaultTag = "latest"

// maxName is the maximum length of a name, so that it is still a legal file name when escaped and with a suffix.
const maxName = 200

var (
	hostRE      = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?$`)
	hexRE       = regexp.MustCompile(`^[0-9a-f]{64}$`)
	hexPrefixRE = regexp.MustCompile(`^[0-9a-f]{4,64}$`)
)

func isHex(s string) bool       { return hexRE.MatchString(s) }
func isHexPrefix(s string) bool { return hexPrefixRE.MatchString(s) }
func digest(hex string) string  { return "sha256:" + hex }

// ParseName checks a local image name and adds the default tag if it has none. A name consists of components of lower-case
// letters, digits and single separators, joined by slashes. The first may be a host with a port, and a tag may follow a
// colon.
// Errors: InvalidArgument that says which part is wrong.
func ParseName(name string) (string, error) {
	switch {
	case name == "":
		return "", errdefs.Invalidf("an image needs a name")
	case len(name) > maxName:
		return "", errdefs.Invalidf("the image name %.40q… has %d characters; at most %d are allowed", name, len(name), maxName)
	case strings.Contains(name, "@"):
		return "", errdefs.Invalidf("the image name %q holds a digest; give either a name or the id alone", name)
	}
	repo, tag := name, DefaultTag
	if i := strings.LastIndexByte(name, ':'); i > strings.LastIndexByte(name, '/') {
		repo, tag = name[:i], name[i+1:]
	}
	if !ociname.IsTag(tag) {
		return "", errdefs.Invalidf("the image name %q has the invalid tag %q; use at most 128 letters, digits, '_', '.' and '-'", name, tag)
	}
	parts := strings.Split(repo, "/")
	for i, p := range parts {
		host := i == 0 && len(parts) > 1 && hostRE.MatchString(p)
		if !host && !ociname.IsComponent(p) {
			return "", errdefs.Invalidf("the image name %q has the invalid part %q; use lower-case letters and digits, with '.', '_' or '-' between them", name, p)
		}
	}
	if full := repo + ":" + tag; len(full) <= maxName {
		return full, nil
	}
	return "", errdefs.Invalidf("the image name %.40q… is too long with its tag; at most %d characters are allowed", name, maxName)
}

// named is one name and the content it refers to.
type named struct{ name, hex string }

// escape turns a key into a file name.
func escape(key string) string { return strings.ReplaceAll(key, "/", "%") }

func (s *Store) namePath(name string) string { return s.path("links", escape(name)) }

const linkPrefix = "../data/"

// readName returns the content a name refers to. A link to missing content is not a name.
func (s *Store) readName(name string) (string, error) {
	target, err := os.Readlink(s.namePath(name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", notFound(name)
	}
	if err != nil {
		return "", fmt.Errorf("read image name %s: %w", name, err)
	}
	hex, ok := strings.CutPrefix(target, linkPrefix)
	if !ok || !isHex(hex) {
		return "", errdefs.DataLossf("the image name %s points at %q, which is not an image of this store; remove %s", name, target, s.namePath(name))
	}
	if _, err := os.Stat(s.namePath(name)); err != nil {
		return "", notFound(name)
	}
	return hex, nil
}

// names returns every name that refers to content, sorted. Entries that are not our links are left alone and logged once.
func (s *Store) names() ([]named, error) {
	entries, err := os.ReadDir(s.path("links"))
	if err != nil {
		return nil, fmt.Errorf("list image names: %w", err)
	}
	var out []named
	for _, e := range entries {
		name := strings.ReplaceAll(e.Name(), "%", "/")
		if CheckKey(name) != nil || e.Type() != fs.ModeSymlink {
			s.strange("links", e.Name(), "it is not the link of an image name")
			continue
		}
		hex, err := s.readName(name)
		switch {
		case err == nil:
			out = append(out, named{name, hex})
		case errdefs.IsNotFound(err):
			if _, gone := os.Lstat(s.namePath(name)); gone == nil {
				s.strange("links", e.Name(), "its content is missing")
			}
		default:
			s.strange("links", e.Name(), "it points outside of the store")
		}
	}
	slices.SortFunc(out, func(a, b named) int { return cmp.Compare(a.name, b.name) })
	return out, nil
}

// strange logs an unknown entry of the store's folder once. The entry is left alone.
func (s *Store) strange(dir, name, why string) {
	path := s.path(dir, name)
	if _, known := s.seen.LoadOrStore(path, true); !known {
		s.cfg.Log.Warn("unknown entry in the image store ignored", "path", path, "err", why)
	}
}

// setName makes name point at content and replaces its old target. tmp is the caller's temporary folder.
// Preconditions: the exclusive lock is held.
func (s *Store) setName(tmp, name, hex string) error {
	link := filepath.Join(tmp, "name")
	if err := os.Symlink(linkPrefix+hex, link); err != nil {
		return fmt.Errorf("name image %s: %w", name, full(err))
	}
	if err := os.Rename(link, s.namePath(name)); err != nil {
		return fmt.Errorf("name image %s: %w", name, full(err))
	}
	return s.syncNames()
}

func (s *Store) syncNames() error { return atomicfile.SyncDir(s.path("links")) }
