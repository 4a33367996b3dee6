package ociclient_test

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

var digest = "sha256:" + strings.Repeat("0a", 32)

func TestParseRef(t *testing.T) {
	for in, want := range map[string]string{
		"registry.example/web":                    "https://registry.example/web:latest",
		"registry.example:5000/a/b_c/d.e:v1.2-x":  "https://registry.example:5000/a/b_c/d.e:v1.2-x",
		"http://epoch.cocoon-system.svc:8080/x:y": "http://epoch.cocoon-system.svc:8080/x:y",
		"HTTPS://Registry.example/x":              "https://Registry.example/x:latest",
		"localhost/x":                             "http://localhost/x:latest",
		"localhost:5000/x":                        "http://localhost:5000/x:latest",
		"127.0.0.1:5000/x":                        "http://127.0.0.1:5000/x:latest",
		"127.9.9.9/x":                             "http://127.9.9.9/x:latest",
		"[::1]:5000/x":                            "http://[::1]:5000/x:latest",
		"[fd00::1]/x":                             "https://[fd00::1]/x:latest",
		"https://127.0.0.1:5000/x":                "https://127.0.0.1:5000/x:latest",
		"registry.example/x@" + digest:            "https://registry.example/x@" + digest,
		"registry.example/x:v1@" + digest:         "https://registry.example/x@" + digest,
		"registry.example/a--b__c/0:A_.-":         "https://registry.example/a--b__c/0:A_.-",
	} {
		got, err := ociclient.ParseRef(in)
		if err != nil || got.String() != want {
			t.Errorf("%s is %s, %v; want %s", in, got, err, want)
		}
	}
}

func TestParseRefNamesWhatIsWrong(t *testing.T) {
	for in, part := range map[string]string{
		"":                                "no registry",
		"web":                             "no registry",
		"registry.example/":               "no repository",
		"/web":                            "no registry",
		"ftp://registry.example/web":      "scheme",
		"://registry.example/web":         "scheme",
		"registry.example:0/web":          "port",
		"registry.example:70000/web":      "port",
		"registry.example:x/web":          "port",
		"regis try/web":                   "host",
		"a:b:c/web":                       "host",
		"-x/web":                          "host",
		"[::1/web":                        "host",
		"[1.2.3.4]/web":                   "IPv6",
		"user:secret@registry.example/x":  "user or password",
		"https://token@registry.example/": "user or password",
		"registry.example/Web":            "part \"Web\"",
		"registry.example/a//b":           "part \"\"",
		"registry.example/a/../b":         "part \"..\"",
		"registry.example/a_-b":           "part \"a_-b\"",
		"registry.example/web:":           "tag",
		"registry.example/web:.x":         "tag",
		"registry.example/web:a/b":        "tag",
		"registry.example/web:" + strings.Repeat("x", 129):    "tag",
		"registry.example/web@sha256:12":                      "digest",
		"registry.example/web@md5:" + strings.Repeat("0", 32): "digest",
		"registry.example/web@" + strings.ToUpper(digest):     "digest",
		"registry.example/" + strings.Repeat("a", 256):        "repository",
		"registry.example/" + strings.Repeat("a", 2000):       "2017 bytes",
		"registry.example/web?x=y":                            "part",
		"registry.example/web#x":                              "part",
		"registry.example/web\n":                              "part",
		strings.Repeat("a.", 127) + "example/web":             "host",
	} {
		_, err := ociclient.ParseRef(in)
		if !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), part) {
			t.Errorf("%s: %v, which does not speak of %q", in, err, part)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("the password is in the error: %v", err)
		}
	}
}

func FuzzParseRef(f *testing.F) {
	for _, s := range []string{"registry.example:5000/a/b:c", "http://[::1]:1/x@" + digest, "a@b/c", "localhost/x:y@z", "://", "[]/x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ociclient.ParseRef(s)
		if err != nil {
			if !errdefs.IsInvalid(err) {
				t.Fatalf("%q: %v", s, err)
			}
			return
		}
		again, err := ociclient.ParseRef(r.String())
		if err != nil || again != r {
			t.Fatalf("%q, read twice: %v, %s", s, err, diff.Of(r, again))
		}
		if strings.ContainsAny(r.Host+r.Repository, "?#@\\ \n\t%") || strings.Contains(r.Repository, "..") || (r.Tag == "") == (r.Digest == "") {
			t.Fatalf("%q is %+v", s, r)
		}
	})
}
