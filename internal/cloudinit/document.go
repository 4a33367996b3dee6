package cloudinit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// header is the first line of a cloud-config.
const header = "#cloud-config\n"

// Limits of one YAML document after its aliases are expanded.
const (
	maxDepth = 100
	maxNodes = 50_000
)

// starts are the beginnings of the documents that cloud-init understands, in lower case. cloud-init ignores any other
// document with a warning in the guest's log, so it is refused here.
var starts = []string{
	"#cloud-config", "#cloud-boothook", "#cloud-config-archive", "#cloud-config-jsonp", "#include", "#include-once",
	"#part-handler", "#upstart-job", "#!", "## template: jinja", "content-type:", "mime-version:",
}

// isConfig reports whether doc is a plain cloud-config, or empty.
func isConfig(doc string) bool {
	rest, ok := strings.CutPrefix(leading(doc), "#cloud-config")
	return doc == "" || ok && !strings.HasPrefix(rest, "-")
}

// leading is the start of doc in the form that cloud-init compares.
func leading(doc string) string {
	doc = strings.TrimLeft(doc, " \t\r\n\v\f")
	return strings.ToLower(doc[:min(len(doc), 32)])
}

// checkData checks a user-data or vendor-data document.
func checkData(name, doc string) error {
	if doc == "" {
		return nil
	}
	if isConfig(doc) {
		_, err := parse(name, doc)
		return err
	}
	if err := checkText(name, doc); err != nil {
		return err
	}
	if !slices.ContainsFunc(starts, func(s string) bool { return strings.HasPrefix(leading(doc), s) }) {
		return errdefs.Invalidf("cloud-init: %s does not begin with a header that cloud-init knows; begin it with #cloud-config or #!", name)
	}
	return nil
}

func checkText(name, doc string) error {
	switch {
	case len(doc) > maxSeed:
		return errdefs.Invalidf("cloud-init: %s has %d bytes; at most %d are possible", name, len(doc), maxSeed)
	case !utf8.ValidString(doc) || strings.ContainsRune(doc, 0):
		return errdefs.Invalidf("cloud-init: %s is not UTF-8 text", name)
	}
	return nil
}

// where finds the line number in the parser's message. The rest of the message may quote the document, which may be
// secret.
var where = regexp.MustCompile(`^yaml: (line \d+):`)

// parse reads doc, which is a YAML map or empty.
func parse(name, doc string) (*yaml.Node, error) {
	n, err := parseAny(name, doc)
	switch {
	case err != nil:
		return nil, err
	case isNull(n): // empty, or only comments
		return &yaml.Node{Kind: yaml.MappingNode}, nil
	case n.Kind != yaml.MappingNode:
		return nil, errdefs.Invalidf("cloud-init: %s is not a YAML map", name)
	}
	return n, nil
}

// parseAny reads doc and returns it with aliases and merge keys expanded, without comments and styles.
func parseAny(name, doc string) (*yaml.Node, error) {
	if err := checkText(name, doc); err != nil {
		return nil, err
	}
	dec := yaml.NewDecoder(strings.NewReader(doc))
	var n, more yaml.Node
	switch err := dec.Decode(&n); {
	case errors.Is(err, io.EOF):
		return word("null"), nil
	case err != nil:
		if m := where.FindStringSubmatch(err.Error()); m != nil {
			return nil, errdefs.Invalidf("cloud-init: %s is not YAML (%s)", name, m[1])
		}
		return nil, errdefs.Invalidf("cloud-init: %s is not YAML", name)
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, errdefs.Invalidf("cloud-init: %s holds more than one YAML document", name)
	}
	if len(n.Content) != 1 {
		return word("null"), nil
	}
	w := writer{name: name}
	return w.write(n.Content[0], 0)
}

// writer expands aliases, within limits.
type writer struct {
	name         string
	nodes, bytes int
}

func (w *writer) write(n *yaml.Node, depth int) (*yaml.Node, error) {
	w.nodes++
	w.bytes += len(n.Value) + 2*depth // with the indentation
	if depth > maxDepth || w.nodes > maxNodes || w.bytes > maxSeed {
		return nil, errdefs.Invalidf("cloud-init: %s is nested too deeply or grows too large when its aliases are written out", w.name)
	}
	switch n.Kind {
	case yaml.AliasNode:
		return w.write(n.Alias, depth+1)
	case yaml.ScalarNode:
		return w.scalar(n)
	case yaml.SequenceNode:
		if err := w.checkTag(n, "!!seq"); err != nil {
			return nil, err
		}
		out := &yaml.Node{Kind: yaml.SequenceNode}
		for _, c := range n.Content {
			v, err := w.write(c, depth+1)
			if err != nil {
				return nil, err
			}
			out.Content = append(out.Content, v)
		}
		return out, nil
	case yaml.MappingNode:
		if err := w.checkTag(n, "!!map"); err != nil {
			return nil, err
		}
		return w.mapping(n, depth)
	default:
		return nil, errdefs.Invalidf("cloud-init: %s is not YAML (line %d)", w.name, n.Line)
	}
}

func (w *writer) mapping(n *yaml.Node, depth int) (*yaml.Node, error) {
	out := &yaml.Node{Kind: yaml.MappingNode}
	seen := map[string]bool{}
	var merged []*yaml.Node
	for i := 0; i+1 < len(n.Content); i += 2 {
		value, err := w.write(n.Content[i+1], depth+1)
		if err != nil {
			return nil, err
		}
		if n.Content[i].ShortTag() == "!!merge" {
			merged = append(merged, value)
			continue
		}
		key, err := w.write(n.Content[i], depth+1)
		if err != nil {
			return nil, err
		}
		if key.Kind != yaml.ScalarNode {
			return nil, errdefs.Invalidf("cloud-init: %s has a key that is not a scalar (line %d)", w.name, n.Content[i].Line)
		}
		if seen[key.Value] {
			return nil, errdefs.Invalidf("cloud-init: %s has a key twice (line %d)", w.name, n.Content[i].Line)
		}
		seen[key.Value] = true
		out.Content = append(out.Content, key, value)
	}
	for _, m := range merged {
		sources := []*yaml.Node{m}
		if m.Kind == yaml.SequenceNode {
			sources = m.Content
		}
		for _, s := range sources {
			if s.Kind != yaml.MappingNode {
				return nil, errdefs.Invalidf("cloud-init: %s merges a value that is not a map (line %d)", w.name, n.Line)
			}
			for i := 0; i < len(s.Content); i += 2 {
				if key := s.Content[i]; !seen[key.Value] {
					seen[key.Value] = true
					out.Content = append(out.Content, key, s.Content[i+1])
				}
			}
		}
	}
	return out, nil
}

func (w *writer) checkTag(n *yaml.Node, tag string) error {
	if n.Style&yaml.TaggedStyle != 0 && n.ShortTag() != tag {
		return w.badTag(n)
	}
	return nil
}

func (w *writer) badTag(n *yaml.Node) error {
	return errdefs.Invalidf("cloud-init: %s has a YAML tag that cloud-init does not load (line %d)", w.name, n.Line)
}

// bare matches strings that may stay without quotes. cloud-init reads YAML 1.1, which does not read some of them as
// strings (yes, 22:22): they must stay as they were written. Any other string means the same with and without quotes.
var bare = regexp.MustCompile(`^[+-]?[A-Za-z0-9]([A-Za-z0-9_./+:@-]*[A-Za-z0-9_./+@-])?$`)

const quotedStyles = yaml.DoubleQuotedStyle | yaml.SingleQuotedStyle | yaml.LiteralStyle | yaml.FoldedStyle

func (w *writer) scalar(n *yaml.Node) (*yaml.Node, error) {
	tag := n.ShortTag()
	if n.Style&yaml.TaggedStyle != 0 {
		switch tag {
		case "!!str":
			return quoted(n.Value), nil
		case "!!int", "!!float", "!!bool", "!!binary", "!!timestamp":
			return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Style: yaml.TaggedStyle | yaml.DoubleQuotedStyle, Value: n.Value}, nil
		case "!!null":
			return word("null"), nil
		}
		return nil, w.badTag(n)
	}
	switch {
	case n.Style&quotedStyles != 0:
		return quoted(n.Value), nil
	case tag == "!!null":
		return word("null"), nil
	case tag == "!!str" && !bare.MatchString(n.Value):
		return quoted(n.Value), nil
	}
	return word(n.Value), nil
}

func quoted(s string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Style: yaml.DoubleQuotedStyle, Value: s}
}

// word makes a scalar that means the same without quotes.
func word(s string) *yaml.Node { return &yaml.Node{Kind: yaml.ScalarNode, Value: s} }

// emit writes a cloud-config.
func emit(n *yaml.Node) (string, error) {
	var b bytes.Buffer
	b.WriteString(header)
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(n); err != nil {
		return "", errdefs.New(errdefs.Internal, "cloud-init: a document cannot be written as YAML")
	}
	_ = enc.Close()
	if b.Len() > maxSeed {
		return "", errdefs.Invalidf("cloud-init: a document has %d bytes with its files; at most %d are possible", b.Len(), maxSeed)
	}
	return b.String(), nil
}

// plainValue returns n as a value for encoding/json. What JSON cannot express becomes a string.
func plainValue(n *yaml.Node) any {
	switch n.Kind {
	case yaml.MappingNode:
		m := make(map[string]any, len(n.Content)/2)
		for i := 0; i < len(n.Content); i += 2 {
			m[n.Content[i].Value] = plainValue(n.Content[i+1])
		}
		return m
	case yaml.SequenceNode:
		list := make([]any, 0, len(n.Content))
		for _, c := range n.Content {
			list = append(list, plainValue(c))
		}
		return list
	default:
		return plainScalar(n)
	}
}

func plainScalar(n *yaml.Node) any {
	var v any
	if n.Decode(&v) != nil {
		return n.Value
	}
	switch v := v.(type) {
	case nil, bool, int, int64, uint64, string:
		return v
	case float64:
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			return v
		}
	}
	return n.Value
}

// encodeJSON writes v with sorted keys, as JSON that is also YAML: it escapes what YAML does not allow unescaped.
func encodeJSON(name string, v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return nil, errdefs.New(errdefs.Internal, "cloud-init: %s cannot be written as JSON", name)
	}
	var out bytes.Buffer
	for _, r := range b.String() {
		if r >= 0x7f && r < 0xa0 || r == 0xfeff || r == 0xfffe || r == 0xffff {
			fmt.Fprintf(&out, `\u%04x`, r)
			continue
		}
		out.WriteRune(r)
	}
	return out.Bytes(), nil
}
