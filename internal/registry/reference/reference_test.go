package reference

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestPath(t *testing.T) {
	for path, want := range map[string]Route{
		"/v2": {Kind: Base}, "/v2/": {Kind: Base}, "/v2/token": {Kind: Token}, "/v2/_catalog": {Kind: Catalog},
		"/v2/a/b/manifests/v1":            {Manifest, "a/b", "v1"},
		"/v2/a/blobs/sha256:0":            {Blob, "a", "sha256:0"},
		"/v2/a/blobs/uploads":             {Uploads, "a", ""},
		"/v2/a/blobs/uploads/":            {Uploads, "a", ""},
		"/v2/a/blobs/uploads/id":          {Upload, "a", "id"},
		"/v2/a/tags/list":                 {Tags, "a", ""},
		"/v2/a/referrers/x":               {Referrers, "a", "x"},
		"/v2/blobs/uploads/manifests/v1":  {Manifest, "blobs/uploads", "v1"},
		"/v2/manifests/tags/list":         {Tags, "manifests", ""},
		"/v2/tags/list/manifests/latest":  {Manifest, "tags/list", "latest"},
		"/v2/a/manifests/b/blobs/uploads": {Uploads, "a/manifests/b", ""},
		"/dl/a/b":                         {Download, "a/b", ""},
		"/dl/":                            {}, "/": {}, "": {}, "/v2/a": {}, "/v2/manifests/x": {}, "/v2/a/manifests/": {}, "/v3/a/tags/list": {},
	} {
		if d := diff.Of(want, Path(path)); d != "" {
			t.Errorf("%s: %s", path, d)
		}
	}
}

func TestNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"a": true, "a/b-c/d_e/f__g/h.i": true, "0": true, "a---b": true, strings.Repeat("a", 255): true,
		"": false, "A": false, "/a": false, "a/": false, "a//b": false, "..": false, "a/..": false, "_a": false, "a_": false, "a___b": false,
		"a..b": false, "a\n": false, "a\x00": false, "é": false, strings.Repeat("a", 256): false,
	} {
		if (Name(name) == nil) != ok {
			t.Errorf("name %q: %v", name, Name(name))
		}
	}
	for tag, ok := range map[string]bool{
		"latest": true, "_": true, "A.b-c_9": true, strings.Repeat("t", 128): true,
		"": false, ".": false, "..": false, "-a": false, "a/b": false, "a:b": false, "a\n": false, strings.Repeat("t", 129): false,
	} {
		if (Tag(tag) == nil) != ok {
			t.Errorf("tag %q: %v", tag, Tag(tag))
		}
	}
	for d, ok := range map[string]bool{
		"sha256:" + strings.Repeat("0a", 32): true, "sha512:" + strings.Repeat("0a", 64): true,
		"sha256:" + strings.Repeat("0A", 32): false, "sha384:" + strings.Repeat("0a", 48): false, "sha256:0": false, "md5:00": false,
		"": false, "sha256:": false, "sha256:../../../../etc/passwd": false,
	} {
		if _, err := Digest(d); (err == nil) != ok {
			t.Errorf("digest %q: %v", d, err)
		}
	}
}

func TestContentRange(t *testing.T) {
	for text, want := range map[string][2]int64{"0-0": {0, 0}, "5-9": {5, 9}, "bytes 5-9/10": {5, 9}, "bytes 5-9/*": {5, 9}} {
		if a, b, err := ContentRange(text); err != nil || a != want[0] || b != want[1] {
			t.Errorf("%q: %d-%d, %v", text, a, b, err)
		}
	}
	for _, bad := range []string{"", "-", "1-", "-1", "2-1", "+1-2", "1_0-20", "a-b", "0-9223372036854775807", "0-9223372036854775808", " 0-1", "0-1-2"} {
		if _, _, err := ContentRange(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func FuzzPath(f *testing.F) {
	f.Add("/v2/a/b/manifests/v1")
	f.Add("/v2/a/blobs/uploads/x")
	f.Add("/v2//../tags/list")
	f.Fuzz(func(t *testing.T, path string) {
		r := Path(path)
		if r.Name != "" && Name(r.Name) == nil && (strings.Contains(r.Name, "..") || strings.HasPrefix(r.Name, "/") || strings.Contains(r.Name, "/_")) {
			t.Fatalf("%q gives the name %q", path, r.Name)
		}
		if ref, err := Parse(r.Rest); err == nil && (strings.ContainsAny(ref.String(), "/\\\x00\n") || strings.HasPrefix(ref.String(), ".")) {
			t.Fatalf("%q gives the reference %q", path, ref)
		}
	})
}

func FuzzContentRange(f *testing.F) {
	f.Add("0-9")
	f.Add("bytes 1-2/3")
	f.Fuzz(func(t *testing.T, text string) {
		if a, b, err := ContentRange(text); err == nil && (a < 0 || b < a || b-a+1 <= 0) {
			t.Fatalf("%q is %d-%d", text, a, b)
		}
	})
}
