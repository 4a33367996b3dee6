package nodejson

import (
	"encoding/json"
	"maps"
	"slices"
)

// IDs is a set of ids, an object with an empty object for each id.
type IDs map[string]struct{}

// UnmarshalJSON also accepts a list of ids, as earlier releases print it.
func (s *IDs) UnmarshalJSON(text []byte) error {
	var list []string
	if json.Unmarshal(text, &list) == nil {
		*s = newIDs(list)
		return nil
	}
	return json.Unmarshal(text, (*map[string]struct{})(s))
}

// newIDs returns the set of the ids in list. It is never nil: null is not an object.
func newIDs(list []string) IDs {
	s := make(IDs, len(list))
	for _, id := range list {
		s[id] = struct{}{}
	}
	return s
}

// list returns the ids in alphabetical order, nil if there are none.
func (s IDs) list() []string { return slices.Sorted(maps.Keys(s)) }
