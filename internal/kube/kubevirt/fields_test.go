package kubevirt

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/instancetype/v1beta1"

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

// table returns the table of the fields of t, each of which must have a rule. Each rule must be about a field.
func (b rulebook) table(t *testing.T, of reflect.Type) string {
	t.Helper()
	var all []string
	leaves(of, "", &all)
	var table strings.Builder
	table.WriteString("| field of `spec` | outcome | |\n|---|---|---|\n")
	for _, path := range all {
		r, ok := b.of(path)
		if !ok {
			t.Errorf("%s of %s has no rule: decide whether it is honoured, and write it in fields.go or baserules.go", path, of)
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s |\n", path, r.Outcome, r.Why)
	}
	for path, r := range b {
		if !slices.ContainsFunc(all, func(f string) bool {
			return f == path || strings.HasPrefix(f, path+".") || strings.HasPrefix(f, path+"[]")
		}) {
			t.Errorf("the rule of %s is about no field", path)
		}
		if r.Outcome != Honoured && r.Why == "" {
			t.Errorf("the rule of %s gives no reason", path)
		}
	}
	return table.String()
}

// Each field of the API has an outcome, each rule is about a field, and the documentation says the same.
func TestEachFieldHasItsRule(t *testing.T) {
	for of, c := range map[reflect.Type]struct {
		rules rulebook
		least int
	}{
		reflect.TypeFor[v1.VirtualMachineInstanceSpec]():          {rules, 200},
		reflect.TypeFor[v1beta1.VirtualMachineInstancetypeSpec](): {instancetypeRules, 30},
		reflect.TypeFor[v1beta1.VirtualMachinePreferenceSpec]():   {preferenceRules, 80},
	} {
		table := c.rules.table(t, of)
		if n := strings.Count(table, "\n"); n < c.least {
			t.Errorf("%s has only %d fields", of, n)
		}
		section.Check(t, "docs/kubevirt.md", "fields of "+strings.TrimSuffix(of.Name(), "Spec"), table)
	}
}

// each calls leaf for each field of typ that has no fields of its own, with its path and a whole in which only it is set. make makes that whole.
func each(typ reflect.Type, path string, make func(reflect.Value) any, leaf func(path string, whole any)) {
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
	if inner.Kind() != reflect.Struct || !own(inner) || inner.NumField() == 0 {
		leaf(path, make(wrap(some(inner))))
		return
	}
	for i := range inner.NumField() {
		f := inner.Field(i)
		next := path
		if name := jsonName(f); name != "" {
			next = join(path, name)
		}
		each(f.Type, next, func(v reflect.Value) any {
			s := reflect.New(inner).Elem()
			s.Field(i).Set(v)
			return make(wrap(s))
		}, leaf)
	}
}

// Each field, set alone in a spec that is otherwise right, has the outcome that the table says: an error at its path, a warning that
// names it, or neither.
func TestOutcomes(t *testing.T) {
	seen := map[Outcome]int{}
	each(reflect.TypeFor[v1.VirtualMachineInstanceSpec](), "", reflect.Value.Interface, func(path string, whole any) {
		r, _ := rules.of(path)
		spec := whole.(v1.VirtualMachineInstanceSpec)
		errs, warnings := Check(&spec, nil)
		forbidden := forbidden(errs, r.Why)
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
	})
	for _, o := range []Outcome{Honoured, Warned, Refused} {
		if seen[o] < 20 {
			t.Errorf("only %d fields are %s", seen[o], o)
		}
	}
}

// forbidden lists the fields that are refused for the reason.
func forbidden(errs field.ErrorList, why string) (paths []string) {
	for _, e := range errs {
		if e.Type == field.ErrorTypeForbidden && e.Detail == why {
			paths = append(paths, index.Replace(e.Field))
		}
	}
	return paths
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
