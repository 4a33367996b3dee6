package cloudinit

import "go.yaml.in/yaml/v3"

// Merge returns the cloud-config base with over merged into it, in the way of Virtlet: maps are merged key by key, lists
// are appended, any other value in over replaces the one in base, and null replaces nothing. "" is an empty document.
func Merge(base, over string) (string, error) {
	b, err := parse("the document", base)
	if err != nil {
		return "", err
	}
	o, err := parse("the document", over)
	if err != nil {
		return "", err
	}
	return emit(merge(b, o))
}

// SetKey returns the cloud-config doc with key set to value, which is YAML of any kind.
func SetKey(doc, key, value string) (string, error) {
	base, err := parse("the document", doc)
	if err != nil {
		return "", err
	}
	v, err := parseAny("the value", value)
	if err != nil {
		return "", err
	}
	if i, ok := keysOf(base)[key]; ok {
		base.Content[i+1] = v
	} else {
		base.Content = append(base.Content, quoted(key), v)
	}
	return emit(base)
}

// merge returns base with over merged into it. It may change both, and the result may share memory with them.
func merge(base, over *yaml.Node) *yaml.Node {
	switch {
	case isNull(over):
		return base
	case base.Kind == yaml.MappingNode && over.Kind == yaml.MappingNode:
		at := keysOf(base)
		for i := 0; i < len(over.Content); i += 2 {
			key, value := over.Content[i], over.Content[i+1]
			if j, ok := at[key.Value]; ok {
				base.Content[j+1] = merge(base.Content[j+1], value)
				continue
			}
			base.Content = append(base.Content, key, value)
		}
		return base
	case base.Kind == yaml.SequenceNode && over.Kind == yaml.SequenceNode:
		base.Content = append(base.Content, over.Content...)
		return base
	}
	return over
}

// keysOf maps each key of a mapping to its position in n.Content.
func keysOf(n *yaml.Node) map[string]int {
	at := make(map[string]int, len(n.Content)/2)
	for i := 0; i < len(n.Content); i += 2 {
		at[n.Content[i].Value] = i
	}
	return at
}

func isNull(n *yaml.Node) bool {
	return n.Kind == yaml.ScalarNode && n.Style == 0 && n.ShortTag() == "!!null"
}
