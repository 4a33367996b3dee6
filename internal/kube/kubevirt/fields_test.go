package kubevirt

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/testkit/section"
)

// leaves lists the paths of all fields of t that walk may visit and that have no fields of their own.
func leaves(t reflect.Type, path string, out *[]string) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Struct && own(t.Elem()) {
		if t.Kind() == reflect.Slice {
			path += "[]"
		}
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || !own(t) || t.NumField() == 0 {
		if !slices.Contains(*out, path) { // a struct of Kubernetes may be a part of one of KubeVirt
			*out = append(*out, path)
		}
		return
	}
	for f := range t.Fields() {
		if name := jsonName(f); name == "" {
			leaves(f.Type, path, out)
		} else {
			leaves(f.Type, join(path, name), out)
		}
	}
}

// Each field of the API has an outcome, each rule is about a field, and the documentation says the same.
func TestEachFieldHasItsRule(t *testing.T) {
	var all []string
	leaves(reflect.TypeFor[v1.VirtualMachineInstanceSpec](), "", &all)
	if len(all) < 200 {
		t.Fatalf("the type has only %d fields", len(all))
	}
	var table strings.Builder
	table.WriteString("| field of `spec` | outcome | |\n|---|---|---|\n")
	for _, path := range all {
		r, ok := ruleFor(path)
		if !ok {
			t.Errorf("%s has no rule: decide whether it is honoured, and write it in fields.go", path)
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s |\n", path, r.Outcome, r.Why)
	}
	for path, r := range rules {
		if !slices.ContainsFunc(all, func(f string) bool {
			return f == path || strings.HasPrefix(f, path+".") || strings.HasPrefix(f, path+"[]")
		}) {
			t.Errorf("the rule of %s is about no field", path)
		}
		if r.Outcome != Honoured && r.Why == "" {
			t.Errorf("the rule of %s gives no reason", path)
		}
	}
	section.Check(t, "docs/kubevirt.md", "fields of VirtualMachineInstance", table.String())
}

// Each field, set alone in a spec that is otherwise right, has the outcome that the table says: an error at its path, a warning that
// names it, or neither.
func TestOutcomes(t *testing.T) {
	seen := map[Outcome]int{}
	var each func(t reflect.Type, path string, make func(reflect.Value) *v1.VirtualMachineInstanceSpec)
	each = func(typ reflect.Type, path string, make func(reflect.Value) *v1.VirtualMachineInstanceSpec) {
		inner, wrap := typ, func(v reflect.Value) reflect.Value { return v }
		for inner.Kind() == reflect.Pointer || inner.Kind() == reflect.Slice && inner.Elem().Kind() == reflect.Struct && own(inner.Elem()) {
			outer, before := inner, wrap
			if outer.Kind() == reflect.Slice {
				path += "[]"
				wrap = func(v reflect.Value) reflect.Value { return before(reflect.Append(reflect.MakeSlice(outer, 0, 1), v)) }
			} else {
				wrap = func(v reflect.Value) reflect.Value {
					p := reflect.New(outer.Elem())
					p.Elem().Set(v)
					return before(p)
				}
			}
			inner = inner.Elem()
		}
		if inner.Kind() == reflect.Struct && own(inner) && inner.NumField() > 0 {
			for i := range inner.NumField() {
				f := inner.Field(i)
				next := path
				if name := jsonName(f); name != "" {
					next = join(path, name)
				}
				each(f.Type, next, func(v reflect.Value) *v1.VirtualMachineInstanceSpec {
					s := reflect.New(inner).Elem()
					s.Field(i).Set(v)
					return make(wrap(s))
				})
			}
			return
		}
		r, _ := ruleFor(path)
		spec := make(wrap(some(inner)))
		errs, warnings := Check(spec, nil)
		var forbidden []string
		for _, e := range errs {
			if e.Type == "FieldValueForbidden" && e.Detail == r.Why {
				forbidden = append(forbidden, index.Replace(e.Field))
			}
		}
		switch r.Outcome {
		case Refused:
			if !slices.Contains(forbidden, path) {
				t.Errorf("%s is not refused: %v", path, errs)
			}
		case Warned:
			if !slices.ContainsFunc(warnings, func(w string) bool { return strings.HasPrefix(index.Replace(w), path+" ") }) {
				t.Errorf("nothing warns of %s: %q", path, warnings)
			}
		case Honoured:
			if slices.Contains(forbidden, path) || len(warnings) > 0 {
				t.Errorf("%s is honoured, but: %v %q", path, errs, warnings)
			}
		}
		seen[r.Outcome]++
	}
	each(reflect.TypeFor[v1.VirtualMachineInstanceSpec](), "", func(v reflect.Value) *v1.VirtualMachineInstanceSpec {
		s := v.Interface().(v1.VirtualMachineInstanceSpec)
		return &s
	})
	for _, o := range []Outcome{Honoured, Warned, Refused} {
		if seen[o] < 20 {
			t.Errorf("only %d fields are %s", seen[o], o)
		}
	}
}

var index = strings.NewReplacer("[0]", "[]")

// some returns a value of t that is not zero.
func some(t reflect.Type) reflect.Value {
	v := reflect.New(t).Elem()
	switch t.Kind() { //nolint:exhaustive // the API has no other kinds
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint, reflect.Uint32, reflect.Uint64, reflect.Uint8:
		v.SetUint(1)
	case reflect.Slice:
		v.Set(reflect.Append(v, some(t.Elem())))
	case reflect.Map:
		v.Set(reflect.MakeMap(t))
		v.SetMapIndex(some(t.Key()), reflect.New(t.Elem()).Elem())
	case reflect.Struct:
		for i := range t.NumField() { // the first that can be set makes it not zero
			if f := v.Field(i); f.CanSet() && f.Kind() != reflect.Struct && f.Kind() != reflect.Interface && f.Kind() != reflect.Pointer {
				f.Set(some(f.Type()))
				break
			}
		}
	}
	return v
}
