package translate

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

// One test per rule of how names become URLs, in the order of Virtlet's image handling. Numbers are stable.

func wantURL(t *testing.T, tr *Translator, name, want string) Decision {
	t.Helper()
	d := translate(t, tr, name)
	if d.URL != want {
		t.Errorf("%s leads to %q (%s), want %q", name, d.URL, d.Kind, want)
	}
	return d
}

func wantProblems(t *testing.T, tr *Translator, words ...string) {
	t.Helper()
	got := tr.Problems()
	if len(got) != len(words) {
		t.Fatalf("problems %+v, want %d", got, len(words))
	}
	for i, w := range words {
		if !strings.Contains(got[i].Rule+": "+got[i].Message, w) {
			t.Errorf("problem %d is %+v, want it to say %q", i, got[i], w)
		}
	}
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestStatement01_PrefixIsOptional(t *testing.T) {
	tr := with(t, Options{}, "translations: [{name: cirros, url: https://example.net/cirros.img}]")
	for _, name := range []string{"cirros", "virtlet.cloud/cirros", "cocoon.cocoonstack.io/cirros"} {
		if d := wantURL(t, tr, name, "https://example.net/cirros.img"); d.Key != "cirros" || d.Kind != Mapped {
			t.Errorf("%s: %v", name, d)
		}
	}
	wantURL(t, tr, "virtlet.cloud/example.net/some/thing", "https://example.net/some/thing")
	if d := translate(t, tr, "example.net/some/thing"); d.Kind != Registry {
		t.Errorf("without prefix: %v", d)
	}
}

func TestStatement02_TagAndDigestAreSplitOff(t *testing.T) {
	tr := with(t, Options{}, "translations: [{name: baz, url: https://example.net/baz.img}]")
	digest := "sha256:" + strings.Repeat("a", 64)
	for _, name := range []string{"baz", "baz:latest", "baz@" + digest, "baz:1@" + digest} {
		d := wantURL(t, tr, name, "https://example.net/baz.img")
		if d.Key != "baz" || strings.Contains(name, "@") != (d.Digest == digest) {
			t.Errorf("%s: key %s, digest %s", name, d.Key, d.Digest)
		}
	}
}

func TestStatement03_RegistryPortSurvives(t *testing.T) {
	tr := newTranslator(t, Options{})
	if d := wantURL(t, tr, "virtlet.cloud/example.com:1234/foo/bar:v1", "https://example.com:1234/foo/bar"); d.Key != "example.com:1234/foo/bar" {
		t.Errorf("key %s", d.Key)
	}
	if d := translate(t, tr, "example.com:1234/foo/bar"); d.Key != "example.com:1234/foo/bar:latest" || d.Ref != d.Key {
		t.Errorf("of a registry: %v", d)
	}
}

func TestStatement04_UnparsableNamesAreRefused(t *testing.T) {
	_, err := newTranslator(t, Options{}).Translate("foo bar")
	if !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "a space") {
		t.Error(err)
	}
}

func TestStatement05_UnknownNamesAreURLs(t *testing.T) {
	for protocol, want := range map[string]string{"": "https://example.net/x.qcow2", "http": "http://example.net/x.qcow2"} {
		tr := newTranslator(t, Options{Protocol: protocol})
		wantURL(t, tr, "virtlet.cloud/example.net/x.qcow2", want)
		wantURL(t, tr, "example.net/x.qcow2:latest", want)
		wantURL(t, tr, "ftp.example.net/x.vmdk.zst", strings.ReplaceAll(want, "example.net/x.qcow2", "ftp.example.net/x.vmdk.zst"))
	}
}

func TestStatement06_DefaultProtocolOfMappedURLs(t *testing.T) {
	tr := with(t, Options{Protocol: "http"}, `
translations:
- {name: base, url: example.net/base.qcow2}
- {name: own, url: "https://example.net/base.qcow2"}
`)
	wantURL(t, tr, "base", "http://example.net/base.qcow2")
	wantURL(t, tr, "own", "https://example.net/base.qcow2")
}

func TestStatement07_LatestThatKubeletAppendsChangesNothing(t *testing.T) {
	tr := with(t, Options{}, "translations: [{name: base, url: example.net/base.qcow2}]")
	for _, name := range []string{"base", "example.net/x.img", "virtlet.cloud/foo", "alpine", "example.net/alpine"} {
		bare, tagged := translate(t, tr, name), translate(t, tr, name+":latest")
		if bare.Key != tagged.Key || bare.URL != tagged.URL || bare.Ref != tagged.Ref {
			t.Errorf("%s: %v, with tag %v", name, bare, tagged)
		}
	}
}

func TestStatement08_CredentialsOfMappedURLs(t *testing.T) {
	tr := with(t, Options{}, "translations: [{name: base, url: 'user:pass@example.net/base.qcow2'}]")
	d := wantURL(t, tr, "base", "https://user:pass@example.net/base.qcow2")
	if d.Printable != "https://example.net/base.qcow2" {
		t.Errorf("printed as %s", d.Printable)
	}
}

func TestStatement09_PrefixOfAMapping(t *testing.T) {
	tr := with(t, Options{Regexps: true},
		"{prefix: prod, translations: [{name: image1, url: example.net/prod1}]}",
		"{translations: [{name: image1, url: example.net/one}, {name: prod/image2, url: example.net/two}]}")
	wantURL(t, tr, "prod/image1", "https://example.net/prod1")
	wantURL(t, tr, "image1", "https://example.net/one")
	wantURL(t, tr, "prod/image2", "https://example.net/two") // without a prefix it matches all names
	wantURL(t, tr, "virtlet.cloud/prodimage1", "https://prodimage1")
}

const imageRules = `
translations:
- {name: image1, url: example.net/one}
- {regexp: 'image(\d+)', url: example.net/alt_$1}
`

func TestStatement10_RegexpsAreOffByDefault(t *testing.T) {
	tr := with(t, Options{}, imageRules)
	wantURL(t, tr, "image1", "https://example.net/one")
	d := wantURL(t, tr, "virtlet.cloud/image2", "https://image2")
	if !strings.Contains(strings.Join(d.Steps, "\n"), "switched off") {
		t.Errorf("steps do not tell why: %q", d.Steps)
	}
	wantURL(t, with(t, Options{Regexps: true}, imageRules), "image2", "https://example.net/alt_2")
}

func TestStatement11_FixedNamesBeatRegexps(t *testing.T) {
	tr := with(t, Options{Regexps: true}, `
translations:
- {regexp: 'image(\d+)', url: example.net/alt_$1}
- {name: image1, url: example.net/one}
`)
	wantURL(t, tr, "image1", "https://example.net/one")
}

func TestStatement12_RegexpsInListOrder(t *testing.T) {
	tr := with(t, Options{Regexps: true}, "translations: [{regexp: 'im.*', url: example.net/first}, {regexp: 'image.*', url: example.net/second}]")
	wantURL(t, tr, "image7", "https://example.net/first")
}

func TestStatement13_RegexpsAreUnanchoredUnlessFullMatch(t *testing.T) {
	tr := with(t, Options{Regexps: true}, imageRules)
	d := wantURL(t, tr, "prod/image1", "https://example.net/alt_1")
	if !strings.Contains(strings.Join(d.Steps, "\n"), "fullMatch") {
		t.Errorf("steps do not warn: %q", d.Steps)
	}
	if w := tr.Warnings(); len(w) != 1 || !strings.Contains(w[0].Message, "fullMatch") {
		t.Errorf("warnings: %v", w)
	}
	wantProblems(t, tr) // a warning disables nothing
	if d := translate(t, tr, "Prod/image1"); d.Kind != Mapped {
		t.Errorf("upper case elsewhere: %v", d)
	}
	if _, err := tr.Translate("Image9"); err == nil {
		t.Error("regexps do not tell upper case from lower")
	}
	full := with(t, Options{Regexps: true}, `translations: [{regexp: 'image(\d+)|other', fullMatch: true, url: example.net/alt_$1}]`)
	wantURL(t, full, "image1", "https://example.net/alt_1")
	wantURL(t, full, "other", "https://example.net/alt_")
	for _, name := range []string{"prod/image1", "image1x", "another"} {
		wantURL(t, full, "virtlet.cloud/"+name, "https://"+name)
	}
	anchored := with(t, Options{}, "translations: [{regexp: '^a$', url: example.net/a}]")
	if w := append(full.Warnings(), anchored.Warnings()...); len(w) != 0 {
		t.Errorf("warnings of whole matches: %v", w)
	}
}

func TestStatement14_SubmatchesExpand(t *testing.T) {
	tr := with(t, Options{Regexps: true}, `
translations:
- {regexp: '^centos/(\d+)-(?P<minor>\d+)$', url: 'https://example.net/$1/CentOS-${1}-${minor}x$9.qcow2', checksums: 'https://example.net/$1/SUMS'}
`)
	d := wantURL(t, tr, "centos/7-01", "https://example.net/7/CentOS-7-01x.qcow2")
	if d.Checksums != "https://example.net/7/SUMS" {
		t.Errorf("checksums %s", d.Checksums)
	}
	if w := tr.Warnings(); len(w) != 1 || !strings.Contains(w[0].Message, `"$9"`) {
		t.Errorf("warnings: %v", w)
	}
	// In a rule with a fixed name, a dollar sign has no special meaning.
	wantURL(t, with(t, Options{}, "translations: [{name: a, url: 'https://example.net/$1'}]"), "a", "https://example.net/$1")
}

func TestStatement15_AnInvalidRegexpDisablesOnlyItself(t *testing.T) {
	tr := with(t, Options{Regexps: true}, `translations: [{regexp: 'x(', url: example.net/x}, {regexp: 'image(\d+)', url: example.net/alt_$1}]`)
	wantProblems(t, tr, "regexp x(: its regexp is not valid: missing closing )")
	wantURL(t, tr, "image1", "https://example.net/alt_1")
}

func TestStatement16_EmptyNames(t *testing.T) {
	tr := with(t, Options{Regexps: true}, "translations: [{regexp: '.*', url: example.net/any}, {name: '', url: example.net/none}]")
	for _, name := range []string{"", "virtlet.cloud/", "cocoon.cocoonstack.io/"} {
		if d, err := tr.Translate(name); !errdefs.IsInvalid(err) {
			t.Errorf("%q: %v, %v", name, d, err)
		}
	}
	wantProblems(t, tr, "neither a name nor a regexp")
}

func TestStatement17_ARuleWithBothCountsAsBoth(t *testing.T) {
	text := `translations: [{name: one, regexp: 'image(\d+)', url: 'https://example.net/x$1'}]`
	tr := with(t, Options{Regexps: true}, text)
	wantURL(t, tr, "one", "https://example.net/x$1")
	wantURL(t, tr, "image5", "https://example.net/x5")
	wantURL(t, with(t, Options{}, text), "one", "https://example.net/x$1")
}

func TestStatement18_ObjectsBeforeFilesEachSorted(t *testing.T) {
	dir := t.TempDir()
	rule := func(host string, names ...string) string {
		text := "translations:\n"
		for _, n := range names {
			text += "- {name: " + n + ", url: " + host + "/" + n + "}\n"
		}
		return text
	}
	write(t, dir, "a", rule("file-a", "all", "files", "only-a"))
	write(t, dir, "b", rule("file-b", "all", "files", "only-b"))
	tr := newTranslator(t, Options{Dir: dir})
	tr.Set("kubernetes", []image.Mapping{
		{Name: "z", YAML: []byte(rule("object-z", "all", "objects", "only-z"))},
		{Name: "a", YAML: []byte(rule("object-a", "all", "objects"))},
	})
	for name, want := range map[string]string{
		"all": "object-a", "objects": "object-a", "only-z": "object-z", "files": "file-a", "only-a": "file-a", "only-b": "file-b",
	} {
		wantURL(t, tr, name, "https://"+want+"/"+name)
	}
}

func TestStatement19_FixedNamesOfAnyMappingBeatRegexpsOfAll(t *testing.T) {
	tr := with(t, Options{Regexps: true}, "translations: [{regexp: '.*', url: example.net/any}]", "translations: [{name: image1, url: example.net/one}]")
	wantURL(t, tr, "image1", "https://example.net/one")
	wantURL(t, tr, "image2", "https://example.net/any")
}

func TestStatement20_SourcesAreReadAgain(t *testing.T) {
	dir := t.TempDir()
	tr := newTranslator(t, Options{Dir: dir})
	wantURL(t, tr, "virtlet.cloud/x", "https://x")
	for _, host := range []string{"a.net", "b.net", "c.net"} { // equal size, within one tick of the clock
		write(t, dir, "m.yaml", "translations: [{name: x, url: "+host+"/x}]")
		wantURL(t, tr, "x", "https://"+host+"/x")
	}
	write(t, dir, "a.yaml", "translations: [{name: x, url: first.net/x}]")
	wantURL(t, tr, "x", "https://first.net/x")
	for _, name := range []string{"a.yaml", "m.yaml"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	wantURL(t, tr, "virtlet.cloud/x", "https://x")
}

func TestStatement21_ABadFileDisablesOnlyItself(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", "translations: [{name: x, url: example.net/x}]")
	write(t, dir, "b", "translations: [")
	write(t, dir, "c.txt", "translations: [{name: why, url: example.net/why}]")
	write(t, dir, "d", "{a: 1}\n---\n{b: 2}\n")
	write(t, dir, ".hidden", "translations: [")
	if err := os.Mkdir(filepath.Join(dir, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "sub"), "s.yaml", "translations: [{name: z, url: example.net/z}]")
	if err := os.Symlink("nowhere", filepath.Join(dir, "e")); err != nil {
		t.Fatal(err)
	}
	tr := newTranslator(t, Options{Dir: dir})
	wantURL(t, tr, "x", "https://example.net/x")
	wantURL(t, tr, "why", "https://example.net/why")
	wantURL(t, tr, "virtlet.cloud/z", "https://z")
	wantProblems(t, tr, "no valid YAML (line 1)", "several YAML documents", `key "a"`, "cannot be read: no such file")
}

func TestStatement22_RegexpSetting(t *testing.T) {
	for setting, want := range map[string]bool{
		"": false, "0": false, "false": false, "False": false, "no": false, "OFF": false, " ": false,
		"1": true, "true": true, "yes": true, "on": true, "anything": true,
	} {
		if RegexpEnabled(setting) != want {
			t.Errorf("%q: %v", setting, !want)
		}
	}
}

func TestStatement23_NoFolderNoFiles(t *testing.T) {
	wantProblems(t, newTranslator(t, Options{}))
	wantProblems(t, newTranslator(t, Options{Dir: filepath.Join(t.TempDir(), "absent")}))
}

const transportRules = `
translations:
- {name: default, url: example.net/x}
- {name: own, url: example.net/x, transport: own}
- {name: lost, url: example.net/x, transport: elsewhere}
transports:
  "": {proxy: "http://proxy:1"}
  own: {timeout: 250, maxRedirects: 0, tls: {serverName: example.com, insecure: true, certificates: [{cert: C, key: K}]}}
`

func TestStatement24_Transports(t *testing.T) {
	tr := with(t, Options{}, transportRules, "translations: [{name: system, url: example.net/x}, {name: foreign, url: example.net/x, transport: own}]\ntransports: {elsewhere: null}")
	if p := translate(t, tr, "default").Transport; p == nil || p.Proxy != "http://proxy:1" || p.MaxRedirects != nil || p.TLS != nil {
		t.Errorf("the default profile: %v", p)
	}
	p := translate(t, tr, "own").Transport
	if p == nil || p.Timeout.Milliseconds() != 250 || *p.MaxRedirects != 0 || !p.TLS.Insecure || p.TLS.ServerName != "example.com" || p.TLS.Certificates[0] != (Certificate{"C", "K"}) {
		t.Errorf("the named profile: %v", p)
	}
	if p := translate(t, tr, "system").Transport; p != nil {
		t.Errorf("without profile: %v", p)
	}
}

func TestStatement25_UnknownTransportsAreErrors(t *testing.T) {
	tr := with(t, Options{}, transportRules, "translations: [{name: foreign, url: example.net/x, transport: own}]")
	wantProblems(t, tr, `name lost: its transport "elsewhere"`, `name foreign: its transport "own"`)
	for _, name := range []string{"lost", "virtlet.cloud/lost:latest", "foreign"} {
		d, err := tr.Translate(name)
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "its transport") {
			t.Errorf("%s: %v, %v", name, d, err)
		}
	}
	// An active rule of another mapping is used instead of a broken one.
	tr = with(t, Options{}, transportRules, "translations: [{name: lost, url: example.net/found}]")
	wantURL(t, tr, "lost", "https://example.net/found")
}
