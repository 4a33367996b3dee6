package translate

import (
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

var storable = regexp.MustCompile(`^[A-Za-z0-9_\[][A-Za-z0-9._:/-]*(@sha256:[0-9a-f]{64})?$`)

// checkDecision checks what must hold for every name that is accepted.
func checkDecision(t *testing.T, name string, d Decision) {
	t.Helper()
	if d.Kind == Local {
		return
	}
	if len(d.Key) > maxKey || !storable.MatchString(d.Key) || strings.Contains(d.Key, "/../") || strings.Contains(d.Key, "//") || strings.HasSuffix(d.Key, "/") {
		t.Errorf("%q is called %q", name, d.Key)
	}
	if (d.URL == "") == (d.Ref == "") || len(d.Steps) == 0 {
		t.Errorf("%q is at URL %q and reference %q: %q", name, d.URL, d.Ref, d.Steps)
	}
	if d.URL != "" && !strings.HasPrefix(d.URL, "http://") && !strings.HasPrefix(d.URL, "https://") {
		t.Errorf("%q leads to %q", name, d.URL)
	}
}

func FuzzParse(f *testing.F) {
	hex := strings.Repeat("0", 64)
	for _, s := range []string{
		"", "alpine", "docker.io/library/alpine:3.23", "virtlet.cloud/example.com:1234/foo/bar:latest", "cocoon.cocoonstack.io/x",
		"https://user:pw@example.com:8443/a%20b.img?x=y@sha256:" + hex, "http://[::1]/x", "oci://quay.io/a@sha256:" + hex,
		"sha256:abcd", hex, "a@sha256:" + hex, "../x", "a/b\x00", "\xff", "A/b", "ftp://x", "https://e.com/%2e%2e/", "a:b/c",
		"https://e.com/.../-/._", "docker://a://b", "virtlet.cloud/virtlet.cloud/x",
	} {
		f.Add(s)
	}
	tr, err := New(Options{})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, name string) {
		d, err := tr.Translate(name)
		if err != nil {
			if !errdefs.IsInvalid(err) || !utf8.ValidString(err.Error()) || strings.ContainsFunc(err.Error(), func(r rune) bool { return r < ' ' }) {
				t.Errorf("%q: error %q of class %v", name, err, errdefs.ClassOf(err))
			}
			return
		}
		checkDecision(t, name, d)
		if d.Name.url != nil {
			return // without its credentials and its query, the printed form is another name
		}
		again, err := Parse(d.Name.String())
		if err != nil || again != d.Name {
			t.Errorf("%q prints as %q, which is %+v, %v", name, d.Name, again, err)
		}
	})
}

func FuzzMapping(f *testing.F) {
	for _, s := range []string{
		"", secretMapping, transportRules, imageRules, "prefix: a\ntranslations: [{name: b, url: c}]", "- a", "a: *b", "{a: {b: c}}",
		"translations: [{regexp: '(', url: x}, null, [], {name: a, regexp: '(.*)', url: '$1://$1@$1/$1?$1#$1', checksums: $1}]",
		"transports: {'': {tls: {certificates: [{cert: a}]}, timeout: 9223372036854775807, maxRedirects: 1e3}}", "a: 1\n---\nb: 2",
		"translations: [{regexp: '', fullMatch: true, url: 'oci://$0'}]", "x: &x [*x]",
	} {
		f.Add(s, "image1")
	}
	f.Add(imageRules, "virtlet.cloud/prod/image7:latest")
	f.Add("translations: [{regexp: '(.*)/(.*)', url: 'oci://$2/$1'}]", "a.b:1/c/d-_-e")
	f.Fuzz(func(t *testing.T, text, name string) {
		tr, err := New(Options{Regexps: true})
		if err != nil {
			t.Fatal(err)
		}
		problems := tr.Set("fuzz", []image.Mapping{{Name: "m", YAML: []byte(text)}})
		if len(problems) > maxProblems+1 {
			t.Errorf("%d problems", len(problems))
		}
		for _, p := range append(problems, tr.Warnings()...) {
			if p.Message == "" || strings.ContainsFunc(p.Rule+p.Message, func(r rune) bool { return r < ' ' || r == utf8.RuneError }) {
				t.Errorf("problem %+q", p)
			}
		}
		d, err := tr.Translate(name)
		if err == nil {
			checkDecision(t, name, d)
		} else if !errdefs.IsInvalid(err) && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%q: %v of class %v", name, err, errdefs.ClassOf(err))
		}
	})
}
