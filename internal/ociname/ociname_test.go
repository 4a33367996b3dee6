package ociname

import (
	"strings"
	"testing"
)

func TestGrammar(t *testing.T) {
	hex := strings.Repeat("0af", 22)[:64]
	for _, tt := range []struct {
		what string
		is   func(string) bool
		yes  []string
		no   []string
	}{
		{"component", IsComponent, []string{"a", "0", "a.b", "a_b", "a__b", "a---b"}, []string{"", "A", ".a", "a.", "a..b", "a___b", "a/b", "a._b", "a b", "ä"}},
		{"repository", IsRepository, []string{"a", "a/b", "ns/vk-a", strings.Repeat("a", 255)}, []string{"", "/a", "a/", "a//b", "a/B", strings.Repeat("a", 256)}},
		{"tag", IsTag, []string{"latest", "1.0", "_x", "A-b", strings.Repeat("t", 128)}, []string{"", ".x", "-x", "a:b", "a/b", strings.Repeat("t", 129)}},
		{"sha256", IsSHA256, []string{"sha256:" + hex}, []string{"", hex, "sha256:" + hex[1:], "sha256:" + strings.ToUpper(hex), "sha512:" + hex + hex}},
		{"digest", IsDigest, []string{"sha256:" + hex, "sha512:" + hex + hex}, []string{"sha384:" + hex, "sha512:" + hex, "sha256:" + hex + "\n"}},
	} {
		for _, s := range tt.yes {
			if !tt.is(s) {
				t.Errorf("%q is no %s", s, tt.what)
			}
		}
		for _, s := range tt.no {
			if tt.is(s) {
				t.Errorf("%q is a %s", s, tt.what)
			}
		}
	}
}
