package translate

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

func newTranslator(t testing.TB, o Options) *Translator {
	t.Helper()
	tr, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// with returns a translator of one or more pushed mappings, called a, b, ….
func with(t testing.TB, o Options, texts ...string) *Translator {
	t.Helper()
	tr := newTranslator(t, o)
	var ms []image.Mapping
	for i, text := range texts {
		ms = append(ms, image.Mapping{Name: string(rune('a' + i)), YAML: []byte(text)})
	}
	tr.Set("objects", ms)
	return tr
}

func translate(t testing.TB, tr *Translator, name string) Decision {
	t.Helper()
	d, err := tr.Translate(name)
	if err != nil {
		t.Fatalf("Translate(%q): %v", name, err)
	}
	return d
}

// TestTable runs testdata/*.yaml: mappings, and names with their expected results. Add a case there, not here.
func TestTable(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no tables", err)
	}
	for _, path := range files {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".yaml"), func(t *testing.T) {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			var table struct {
				Protocol string            `json:"protocol"`
				Regexps  bool              `json:"regexps"`
				Mappings map[string]string `json:"mappings"`
				Files    map[string]string `json:"files"`
				Problems []string          `json:"problems"`
				Names    []struct {
					Name, Kind, Key, URL, Digest, SHA256, Checksums, Source, Rule, Transport, Error string
				} `json:"names"`
			}
			if err := yaml.UnmarshalStrict(text, &table); err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			for name, text := range table.Files {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			tr := newTranslator(t, Options{Dir: dir, Protocol: table.Protocol, Regexps: table.Regexps})
			var pushed []image.Mapping
			for name, text := range table.Mappings {
				pushed = append(pushed, image.Mapping{Name: name, YAML: []byte(text)})
			}
			tr.Set("kubernetes", pushed)
			var problems []string
			for _, p := range tr.Problems() {
				problems = append(problems, fmt.Sprintf("%s/%s, %s: %s", p.Source, p.Mapping, p.Rule, p.Message))
			}
			if !reflect.DeepEqual(problems, table.Problems) {
				t.Errorf("problems:\n  %s\nwant:\n  %s", strings.Join(problems, "\n  "), strings.Join(table.Problems, "\n  "))
			}
			for _, c := range table.Names {
				d, err := tr.Translate(c.Name)
				if c.Error != "" {
					if err == nil || !strings.Contains(err.Error(), c.Error) {
						t.Errorf("%s: error %v, want one with %q", c.Name, err, c.Error)
					}
					continue
				}
				if err != nil {
					t.Errorf("%s: %v", c.Name, err)
					continue
				}
				want := []string{c.Kind, c.Key, c.URL, c.Digest, c.SHA256, c.Checksums, c.Source, c.Rule}
				got := []string{string(d.Kind), d.Key, d.URL, d.Digest, d.SHA256, d.Checksums, d.Source, d.Rule}
				if d.Ref != "" {
					got[2] = "oci://" + d.Ref
				}
				if !reflect.DeepEqual(got, want) {
					t.Errorf("%s:\n  is   %q\n  want %q\n  %s", c.Name, got, want, strings.Join(d.Steps, "\n  "))
				}
				if c.Transport != "" && d.Transport.String() != c.Transport {
					t.Errorf("%s: transport %q, want %q", c.Name, d.Transport, c.Transport)
				}
			}
		})
	}
}

func TestHostileNamesAreRefused(t *testing.T) {
	hex := strings.Repeat("a", 64)
	for name, want := range map[string]string{
		"":                                     "needs a name",
		"virtlet.cloud/":                       "which image",
		"foo bar":                              "a space",
		"foo\nbar":                             "U+000A",
		"foo\x00":                              "U+0000",
		"foo\x7f":                              "U+007F",
		"foo\xff":                              "0xff",
		"föö":                                  "'ö'",
		"foo\u202ebar":                         "U+202E",
		`foo\bar`:                              `'\\'`,
		"foo%2fbar":                            "'%'",
		"foo?x=1":                              "'?'",
		"foo#x":                                "'#'",
		"foo*":                                 "'*'",
		"../etc/passwd":                        `".."`,
		"foo/../bar":                           `".."`,
		"foo/./bar":                            `"."`,
		"/etc/passwd":                          "empty part",
		"foo//bar":                             "empty part",
		"foo/":                                 "empty part",
		":tag":                                 "empty part",
		"foo:":                                 `tag ""`,
		"foo:-x":                               `tag "-x"`,
		"foo:" + strings.Repeat("t", 129):      "tag",
		"-foo":                                 `'-'`,
		"foo/-bar":                             `'-'`,
		".foo":                                 `'.'`,
		"foo/bar:1/baz":                        "':'",
		"example.com:99999/foo":                "':'",
		"example.com:0/foo":                    "':'",
		"a:b:c/d":                              "':'",
		strings.Repeat("a", 256):               "at most 255",
		"Foo":                                  "upper-case",
		"foo/b__-a":                            "registries do not allow",
		"foo@sha256:abc":                       "64 lower-case",
		"foo@sha256:" + strings.ToUpper(hex):   "64 lower-case",
		"foo@sha512:" + hex + hex:              `"sha512"`,
		"foo@md5:" + hex[:32]:                  `"md5"`,
		"foo@bar":                              "without a digest",
		"foo@sha256:" + hex + "@sha256:" + hex: "without a digest",
		"foo@":                                 "without a digest",
		"sha256:xyz":                           "not an id",
		"sha256:abc":                           "not an id",
		"sha256:" + hex + "a":                  "not an id",
		"ftp://example.com/x.img":              `"ftp"`,
		"file:///etc/passwd":                   `"file"`,
		"http://":                              "no host",
		"https:///x.img":                       "no host",
		"https://exa mple.com/x":               "a space",
		"https://example.com/../x":             `".."`,
		"https://example.com/a/%2e%2e/x":       `".."`,
		"https://example.com/%00":              "U+0000",
		"https://example.com/a%5cb":            `'\\'`,
		"https://example.com/%zz":              "'%'",
		"https://example.com:99999/x":          "host or port",
		"https://-x/x":                         "host or port",
		"https://example.com/x#y":              "'#'",
		"https://example.com/x@sha256:12":      "64 lower-case",
		"https://example.com/x@sha1:12":        `"sha1"`,
		"https://e.com/" + strings.Repeat("a", 2048): "at most 2048",
		"virtlet.cloud/oci://foo":                    "remove one",
		"oci://https://foo":                          "two schemes",
		"oci://Foo":                                  "upper-case",
		"oci://":                                     "empty part",
		"oci://a/../b":                               `".."`,
	} {
		d, err := newTranslator(t, Options{}).Translate(name)
		switch {
		case err == nil:
			t.Errorf("%.60q is taken: %v", name, d)
		case !errdefs.IsInvalid(err):
			t.Errorf("%.60q: class of %v", name, err)
		case !strings.Contains(err.Error(), want):
			t.Errorf("%.60q: %v; want it to say %q", name, err, want)
		case strings.ContainsAny(err.Error(), "\n\x00\x7f"):
			t.Errorf("%.60q: the error has control characters: %q", name, err)
		}
	}
}

const secret = "hunter2"

// secretMapping has a secret in every place where one is possible.
const secretMapping = `
translations:
- name: plain
  url: https://user:hunter2@example.com/x.img?token=hunter2
  checksums: https://user:hunter2@example.com/SUMS?token=hunter2
  transport: full
- name: bad-url
  url: "https://user:hunter2@exa mple.com/x.img"
- name: worse-url
  url: https://user:hunter2@hunter2@example.com:hunter2/x
- name: worst-url
  url: hunter2://example.com
- name: bad-transport
  url: https://example.com/x.img
  transport: bad-proxy
- name: bad-sum
  url: https://example.com/x.img
  sha256: hunter2
- regexp: 'r/(.*)'
  url: https://user:hunter2@$1/x.img?token=hunter2
transports:
  full:
    proxy: http://user:hunter2@proxy:3128/?hunter2
    tls: {certificates: [{cert: hunter2, key: hunter2}]}
  bad-proxy:
    proxy: "hunter2"
  bad-key:
    tls: {certificates: [{cert: hunter2, key: [hunter2]}]}
  bad-timeout:
    timeout: hunter2
`

func TestSecretsStayInTheirFields(t *testing.T) {
	var log bytes.Buffer
	logger := slog.New(slog.NewJSONHandler(&log, nil))
	tr := with(t, Options{Regexps: true, Log: logger}, secretMapping,
		"translations:\n- name: x\n  url: *hunter2\n", "a: &x hunter2\n*hunter2 : b\n", "{a: hunter2}: hunter2\n", "hunter2", "- hunter2")
	var said []string
	for _, p := range append(tr.Problems(), tr.Warnings()...) {
		said = append(said, fmt.Sprintf("%+v", p))
	}
	if len(tr.Problems()) < 12 {
		t.Errorf("only %d problems: %v", len(tr.Problems()), said)
	}
	for _, name := range []string{
		"plain", "bad-url", "worse-url", "worst-url", "bad-transport", "bad-sum", "r/example.com", "r/a_b-", "virtlet.cloud/plain",
		"https://user:hunter2@example.com/x.img?token=hunter2", "https://user:hunter2@exa mple.com/x.img", "user:hunter2@example.com/x.img",
		"oci://user:hunter2@example.com:5000/x", "oci://user:hunter2@example.com:5000", "user:hunter2@sha.example.com:80", "virtlet.cloud/user:hunter2@x",
		"https://example.com/x.img?hunter2#y", "https://user:hunter2@example.com/x@sha1:12", "ftp://user:hunter2@example.com/x",
		"https://u:hunter2@e.com/" + strings.Repeat("a", 3000), "u:hunter2@e.com/" + strings.Repeat("a", 3000),
	} {
		d, err := tr.Translate(name)
		said = append(said, fmt.Sprint(err), strings.Join(d.Steps, "\n"), d.Printable, d.Key)
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
			said = append(said, fmt.Sprintf(verb, d), fmt.Sprintf(verb, &d), fmt.Sprintf(verb, d.Name), fmt.Sprintf(verb, d.Transport), fmt.Sprintf(verb, []any{d}))
			if d.Transport != nil {
				said = append(said, fmt.Sprintf(verb, *d.Transport), fmt.Sprintf(verb, d.Transport.TLS), fmt.Sprintf(verb, *d.Transport.TLS), fmt.Sprintf(verb, d.Transport.TLS.Certificates))
			}
		}
		logger.Info("x", "decision", d, "name", d.Name, "transport", d.Transport)
	}
	said = append(said, log.String())
	for _, s := range said {
		if strings.Contains(s, secret) || strings.Contains(s, fmt.Sprintf("%x", secret)) {
			t.Errorf("a secret is told: %.300s", s)
		}
	}
	if d := translate(t, tr, "plain"); !strings.Contains(d.URL, secret) || !strings.Contains(d.Checksums, secret) || !strings.Contains(d.Transport.Proxy, secret) {
		t.Error("the secrets are lost")
	}
}

// Keys of URLs are stable, and equal keys mean equal images.
func TestKeysOfURLs(t *testing.T) {
	tr := newTranslator(t, Options{})
	keys := map[string]string{}
	legal := regexp.MustCompile(`^[A-Za-z0-9._:/-]+$`)
	for _, name := range []string{
		"https://example.com/x.img", "http://example.com/x.img", "https://example.com/x.img?a=1", "https://example.com/x.img?a=2",
		"https://example.com/x.img?", "https://example.com/a%20b.img", "https://example.com/a_b.img", "https://example.com/a+b.img",
		"https://example.com:8443/x.img", "https://[::1]/x.img", "https://example.com/", "https://example.com", "https://example.com//x.img",
		"https://example.com/x:1", "https://example.com/x", "https://example.com/" + strings.Repeat("long/", 200),
	} {
		d := translate(t, tr, name)
		if other, taken := keys[d.Key]; taken {
			t.Errorf("%s and %s are both %s", name, other, d.Key)
		}
		keys[d.Key] = name
		if !legal.MatchString(d.Key) || len(d.Key) > maxKey || strings.Contains(d.Key, "//") {
			t.Errorf("%s is called %q", name, d.Key)
		}
	}
	for name, want := range map[string]string{
		"https://EXAMPLE.com/x.img":                                   "example.com/x.img",
		"HTTPS://user:pw@example.com/x.img":                           "example.com/x.img",
		"virtlet.cloud/https://example.com/x.img":                     "example.com/x.img",
		"https://example.com:8443/Dir/x.img":                          "example.com:8443/Dir/x.img",
		"virtlet.cloud/example.com/x.img":                             "example.com/x.img",
		"https://example.com/x.img@sha256:" + strings.Repeat("a", 64): "example.com/x.img",
	} {
		if d := translate(t, tr, name); d.Key != want {
			t.Errorf("%s is called %s, want %s", name, d.Key, want)
		}
	}
}

func TestSetKeepsWhatDidNotChange(t *testing.T) {
	var log bytes.Buffer
	tr := newTranslator(t, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	broken := []image.Mapping{{Name: "m", YAML: []byte("translations: [{name: x}]")}}
	for range 3 {
		if got := tr.Set("objects", broken); len(got) != 1 {
			t.Fatalf("problems: %v", got)
		}
	}
	if n := strings.Count(log.String(), "level=WARN"); n != 1 {
		t.Errorf("the problem is logged %d times:\n%s", n, log.String())
	}
	if got := tr.Set("objects", nil); len(got) != 0 || len(tr.Problems()) != 0 {
		t.Errorf("problems of nothing: %v, %v", got, tr.Problems())
	}
	if tr.Set("objects", broken); strings.Count(log.String(), "level=WARN") != 2 {
		t.Errorf("a problem that came back is not logged:\n%s", log.String())
	}
}

// TestWarningsAreLogged has an active rule that is probably a mistake. An operator finds it in the log.
func TestWarningsAreLogged(t *testing.T) {
	var log bytes.Buffer
	tr := newTranslator(t, Options{Regexps: true, Log: slog.New(slog.NewTextHandler(&log, nil))})
	tr.Set("objects", []image.Mapping{{Name: "m", YAML: []byte("translations: [{regexp: '^x(.*)$', url: 'https://images.test/$9'}]")}})
	if !strings.Contains(log.String(), "level=WARN") || !strings.Contains(log.String(), "$9") {
		t.Errorf("log:\n%s", log.String())
	}
}

func TestNewRefusesOtherProtocols(t *testing.T) {
	if _, err := New(Options{Protocol: "ftp"}); !errdefs.IsInvalid(err) {
		t.Error(err)
	}
}

// Warnings returns probable mistakes in active rules.
func (t *Translator) Warnings() []image.MappingProblem {
	var out []image.MappingProblem
	for _, m := range t.table().mappings {
		out = append(out, m.warnings...)
	}
	return out
}
