package settings

import (
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// maxFile is the maximum size of a file; larger ones are rejected.
const maxFile = 1 << 20

// read applies the file.
func (s *Set) read(path string) error {
	st, err := os.Stat(path)
	if err == nil && (st.Mode()&(fs.ModeDir|fs.ModeDevice) != 0 || st.Size() > maxFile) {
		return errdefs.Invalidf("configuration %s: it is not a regular file of at most 1 MiB", path)
	}
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errdefs.NotFoundf("the configuration file %s does not exist", path)
	case err != nil:
		return errdefs.Invalidf("read the configuration: %w", err)
	}
	tree, err := yaml.YAMLToJSONStrict(text)
	if err = plain(err); err == nil {
		err = s.group("", tree)
	}
	if err != nil {
		return errdefs.Invalidf("configuration %s: %w", path, err)
	}
	return nil
}

// group applies the keys below prefix. Like encoding/json, it ignores their case.
func (s *Set) group(prefix string, tree json.RawMessage) error {
	var keys map[string]json.RawMessage
	if json.Unmarshal(tree, &keys) != nil {
		return errdefs.Invalidf("%s is not a map of keys and values", cmp.Or(strings.TrimSuffix(prefix, "."), "it"))
	}
	for _, name := range slices.Sorted(maps.Keys(keys)) {
		key := prefix + name
		i := slices.IndexFunc(s.all, func(x Setting) bool { // the key, or the first one of its group
			return len(x.Key) >= len(key) && strings.EqualFold((x.Key + ".")[:len(key)+1], key+".")
		})
		switch {
		case i < 0 || name == "" || strings.Contains(name, "."):
			return errdefs.Invalidf("unknown field %q; --help lists all", key)
		case len(s.all[i].Key) > len(key):
			if err := s.group(key+".", keys[name]); err != nil {
				return err
			}
		default:
			if err := fromFile(s.all[i].Value, keys[name]); err != nil {
				return errdefs.Invalidf("%s: %w", key, err)
			}
		}
	}
	return nil
}

// fromFile gives v the value, which is JSON.
func fromFile(v Value, value json.RawMessage) error {
	var text string
	switch kind := v.Type(); {
	case string(value) == "null":
		return nil
	case kind == treeType || kind == listType || value[0] == '{' || value[0] == '[':
		return v.decode(value)
	case json.Unmarshal(value, &text) != nil: // a number, true or false
		text = string(value)
	}
	return v.Set(text)
}
