package local_test

import (
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/local"
)

func TestParseName(t *testing.T) {
	for name, want := range map[string]string{
		"app":                             "app:latest",
		"app:v1.2_3-x":                    "app:v1.2_3-x",
		"cocoon/demo:latest":              "cocoon/demo:latest",
		"docker.io/library/x:1":           "docker.io/library/x:1",
		"localhost:5000/team/app":         "localhost:5000/team/app:latest",
		"example.com:1234/foo/bar:T":      "example.com:1234/foo/bar:T",
		"a__b/c--d/e.f":                   "a__b/c--d/e.f:latest",
		"ubuntu/16.04":                    "ubuntu/16.04:latest",
		"deadbeef":                        "deadbeef:latest",
		strings.Repeat("a", 193):          strings.Repeat("a", 193) + ":latest",
		"":                                "",
		" app":                            "",
		"App":                             "",
		"/app":                            "",
		"app/":                            "",
		"a//b":                            "",
		".":                               "",
		"..":                              "",
		"../../etc/passwd":                "",
		"a/../b":                          "",
		".hidden":                         "",
		"a..b":                            "",
		"-app":                            "",
		"app-":                            "",
		"a_.b":                            "",
		"a%2fb":                           "",
		"a\x00b":                          "",
		"a\nb":                            "",
		"app:":                            "",
		"app:-x":                          "",
		"app:a/b":                         "",
		"a:1:2":                           "",
		"a:5000/b":                        "a:5000/b:latest",
		"a:123456/b":                      "",
		"app@sha256:abc":                  "",
		"http://x/y":                      "",
		"ünïcode":                         "",
		strings.Repeat("a", 201):          "",
		"app:" + strings.Repeat("t", 129): "",
	} {
		got, err := local.ParseName(name)
		if got != want || (err == nil) != (want != "") || err != nil && !errdefs.IsInvalid(err) {
			t.Errorf("%q: got %q, %v; want %q", name, got, err, want)
		}
	}
}

// FuzzParseName: an accepted name is one safe file name when escaped, and parses to itself.
func FuzzParseName(f *testing.F) {
	for _, s := range []string{"cocoon/demo:latest", "localhost:5000/x", "../x", "a%b", "a@sha256:0", "a\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		name, err := local.ParseName(s)
		if err != nil {
			if !errdefs.IsInvalid(err) {
				t.Errorf("%q: %v", s, err)
			}
			return
		}
		if again, err := local.ParseName(name); err != nil || again != name {
			t.Errorf("%q became %q, which becomes %q, %v", s, name, again, err)
		}
		file := strings.ReplaceAll(name, "/", "%")
		if !filepath.IsLocal(file) || filepath.Base(file) != file || len(file) > 255 || strings.Contains(name, "%") || strings.ReplaceAll(file, "%", "/") != name {
			t.Errorf("%q is no safe file name", file)
		}
	})
}
