// Package ociname is the grammar of names in image references, registries and repositories, as the distribution
// specification defines it (https://github.com/opencontainers/distribution-spec, "Pulling manifests"). It only checks
// parts and splits off tags; which parts a reference has, and what they mean, is the affair of its callers.
package ociname

import (
	"regexp"
	"strings"
)

// MaxRepository is the length of the longest repository name, in bytes.
const MaxRepository = 255

// MaxTag is the length of the longest tag.
const MaxTag = 128

var (
	component = regexp.MustCompile(`^[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*$`)
	tag       = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)
	sha256    = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	sha512    = regexp.MustCompile(`^sha512:[0-9a-f]{128}$`)
)

// IsComponent reports whether s is one part of a repository name: lower-case letters and digits, with single '.', '_' or
// '__', or any number of '-', between them.
func IsComponent(s string) bool { return component.MatchString(s) }

// IsRepository reports whether s is a repository name: components joined by '/', at most MaxRepository bytes.
func IsRepository(s string) bool {
	if len(s) > MaxRepository {
		return false
	}
	for part := range strings.SplitSeq(s, "/") {
		if !IsComponent(part) {
			return false
		}
	}
	return true
}

// IsTag reports whether s is a tag: at most MaxTag letters, digits, '_', '.' and '-', the first neither '.' nor '-'.
func IsTag(s string) bool { return tag.MatchString(s) }

// IsSHA256 reports whether s is a sha256 digest: "sha256:" and 64 lower-case hex digits.
func IsSHA256(s string) bool { return sha256.MatchString(s) }

// IsDigest reports whether s is a digest of an algorithm that the specification registers: sha256 or sha512.
func IsDigest(s string) bool { return IsSHA256(s) || sha512.MatchString(s) }

// SplitTag splits the tag off a name; "" if it has none. A colon before a port has a slash after it, the colon before a tag
// has none.
func SplitTag(name string) (repository, tag string) {
	if i := strings.LastIndexByte(name, ':'); i > strings.LastIndexByte(name, '/') {
		return name[:i], name[i+1:]
	}
	return name, ""
}
