package translate

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Kind is the kind of a resolved name. The values are those of image.Explanation.
type Kind string

// The kinds of names.
const (
	Mapped   Kind = "mapped"
	URL      Kind = "url"
	Registry Kind = "registry"
	Local    Kind = "local"
)

// Decision is the meaning of a name. It prints itself without its secrets.
type Decision struct {
	Name Name
	Kind Kind
	Key  string // key of the image in the store; for Kind Local its id, perhaps only the first digits

	// Unless Kind is Local, one of these says where the image is.
	URL string `json:"-"` // http or https; SECRET: may hold credentials and a signed query
	Ref string // of a registry's image, in full form: docker.io/library/alpine:3.23

	Printable string // where the image is, for messages: without credentials and query
	Digest    string // sha256:HEX that the name requires; ""
	SHA256    string // sha256:HEX that the mapping requires of the served bytes; ""
	Checksums string `json:"-"` // URL of a SHA256SUMS file for the served bytes; SECRET as URL; ""

	Transport     *Profile `json:"-"` // nil: the defaults of the system
	TransportName string   // as in the rule; "" is the mapping's default profile

	HostGiven bool // the name, not a mapping, gives the host

	Source string   // for Kind Mapped: the mapping, like files/cirros.yaml
	Rule   string   // for Kind Mapped: the rule, like name cirros
	Steps  []string // every decision, in order
}

// String describes d without its secrets.
func (d Decision) String() string {
	return fmt.Sprintf("%s %s: key %s, at %s", d.Kind, d.Name, d.Key, cmp.Or(d.Printable, "no place"))
}

// Format hides the secrets for every verb.
func (d Decision) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(d.String())) }

// LogValue implements slog.LogValuer.
func (d Decision) LogValue() slog.Value { return slog.StringValue(d.String()) }

func (d *Decision) step(format string, args ...any) {
	d.Steps = append(d.Steps, fmt.Sprintf(format, args...))
}

// Translate decides what name means, with the current mappings.
// Errors: InvalidArgument for an invalid name; FailedPrecondition when its rule is broken.
func (t *Translator) Translate(name string) (Decision, error) {
	n, err := Parse(name)
	if err != nil {
		return Decision{}, err
	}
	d := Decision{Name: n, Digest: n.Digest}
	if n.Forced != "" {
		d.step("the prefix %s/ says that a VM image is meant", n.Forced)
	}
	switch {
	case n.ID != "":
		d.Kind, d.Key = Local, n.ID
		d.step("it is the id of an image")
		return d, nil
	case n.url != nil:
		d.step("it has the scheme %s, so it is a URL and no mapping is asked", n.Scheme)
		return t.atURL(d, n.url, t.urlKey(n.url))
	case n.Scheme == "oci":
		d.step("it has a scheme of registries, so no mapping is asked")
		return t.atRegistry(d)
	}
	if n.Tag != "" || n.Digest != "" {
		d.step("without tag and digest the name is %s", n.Repo)
	}
	if done, err := t.mapped(&d); done || err != nil {
		return d, err
	}
	switch {
	case n.Forced != "":
		d.step("no mapping knows it, so it is a URL by the prefix, with the default protocol %s", t.protocol)
	case n.diskURL():
		d.step("no mapping knows it; it starts with a host and ends like a disk image, so it is a URL with the default protocol %s", t.protocol)
	default:
		d.step("no mapping knows it; it is the name of a registry's image")
		return t.atRegistry(d)
	}
	u, err := parseHTTP(t.protocol + "://" + n.Repo)
	if err != nil {
		return d, errdefs.Invalidf("the image name %s is no alias of a mapping and no URL either: %w", show(name), err)
	}
	return t.atURL(d, u, n.Repo)
}

func (t *Translator) atURL(d Decision, u *url.URL, key string) (Decision, error) {
	d.Kind, d.Key, d.URL, d.Printable, d.HostGiven = URL, key, u.String(), printable(u.String()), true
	d.step("it would be fetched from %s", d.Printable)
	if d.Digest != "" {
		d.step("its content must be %s", d.Digest)
	}
	return d, d.checkKey()
}

func (t *Translator) atRegistry(d Decision) (Decision, error) {
	r, err := d.Name.registry()
	if err != nil {
		return d, err
	}
	d.Kind, d.Key, d.Ref, d.Printable, d.HostGiven = Registry, r.familiar, r.full, "oci://"+r.full, true
	d.step("it would be pulled as %s", r.full)
	return d, nil
}

func (d *Decision) checkKey() error {
	d.step("the store calls it %s", d.Key)
	if len(d.Key) > maxKey {
		return errdefs.Invalidf("the image name %.40q… has %d characters; at most %d are allowed", d.Key, len(d.Key), maxKey)
	}
	return nil
}

// match is a rule that matches a name.
type match struct {
	mapping *mapping
	rule    *rule
	expand  func(string) string
}

// mapped checks the mappings and completes d when one matches the name.
func (t *Translator) mapped(d *Decision) (bool, error) {
	found, broken := t.find(d)
	switch {
	case found.rule != nil:
	case broken.rule != nil:
		return false, errdefs.Preconditionf("the image name %q matches an invalid rule: mapping %s, %s: %w; correct the rule", d.Name.Repo, broken.mapping.title(), broken.rule.id, broken.rule.broken)
	default:
		return false, nil
	}
	where, err := target{protocol: t.protocol}.of(found.rule, found.expand)
	if err != nil {
		return false, errdefs.Invalidf("mapping %s, %s makes no usable URL of the image name %q: %w", found.mapping.title(), found.rule.id, d.Name.Repo, err)
	}
	r := found.rule
	d.Kind, d.Key, d.Source, d.Rule = Mapped, d.Name.Repo, found.mapping.title(), r.id
	d.SHA256, d.Checksums = r.digest, where.checksums
	d.HostGiven = !r.saysHost(where)
	if d.Ref = where.ref; d.Ref != "" {
		d.Printable = "oci://" + d.Ref
		d.step("it would be pulled as %s", d.Ref)
		return true, d.checkKey()
	}
	d.URL, d.Printable = where.url.String(), printable(where.url.String())
	d.Transport, d.TransportName = r.profile, r.transport
	d.step("it would be fetched from %s", d.Printable)
	if where.url.User != nil {
		d.step("with the user and password of the mapping")
	}
	switch {
	case r.profile != nil:
		d.step("by the transport %q of this mapping: %s", r.transport, r.profile)
	default:
		d.step("by the transport of the system, as the rule names none and the mapping has no default one")
	}
	switch {
	case r.digest != "":
		d.step("the file must be %s, says the mapping", r.digest)
	case where.checksums != "":
		d.step("the file must be as %s says", printable(where.checksums))
	}
	if d.Digest != "" {
		d.step("the content must be %s, says the name", d.Digest)
	}
	return true, d.checkKey()
}

// find returns the active rule for a name, and the first broken rule that would have matched.
func (t *Translator) find(d *Decision) (found, broken match) {
	name := d.Name.Repo
	table := t.table()
	if len(table.mappings) == 0 {
		d.step("there are no mappings")
		return found, broken
	}
	consider := func(m *mapping, r *rule, expand func(string) string) bool {
		if r.broken == nil {
			found = match{m, r, expand}
			return true
		}
		d.step("mapping %s: %s matches, but is invalid: %v", m.title(), r.id, r.broken)
		if broken.rule == nil {
			broken = match{m, r, expand}
		}
		return false
	}
	for _, m := range table.mappings {
		rest, sees := m.sees(name)
		switch {
		case !sees:
			d.step("mapping %s applies only to names that start with %s/", m.title(), m.prefix)
			continue
		case m.prefix != "":
			d.step("mapping %s: after the prefix %s/ the name is %s", m.title(), m.prefix, rest)
		}
		for _, r := range m.rules {
			if r.name == rest && r.name != "" && consider(m, r, literally) {
				d.step("mapping %s: the rule for the %s matches", m.title(), r.id)
				return found, broken
			}
		}
		d.step("mapping %s has no rule for exactly this name", m.title())
	}
	for _, m := range table.mappings {
		rest, sees := m.sees(name)
		if !sees {
			continue
		}
		for _, r := range m.rules {
			if r.regexp == nil {
				continue
			}
			at := r.regexp.FindStringSubmatchIndex(rest)
			if at == nil {
				continue
			}
			if !t.regexps {
				d.step("mapping %s: the %s would match, but rules by regular expression are switched off", m.title(), r.id)
				continue
			}
			expand := func(template string) string { return string(r.regexp.ExpandString(nil, template, rest, at)) }
			if !consider(m, r, expand) {
				continue
			}
			d.step("mapping %s: the %s matches", m.title(), r.id)
			if r.loose && at[1]-at[0] < len(rest) {
				d.step("warning: it matches only a part of the name, %s; fullMatch: true would prevent that", rest[at[0]:at[1]])
			}
			return found, broken
		}
	}
	return found, broken
}

func literally(s string) string { return s }

// saysHost reports whether the rule itself contains the host of its destination, instead of taking it from the name.
func (r *rule) saysHost(p place) bool {
	if r.regexp == nil {
		return true
	}
	host, _, _ := strings.Cut(p.ref, "/")
	if p.url != nil {
		host = p.url.Host
	} else if host == "docker.io" || host == "index.docker.io" { // may be omitted in a name
		return true
	}
	text := "/" + r.url + "/"
	return strings.Contains(text, "/"+host+"/") || strings.Contains(text, "@"+host+"/")
}

// target turns the texts of a rule into the place of an image.
type target struct{ protocol string }

type place struct {
	url       *url.URL // http and https; else nil
	ref       string   // of a registry's image; else ""
	checksums string
}

// of returns the destination of a rule after expanding its texts. The errors quote nothing of the URL.
func (t target) of(r *rule, expand func(string) string) (p place, err error) {
	raw := expand(r.url)
	if c, bad := firstBad(raw, urlChar); bad {
		return p, fmt.Errorf("its URL has %s, which must be written as %%XX", c)
	}
	scheme, rest, has := strings.Cut(raw, "://")
	if !has {
		scheme, rest = t.protocol, raw
	}
	switch scheme = strings.ToLower(scheme); scheme {
	case "oci", "docker":
		if r.transport != "" || r.digest != "" || r.checksums != "" {
			return p, errors.New("its url names a registry, where transport, sha256 and checksums have no effect; put a digest into the url instead")
		}
		n, err := Parse("oci://" + rest)
		if err != nil {
			return p, errors.New("its url is not the name of an image in a registry")
		}
		ref, err := n.registry()
		p.ref = ref.full
		return p, err
	case "http", "https":
	default:
		return p, errors.New("its url has an unknown scheme; use http, https or oci")
	}
	if p.url, err = parseHTTP(scheme + "://" + rest); err != nil || r.checksums == "" {
		return p, err
	}
	sums, err := t.sums(p.url, expand(r.checksums))
	if err != nil {
		return p, fmt.Errorf("checksums: %w", err)
	}
	p.checksums = sums
	return p, nil
}

// sums returns the URL of a checksum file. A file name alone means a file in the same folder as the image.
func (t target) sums(image *url.URL, raw string) (string, error) {
	if !strings.ContainsAny(raw, "/:?") {
		image = image.JoinPath("..", raw)
		image.RawQuery = ""
		raw = image.String()
	}
	if !strings.Contains(raw, "://") {
		raw = t.protocol + "://" + raw
	}
	u, err := parseHTTP(raw)
	if err != nil {
		return "", err
	}
	return u.String(), nil
}
