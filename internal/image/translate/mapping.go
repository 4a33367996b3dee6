package translate

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/ociname"
)

// maxMapping is the largest mapping, in bytes.
const maxMapping = 1 << 20

// mapping is one parsed translation config. It is immutable.
type mapping struct {
	source, name string
	text         string
	prefix       string
	rules        []*rule
	problems     []image.MappingProblem // parts that are not active
	warnings     []image.MappingProblem // parts that are active but probably a mistake
}

// rule is one translation. A broken rule is kept, so that the names it would have matched do not get another meaning.
type rule struct {
	id        string // for messages
	broken    error  // why it is not active; nil: it is active
	name      string
	regexp    *regexp.Regexp
	loose     bool // the regexp matches anywhere in a name
	url       string
	digest    string
	checksums string
	transport string
	profile   *Profile
}

func (m *mapping) title() string { return m.source + "/" + m.name }

// sees returns the part of a name that the rules of m match against.
func (m *mapping) sees(name string) (string, bool) {
	if m.prefix == "" {
		return name, true
	}
	return strings.CutPrefix(name, m.prefix+"/")
}

// maxProblems limits the reported problems of one mapping.
const maxProblems = 100

func (m *mapping) problem(rule, format string, args ...any) {
	if len(m.problems) == maxProblems {
		rule, format, args = "", "it has more problems than the %d listed", []any{maxProblems}
	}
	if len(m.problems) > maxProblems {
		return
	}
	m.problems = append(m.problems, image.MappingProblem{Source: m.source, Mapping: m.name, Rule: rule, Message: fmt.Sprintf(format, args...)})
}

func (m *mapping) warning(rule, format string, args ...any) {
	m.warnings = append(m.warnings, image.MappingProblem{Source: m.source, Mapping: m.name, Rule: rule, Message: "warning: " + fmt.Sprintf(format, args...)})
}

// parseMapping reads a translation config. It always returns a mapping, with its errors in problems.
func parseMapping(source, name, text string) *mapping {
	m := &mapping{source: source, name: name, text: text}
	doc, err := readYAML(text)
	if err != nil {
		m.problem("", "%v", err)
		return m
	}
	if laterDocument(text) {
		m.problem("", "it has several YAML documents, and only the first is used; put each into a file of its own")
	}
	for _, key := range doc.unknown("prefix", "translations", "transports") {
		if key == "spec" {
			m.problem("", "the key %.60q is unknown; of a Kubernetes object, copy only the part under spec into the file", key)
			continue
		}
		m.problem("", "the key %.60q is unknown and ignored; use prefix, translations and transports", key)
	}
	prefix, err := doc.text("prefix")
	if err != nil {
		m.problem("", "%v", err)
		return m // without its prefix it would match other names
	}
	m.prefix = strings.TrimRight(prefix, "/")
	if err := checkAlias(m.prefix); m.prefix != "" && err != nil {
		m.problem("", "no name can start with its prefix %.60q: %v", prefix, err)
	}
	profiles := m.readTransports(doc)
	list, err := doc.list("translations")
	if err != nil {
		m.problem("", "%v", err)
		return m
	}
	for i, raw := range list {
		r := m.readRule(i, raw, profiles)
		if r.broken != nil {
			m.problem(r.id, "%v", r.broken)
		}
		m.rules = append(m.rules, r)
	}
	return m
}

var lineRE = regexp.MustCompile(`line [0-9]+`)

// readYAML reads one document with string keys. Its errors quote nothing of the text, which may hold secrets.
func readYAML(text string) (object, error) {
	if len(text) > maxMapping {
		return nil, fmt.Errorf("it is larger than %d KiB", maxMapping>>10)
	}
	raw, err := yaml.YAMLToJSONStrict([]byte(text))
	if err != nil {
		return nil, fmt.Errorf("it is no valid YAML (%s); perhaps a quote, the indentation or a key that is there twice", cmp.Or(lineRE.FindString(err.Error()), "somewhere"))
	}
	var doc any
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	if err := dec.Decode(&doc); err != nil {
		return nil, errors.New("it is no valid YAML")
	}
	switch doc := doc.(type) {
	case nil:
		return object{}, nil
	case map[string]any:
		return doc, nil
	}
	return nil, errors.New("it is YAML, but not a map with the keys prefix, translations and transports")
}

// laterDocument reports whether a second document follows. A marker at the start of a line counts, even in a block of text.
func laterDocument(text string) bool {
	seen := false
	for line := range strings.Lines(text) {
		marker := strings.HasPrefix(line, "---") && (len(line) == 3 || strings.ContainsRune(" \t\r\n", rune(line[3])))
		switch trimmed := strings.TrimSpace(line); {
		case marker && seen:
			return true
		case marker, trimmed == "", trimmed[0] == '#', trimmed[0] == '%':
		default:
			seen = true
		}
	}
	return false
}

// readRule reads the i-th translation.
func (m *mapping) readRule(i int, raw any, profiles map[string]profileOrError) *rule {
	r := &rule{id: fmt.Sprintf("translation %d", i+1)}
	o, ok := raw.(map[string]any)
	if !ok {
		r.broken = errors.New("it is not a map with keys like name and url")
		return r
	}
	r.broken = r.read(o)
	if r.regexp != nil && r.broken == nil {
		m.doubt(r)
	}
	if r.broken == nil {
		r.broken = r.join(profiles)
	}
	if r.broken == nil && r.name != "" {
		r.broken = checkAlias(strings.TrimPrefix(m.prefix+"/"+r.name, "/"))
	}
	return r
}

// read fills r and returns its first error. It always reads name and regexp, so that messages can name a broken rule.
func (r *rule) read(o object) error {
	name, nameErr := o.text("name")
	pattern, patternErr := o.text("regexp")
	full, fullErr := o.flag("fullMatch")
	r.name = name
	switch {
	case name != "":
		r.id = "name " + label(name)
	case pattern != "":
		r.id = "regexp " + label(pattern)
	}
	if pattern != "" {
		if full {
			pattern = `\A(?:` + pattern + `)\z`
		}
		re, err := regexp.Compile(pattern)
		if err != nil {
			var why *syntax.Error
			if errors.As(err, &why) {
				patternErr = fmt.Errorf("its regexp is not valid: %s", why.Code)
			} else {
				patternErr = errors.New("its regexp is not valid")
			}
		}
		r.regexp, r.loose = re, err == nil && !anchored(pattern)
	}
	if err := cmp.Or(nameErr, patternErr, fullErr); err != nil {
		return err
	}
	if keys := o.unknown("name", "regexp", "fullMatch", "url", "transport", "sha256", "checksums"); len(keys) > 0 {
		return fmt.Errorf("the key %.60q is unknown; use name, regexp, fullMatch, url, transport, sha256 and checksums", keys[0])
	}
	if name == "" && pattern == "" {
		return errors.New("it has neither a name nor a regexp")
	}
	return r.readTarget(o)
}

func (r *rule) readTarget(o object) error {
	for key, into := range map[string]*string{"url": &r.url, "transport": &r.transport, "sha256": &r.digest, "checksums": &r.checksums} {
		s, err := o.text(key)
		if err != nil {
			return err
		}
		*into = s
	}
	r.url, r.checksums = strings.TrimSpace(r.url), strings.TrimSpace(r.checksums)
	if r.url == "" {
		return errors.New("it has no url")
	}
	if r.digest != "" {
		r.digest = "sha256:" + strings.ToLower(strings.TrimPrefix(r.digest, "sha256:"))
		if !ociname.IsSHA256(r.digest) {
			return errors.New("its sha256 is not 64 hexadecimal digits")
		}
	}
	if r.digest != "" && r.checksums != "" {
		return errors.New("it has both sha256 and checksums; give one")
	}
	// The text that a regexp inserts into the URL is not known yet; it is checked when it is inserted.
	if _, err := (target{protocol: "https"}).of(r, func(s string) string {
		if r.regexp == nil {
			return s
		}
		return placeholderRE.ReplaceAllString(s, "1")
	}); err != nil {
		return err
	}
	return nil
}

// join sets the transport profile of r.
func (r *rule) join(profiles map[string]profileOrError) error {
	p, ok := profiles[r.transport]
	switch {
	case !ok && r.transport == "":
		return nil // the defaults of the system
	case !ok:
		return fmt.Errorf("its transport %.60q is not under transports; profiles are not shared between mappings", r.transport)
	case p.err != nil:
		return fmt.Errorf("its transport %.60q is invalid: %w", r.transport, p.err)
	}
	r.profile = p.profile
	return nil
}

// checkAlias returns why s cannot equal a name without prefix, tag and digest.
func checkAlias(s string) error {
	n, err := Parse(s)
	switch {
	case err != nil:
		return err
	case n.ID != "":
		return fmt.Errorf("%q is the id of an image, and those are not translated", s)
	case n.Forced != "":
		return fmt.Errorf("the prefix %s/ is taken off before names are compared; write %q without it", n.Forced, s)
	case n.Scheme != "":
		return fmt.Errorf("%q has a scheme, and such names are not translated", s)
	case n.Tag != "" || n.Digest != "":
		return fmt.Errorf("tags and digests are taken off before names are compared; write %q", n.Repo)
	}
	return nil
}

// placeholderRE finds $1, ${1}, $name, ${name} and $$ as regexp.Expand does.
var placeholderRE = regexp.MustCompile(`\$(?:\$|(\w+)|\{(\w+)\})`)

// doubt warns about legal parts of a regular expression rule that are usually a mistake.
func (m *mapping) doubt(r *rule) {
	if r.loose {
		m.warning(r.id, "its regexp matches anywhere in a name; fullMatch: true makes it match whole names only")
	}
	groups := r.regexp.SubexpNames()
	for _, found := range placeholderRE.FindAllStringSubmatch(r.url+" "+r.checksums, -1) {
		group := found[1] + found[2]
		known := group == "" || slices.Contains(groups, group)
		for i := range groups {
			known = known || group == fmt.Sprint(i)
		}
		if !known {
			m.warning(r.id, "its url uses the group %q, which its regexp does not have, so the group is empty; write ${1}x for the first group followed by x", "$"+group)
		}
	}
}

// anchored reports whether a regexp can only match whole names.
func anchored(pattern string) bool {
	re, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil || re.Op != syntax.OpConcat || len(re.Sub) < 2 {
		return false
	}
	return re.Sub[0].Op == syntax.OpBeginText && re.Sub[len(re.Sub)-1].Op == syntax.OpEndText
}

// label makes a text of a mapping fit on one line.
func label(s string) string {
	if len(s) > 100 {
		s = s[:97] + "..."
	}
	if strings.ContainsFunc(s, func(r rune) bool { return !strconv.IsPrint(r) || r == utf8.RuneError }) {
		return strconv.Quote(s)
	}
	return s
}
