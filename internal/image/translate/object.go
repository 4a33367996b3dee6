package translate

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
)

// object is a YAML mapping. Its methods read one key each and never quote a value, which may be secret. A key with the
// value null counts as absent.
type object map[string]any

func (o object) unknown(known ...string) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(o)), func(key string) bool { return slices.Contains(known, key) })
}

func (o object) text(key string) (string, error) {
	switch v := o[key].(type) {
	case nil:
		return "", nil
	case string:
		return v, nil
	case json.Number, bool:
		return "", fmt.Errorf("%s must be a string; put it between quotes", key)
	}
	return "", fmt.Errorf("%s must be a string", key)
}

func (o object) flag(key string) (bool, error) { return value[bool](o, key, "true or false") }

func (o object) list(key string) ([]any, error) { return value[[]any](o, key, "a list") }

// object returns nil if the key is absent.
func (o object) object(key string) (object, error) {
	return value[map[string]any](o, key, "a mapping")
}

// value returns the zero value if the key is absent. kind names the type in the error.
func value[T any](o object, key, kind string) (T, error) {
	v, ok := o[key].(T)
	if !ok && o[key] != nil {
		return v, fmt.Errorf("%s must be %s", key, kind)
	}
	return v, nil
}

// number returns nil if the key is absent.
func (o object) number(key string) (*int64, error) {
	switch v := o[key].(type) {
	case nil:
		return nil, nil //nolint:nilnil // absent is neither a number nor a mistake
	case json.Number:
		if n, err := v.Int64(); err == nil {
			return &n, nil
		}
	}
	return nil, fmt.Errorf("%s must be a whole number", key)
}
