// Package translate decides what an image name means: an alias of a mapping, a URL, an image of an OCI registry, or the
// id of an image that is here already. It fetches nothing, stores nothing and knows no store.
//
// A name is [PREFIX/]NAME[:TAG][@sha256:HEX], http(s)://…[@sha256:HEX], oci://… (docker:// is the same), or the id of an
// image (sha256:HEX, or all 64 digits). PREFIX is virtlet.cloud or cocoon.cocoonstack.io and says that a VM image is
// meant, which never comes from a registry unless a mapping says so. Parse is this grammar; what it does not know it
// refuses, it never guesses.
//
// What a name means is decided in this order, and the first that applies counts:
//
//  1. An id is local. A name with a scheme says itself where the image is, and no mapping can lead it elsewhere.
//  2. A fixed name of any mapping, compared without prefix, tag and digest.
//  3. A regular expression of any mapping, compared with the same, where they are switched on.
//  4. A rule that would have matched but is broken: the name is refused. It must not silently mean something else.
//  5. With PREFIX: the URL https://NAME (or http://, as configured), without tag.
//  6. A first component that looks like a host and a last one that ends like a disk image: the URL https://NAME.
//  7. Anything else is an image of a registry, docker.io where none is named.
//
// Mappings are asked in a fixed order: those pushed (objects of Kubernetes) before those of files, each sorted by name,
// rules in the order written. A mapping with a prefix p sees only the names p/REST, as REST.
//
// Images of mappings and URLs are kept under their name without prefix, tag and digest; those of registries under
// REPO:TAG or REPO@sha256:HEX as docker shortens it. A URL that says more than such a key can (a query, another scheme
// than the default one) gets a key with a hash of it, so that equal keys are equal images.
//
// Mappings may hold secrets: passwords in URLs, private keys. They are in the fields of Decision and Profile that say so,
// and nowhere else: not in steps, not in problems, not in errors, not in logs.
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

// SourceFiles is what mappings read from the folder are said to come from.
const SourceFiles = "files"

// Options configure a Translator.
type Options struct {
	Dir      string       // of mapping files, read again whenever they change; "": none
	Protocol string       // of URLs without a scheme: https or http; "": https
	Regexps  bool         // rules by regular expression count
	Log      *slog.Logger // nil: none
}

// Translator knows the mappings and translates names. It is safe for concurrent use.
type Translator struct {
	protocol string
	regexps  bool
	log      *slog.Logger

	mu     sync.Mutex
	dir    *folder
	pushed map[string][]*mapping         // by source, sorted by name
	known  map[image.MappingProblem]bool // problems that were logged and are still there
}

// New returns a translator. It reads nothing yet.
// Errors: InvalidArgument for a protocol other than http and https.
func New(o Options) (*Translator, error) {
	protocol := cmp.Or(o.Protocol, "https")
	if protocol != "http" && protocol != "https" {
		return nil, errdefs.Invalidf("the download protocol %q is not known; it is http or https", o.Protocol)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Translator{
		protocol: protocol, regexps: o.Regexps, log: o.Log, dir: &folder{path: o.Dir},
		pushed: map[string][]*mapping{}, known: map[image.MappingProblem]bool{},
	}, nil
}

// RegexpEnabled reads the setting by which rules by regular expression are switched on: it is set, and not to a word
// that means no.
func RegexpEnabled(setting string) bool {
	switch strings.ToLower(strings.TrimSpace(setting)) {
	case "", "0", "false", "no", "off":
		return false
	}
	return true
}

// Set replaces all mappings of source and returns what is wrong with them.
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

// Problems returns what is wrong with all mappings as they are now: rules that do not count, and why.
func (t *Translator) Problems() []image.MappingProblem {
	table := t.table()
	return append(problemsOf(table.mappings), table.unread...)
}

// Warnings returns what is probably not meant in rules that count.
func (t *Translator) Warnings() []image.MappingProblem {
	var out []image.MappingProblem
	for _, m := range t.table().mappings {
		out = append(out, m.warnings...)
	}
	return out
}

// table is all mappings at one moment, in the order in which they are asked.
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

// tell logs problems that are new, once. Preconditions: mu is held.
func (t *Translator) tell() {
	all := t.all()
	now := map[image.MappingProblem]bool{}
	for _, p := range append(problemsOf(all.mappings), all.unread...) {
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
