// Package diff says how the value that a test got differs from the one that it wants.
//
// It decides as reflect.DeepEqual does: unexported fields count, nil is not empty, and methods called Equal have no say.
package diff

import (
	"reflect"

	"github.com/google/go-cmp/cmp"
)

// options let cmp compare what reflect.DeepEqual compares. cmp only describes the difference.
var options = cmp.Options{
	cmp.Exporter(func(reflect.Type) bool { return true }),
	cmp.FilterPath(
		func(p cmp.Path) bool { _, ok := p.Last().Type().MethodByName("Equal"); return ok },
		cmp.Comparer(func(a, b any) bool { return reflect.DeepEqual(a, b) }),
	),
}

// Of returns "" if the values are deeply equal, and otherwise a title and the lines that differ. These are for people:
// their form is not the same in every build.
func Of[T any](want, got T) string {
	if reflect.DeepEqual(want, got) {
		return ""
	}
	return "-want +got:\n" + cmp.Diff(want, got, options)
}
