package workload

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
)

// Changes returns the fields in which what now shall be differs from what old shall be, sorted by path. old may be nil. Fields that the
// machine sets do not count.
func Changes(old, now *capsulev1.Workload) []*capsulev1.FieldChange {
	before, after := flat(old), flat(now)
	all := maps.Clone(before)
	maps.Copy(all, after)
	var changes []*capsulev1.FieldChange
	for _, path := range slices.Sorted(maps.Keys(all)) {
		if before[path] != after[path] {
			changes = append(changes, &capsulev1.FieldChange{Path: path, Old: before[path], New: after[path]})
		}
	}
	return changes
}

// flat returns the values of all fields of w as JSON, by their path.
func flat(w *capsulev1.Workload) map[string]string {
	fields := map[string]string{}
	if w == nil {
		return fields
	}
	w = proto.CloneOf(w)
	w.Status, w.Generation, w.DesiredState = nil, 0, (Row{Workload: w}).Desired()
	text, _ := protojson.Marshal(w) // a valid message has a JSON form
	var v any
	if err := json.Unmarshal(text, &v); err == nil {
		walk("", v, fields)
	}
	return fields
}

func walk(path string, v any, into map[string]string) {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			next := k
			if path != "" {
				next = path + "." + k
			}
			walk(next, x, into)
		}
	case []any:
		for i, x := range v {
			walk(fmt.Sprintf("%s[%d]", path, i), x, into)
		}
	default:
		text, _ := json.Marshal(v) // it came from JSON
		into[path] = string(text)
	}
}
