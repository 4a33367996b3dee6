package manifest

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// field is a key of a mapping with its value.
type field struct {
	name       string
	key, value *yaml.Node
}

func orZero(n *yaml.Node) *yaml.Node {
	if n == nil {
		return &yaml.Node{}
	}
	return n
}

// resolve follows an alias. It returns nil when the document is too large, which is a problem then.
func (r *reader) resolve(n *yaml.Node) *yaml.Node {
	r.nodes++
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	switch {
	case r.nodes == maxNodes:
		r.problem(n, "document", "it has more than %d nodes", maxNodes)
		return nil
	case r.nodes > maxNodes:
		return nil
	}
	return n
}

// fields returns the fields of a mapping, with those that <<: merges into it.
func (r *reader) fields(n *yaml.Node, path string) []field {
	var own, merged []field
	has := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], r.resolve(n.Content[i+1])
		switch {
		case value == nil:
			return nil
		case key.Kind != yaml.ScalarNode:
			r.problem(key, cmp.Or(path, "document"), "a key is no word")
		case key.Tag == "!!merge":
			merged = append(merged, r.merged(value, path)...)
		case has[key.Value]:
			r.problem(key, join(path, key.Value), "it is there twice")
		default:
			has[key.Value] = true
			own = append(own, field{key.Value, key, value})
		}
	}
	for _, f := range merged {
		if !has[f.name] {
			has[f.name] = true
			own = append(own, f)
		}
	}
	return own
}

func (r *reader) merged(n *yaml.Node, path string) (out []field) {
	switch n.Kind {
	case yaml.MappingNode:
		return r.fields(n, path)
	case yaml.SequenceNode:
		for _, part := range n.Content {
			if part = r.resolve(part); part != nil && part.Kind == yaml.MappingNode {
				out = append(out, r.fields(part, path)...)
			}
		}
	default:
		r.problem(n, join(path, "<<"), "it must be a mapping, or a list of them")
	}
	return out
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// message sets the fields of m.
func (r *reader) message(path string, m protoreflect.Message, fields []field) {
	all := m.Descriptor().Fields()
	for _, f := range fields {
		at := join(path, f.name)
		d := all.ByJSONName(f.name)
		if d == nil {
			d = all.ByTextName(f.name) // as the API writes it: host_port
		}
		if d == nil {
			var names []string
			for i := range all.Len() {
				names = append(names, all.Get(i).JSONName())
			}
			r.problem(f.key, at, "there is no such field%s", suggestion(f.name, names))
			continue
		}
		if f.value.Tag == "!!null" && f.value.Kind == yaml.ScalarNode {
			continue // as if it were not there
		}
		if one := d.ContainingOneof(); one != nil && !one.IsSynthetic() {
			if other := m.WhichOneof(one); other != nil && other != d {
				r.problem(f.key, at, "%s is there too; only one of them can be", other.JSONName())
				continue
			}
		} else if m.Has(d) {
			r.problem(f.key, at, "it is there twice, in two ways of writing it")
			continue
		}
		r.set(f.value, at, m, d)
	}
}

// set sets one field of m.
func (r *reader) set(n *yaml.Node, path string, m protoreflect.Message, d protoreflect.FieldDescriptor) {
	switch {
	case d.IsMap():
		r.env(n, path, m.Mutable(d).Map())
	case d.IsList():
		if n.Kind != yaml.SequenceNode {
			r.problem(n, path, "it must be a list")
			return
		}
		list := m.Mutable(d).List()
		for i, item := range n.Content {
			if item = r.resolve(item); item == nil {
				return
			}
			at := path + "[" + strconv.Itoa(i) + "]"
			if d.Message() != nil {
				r.nested(item, at, list.AppendMutable().Message())
			} else if v, ok := r.scalar(item, at, d); ok {
				list.Append(v)
			}
		}
	case d.Message() != nil:
		r.nested(n, path, m.Mutable(d).Message())
	default:
		if v, ok := r.scalar(n, path, d); ok {
			m.Set(d, v)
		}
	}
}

func (r *reader) nested(n *yaml.Node, path string, m protoreflect.Message) {
	if n.Kind != yaml.MappingNode {
		r.problem(n, path, "it must be a mapping")
		return
	}
	r.message(path, m, r.fields(n, path))
}

// env reads variables: a mapping of names to values, or a list of {name, value}.
func (r *reader) env(n *yaml.Node, path string, m protoreflect.Map) {
	set := func(at *yaml.Node, name, value string) {
		key := protoreflect.ValueOfString(name).MapKey()
		switch {
		case name == "" || strings.ContainsAny(name, "=\x00"):
			r.problem(at, path, "%q is no name of a variable", name)
		case m.Has(key):
			r.problem(at, path, "%s is there twice", name)
		default:
			m.Set(key, protoreflect.ValueOfString(value))
		}
	}
	switch n.Kind {
	case yaml.MappingNode:
		for _, f := range r.fields(n, path) {
			if value, ok := r.text(f.value, join(path, f.name)); ok {
				set(f.key, f.name, value)
			}
		}
	case yaml.SequenceNode:
		for i, item := range n.Content {
			at := path + "[" + strconv.Itoa(i) + "]"
			if item = r.resolve(item); item == nil {
				return
			}
			if item.Kind != yaml.MappingNode {
				r.problem(item, at, "it must be a mapping of name and value")
				continue
			}
			var name, value string
			for _, f := range r.fields(item, at) {
				switch f.name {
				case "name":
					name, _ = r.text(f.value, join(at, f.name))
				case "value":
					value, _ = r.text(f.value, join(at, f.name))
				default:
					r.problem(f.key, join(at, f.name), "there is no such field%s", suggestion(f.name, []string{"name", "value"}))
				}
			}
			set(item, name, value)
		}
	default:
		r.problem(n, path, "it must be a mapping, or a list of name and value")
	}
}

// text returns a scalar as it is written, "" for null.
func (r *reader) text(n *yaml.Node, path string) (string, bool) {
	switch {
	case n.Kind != yaml.ScalarNode:
		r.problem(n, path, "it must be a single value")
		return "", false
	case n.Tag == "!!null":
		return "", true
	case n.Tag == "!!binary" || strings.Contains(n.Value, "\x00"):
		r.problem(n, path, "it must be text")
		return "", false
	}
	return n.Value, true
}

// scalar returns a value of the type of d.
func (r *reader) scalar(n *yaml.Node, path string, d protoreflect.FieldDescriptor) (protoreflect.Value, bool) {
	s, ok := r.text(n, path)
	if !ok {
		return protoreflect.Value{}, false
	}
	switch d.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(s), true
	case protoreflect.BoolKind:
		if n.Tag == "!!bool" {
			return protoreflect.ValueOfBool(strings.EqualFold(s, "true")), true
		}
		r.problem(n, path, "it must be true or false, not %q", s)
	case protoreflect.EnumKind:
		return r.enum(n, path, s, d.Enum())
	case protoreflect.Uint32Kind:
		v, err := strconv.ParseUint(s, 10, 32)
		if err == nil && (n.Tag == "!!int" || n.Tag == "!!str") {
			return protoreflect.ValueOfUint32(uint32(v)), true
		}
		r.problem(n, path, "it must be a number from 0 to 4294967295, not %q", s)
	case protoreflect.Uint64Kind, protoreflect.Int64Kind, protoreflect.Int32Kind: // of what only the machine sets
		v, err := strconv.ParseInt(s, 10, 32)
		if d.Kind() != protoreflect.Int32Kind {
			v, err = strconv.ParseInt(s, 10, 64)
		}
		switch {
		case err != nil || v < 0 && d.Kind() == protoreflect.Uint64Kind:
			r.problem(n, path, "it must be a number, not %q", s)
		case d.Kind() == protoreflect.Uint64Kind:
			return protoreflect.ValueOfUint64(uint64(v)), true
		case d.Kind() == protoreflect.Int64Kind:
			return protoreflect.ValueOfInt64(v), true
		default:
			return protoreflect.ValueOfInt32(int32(v)), true //nolint:gosec // parsed as 32 bits
		}
	default:
		r.problem(n, path, "it cannot be set in a manifest")
	}
	return protoreflect.Value{}, false
}

// enum finds a value by its whole name or the part that differs: NETWORK_MODE_HOST, host; RESTART_POLICY_ON_FAILURE, on-failure.
func (r *reader) enum(n *yaml.Node, path, s string, e protoreflect.EnumDescriptor) (protoreflect.Value, bool) {
	prefix := strings.TrimSuffix(string(e.Values().Get(0).Name()), "UNSPECIFIED")
	var short []string
	for i := range e.Values().Len() {
		v := e.Values().Get(i)
		rest := strings.TrimPrefix(string(v.Name()), prefix)
		if word(s) == word(rest) || word(s) == word(string(v.Name())) {
			return protoreflect.ValueOfEnum(v.Number()), true
		}
		if i > 0 {
			short = append(short, strings.ToLower(strings.ReplaceAll(rest, "_", "-")))
		}
	}
	r.problem(n, path, "%q is none of %s", s, strings.Join(short, ", "))
	return protoreflect.Value{}, false
}

// word is s without what people write differently.
func word(s string) string {
	return strings.ToLower(strings.NewReplacer("_", "", "-", "").Replace(s))
}

// suggestion names the field that was meant, if it is clear.
func suggestion(name string, known []string) string {
	best := slices.MinFunc(known, func(a, b string) int { return distance(name, a) - distance(name, b) })
	if d := distance(name, best); d > 2 || d >= len(name) {
		return ""
	}
	return "; is it " + best + "?"
}

// distance counts the letters to change, add, remove or swap between a and b; more than 2 is not exact.
func distance(a, b string) int {
	a, b = strings.ToLower(a[:min(len(a), 64)]), strings.ToLower(b)
	rows := [3][]int{make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)}
	for j := range rows[1] {
		rows[1][j] = j
	}
	for i := 1; i <= len(a); i++ {
		rows[2][0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			rows[2][j] = min(rows[1][j]+1, rows[2][j-1]+1, rows[1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[2][j] = min(rows[2][j], rows[0][j-2]+1)
			}
		}
		rows[0], rows[1], rows[2] = rows[1], rows[2], rows[0]
	}
	return rows[1][len(b)]
}
