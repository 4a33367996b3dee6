// Package translate decides what an image name means: an alias of a mapping, a URL, an image of an OCI registry, or the id
// of an image in the store. It fetches nothing, stores nothing and does not use the store.
//
// A name is [PREFIX/]NAME[:TAG][@sha256:HEX], http(s)://…[@sha256:HEX], oci://… (docker:// is the same), or the id of an
// image (sha256:HEX, or all 64 digits). PREFIX is virtlet.cloud or cocoon.cocoonstack.io. It marks a VM image, which never
// comes from a registry unless a mapping says so. Parse implements this grammar; it refuses any other name and never
// guesses.
//
// The meaning of a name is decided in this order; the first match wins:
//
//  1. An id is local. A name with a scheme itself says where the image is, and no mapping can redirect it.
//  2. A fixed name of any mapping, compared without prefix, tag and digest.
//  3. A regular expression of any mapping, compared in the same way, if regular expressions are enabled.
//  4. A broken rule that would have matched: the name is refused. It must not silently get another meaning.
//  5. With PREFIX: the URL https://NAME (or http://, as configured), without tag.
//  6. A first component that looks like a host and a last one that ends like a disk image: the URL https://NAME.
//  7. Any other name is an image of a registry, docker.io if it names none.
//
// Mappings are checked in a fixed order: pushed ones (objects of Kubernetes) before files, each group sorted by name,
// rules in the order written. A mapping with a prefix p sees only the names p/REST, as REST.
//
// Images of mappings and URLs are stored under their name without prefix, tag and digest; images of registries under
// REPO:TAG or REPO@sha256:HEX in docker's short form. A URL with more than such a key can express (a query, a scheme other
// than the default) gets a key with a hash of it, so that equal keys mean equal images.
//
// Mappings may hold secrets: passwords in URLs, private keys. They are only in the marked fields of Decision and Profile:
// never in steps, problems, errors or logs.
package translate

import (
	"cmp"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

// SourceFiles is the source of the mappings that are read from the folder.
const SourceFiles = "files"

// Options configure a Translator.
type Options struct {
	Dir      string       // folder of mapping files, read again when they change; "": none
	Protocol string       // of URLs without a scheme: https or http; "": https
	Regexps  bool         // enables rules by regular expression
	Log      *slog.Logger // nil: none
}

// Translator holds the mappings and translates names. It is safe for concurrent use.
type Translator struct {
	protocol string
	regexps  bool
	log      *slog.Logger

	mu     sync.Mutex
	dir    *folder
	pushed map[string][]*mapping         // by source, sorted by name
	known  map[image.MappingProblem]bool // current problems that were already logged
}

// New returns a translator. It does not read the mappings yet.
// Errors: InvalidArgument for a protocol other than http and https.
func New(o Options) (*Translator, error) {
	protocol := cmp.Or(o.Protocol, "https")
	if protocol != "http" && protocol != "https" {
		return nil, errdefs.Invalidf("unknown download protocol %q; use http or https", o.Protocol)
	}
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	return &Translator{
		protocol: protocol, regexps: o.Regexps, log: o.Log, dir: &folder{path: o.Dir},
		pushed: map[string][]*mapping{}, known: map[image.MappingProblem]bool{},
	}, nil
}

// RegexpEnabled reads the setting that enables rules by regular expression. It is true if the setting is not empty and not
// a word that means no.
func RegexpEnabled(setting string) bool {
	return !slices.Contains([]string{"", "0", "false", "no", "off"}, strings.ToLower(strings.TrimSpace(setting)))
}

// Set replaces all mappings of source and returns their problems.
func (t *Translator) Set(source string, mappings []image.Mapping) []image.MappingProblem {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := map[string]*mapping{}
	for _, m := range t.pushed[source] {
		before[m.name] = m
	}
	now := make([]*mapping, 0, len(mappings))
	for _, m := range mappings {
		if old := before[m.Name]; old != nil && old.text == string(m.YAML) {
			now = append(now, old)
			continue
		}
		now = append(now, parseMapping(source, m.Name, string(m.YAML)))
	}
	slices.SortStableFunc(now, func(a, b *mapping) int { return cmp.Compare(a.name, b.name) })
	t.pushed[source] = now
	if len(now) == 0 {
		delete(t.pushed, source)
	}
	t.tell()
	return problemsOf(now)
}

// Problems returns the current problems of all mappings: inactive rules, and why.
func (t *Translator) Problems() []image.MappingProblem {
	table := t.table()
	return append(problemsOf(table.mappings), table.unread...)
}

// table holds all mappings at one moment, in the order of checking.
type table struct {
	mappings []*mapping
	unread   []image.MappingProblem // files and folders that could not be read
}

func (t *Translator) table() table {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.dir.refresh() {
		t.tell()
	}
	return t.all()
}

// all returns the table. Preconditions: mu is held.
func (t *Translator) all() table {
	var out table
	for _, source := range slices.Sorted(maps.Keys(t.pushed)) {
		out.mappings = append(out.mappings, t.pushed[source]...)
	}
	out.mappings = append(out.mappings, t.dir.mappings...)
	out.unread = slices.Clone(t.dir.unread)
	return out
}

// tell logs each new problem and warning once. Preconditions: mu is held.
func (t *Translator) tell() {
	all := t.all()
	now := map[image.MappingProblem]bool{}
	said := append(problemsOf(all.mappings), all.unread...)
	for _, m := range all.mappings {
		said = append(said, m.warnings...)
	}
	for _, p := range said {
		now[p] = true
		if !t.known[p] {
			t.log.Warn("image mapping has a problem", "source", p.Source, "mapping", p.Mapping, "rule", p.Rule, "err", p.Message)
		}
	}
	t.known = now
}

func problemsOf(mappings []*mapping) []image.MappingProblem {
	var out []image.MappingProblem
	for _, m := range mappings {
		out = append(out, m.problems...)
	}
	return out
}
