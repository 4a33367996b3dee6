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

func (o object) flag(key string) (bool, error) {
	switch v := o[key].(type) {
	case nil:
		return false, nil
	case bool:
		return v, nil
	}
	return false, fmt.Errorf("%s must be true or false", key)
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

func (o object) list(key string) ([]any, error) {
	switch v := o[key].(type) {
	case nil:
		return nil, nil
	case []any:
		return v, nil
	}
	return nil, fmt.Errorf("%s must be a list", key)
}

// object returns nil if the key is absent.
func (o object) object(key string) (object, error) {
	switch v := o[key].(type) {
	case nil:
		return nil, nil
	case map[string]any:
		return v, nil
	}
	return nil, fmt.Errorf("%s must be a mapping", key)
}
