package tenancy

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestEveryKeyIsDecided compares the table with the sources. Every key, label, tag, prefix and name function of api/contract, and
// every name that a node derives from a VM's name, must have a row, or be in the list of those that name nothing, with a reason.
func TestEveryKeyIsDecided(t *testing.T) {
	found := declared(t)
	byValue := map[string]string{}
	for name, d := range found {
		if d.value != "" {
			byValue[d.value] = name
		}
	}
	decided := map[string]string{} // by row
	for i := range rows {
		r := &rows[i]
		for _, m := range []map[string]string{r.Ask, r.On} {
			for key := range m {
				if byValue[key] == "" {
					t.Errorf("the row %q asks by %s, which is no key of api/contract", r.Name, key)
				}
				decided[byValue[key]] = r.Name
			}
		}
		for _, name := range r.Forms {
			if _, there := found[name]; !there {
				t.Errorf("the row %q decides %s, which is not in the sources any more", r.Name, name)
			}
			decided[name] = r.Name
		}
		for _, w := range Columns {
			if c := r.Cells[w]; (c.None == "") == (c.Node.State == "") {
				t.Errorf("the row %q does not say what becomes of a pod that names what is %s: neither an outcome nor why there is none", r.Name, w)
			}
		}
	}
	for name, why := range nothing {
		switch _, there := found[name]; {
		case !there:
			t.Errorf("%s, which names nothing (%s), is not in the sources any more", name, why)
		case why == "":
			t.Errorf("say why %s names nothing", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(found)) {
		_, none := nothing[name]
		switch {
		case decided[name] == "" && !none:
			t.Errorf("%s (%s) is new: decide in test/tenancy/table.go whose things a pod can name by it, with a row, or in test/tenancy/nothing.go why it names nothing", name, found[name].file)
		case decided[name] != "" && none:
			t.Errorf("%s has the row %q, and is said to name nothing", name, decided[name])
		}
	}
	names := map[string]bool{}
	for _, c := range Cases() {
		if names[c.PodName()] {
			t.Errorf("two cells have a pod %s", c.PodName())
		}
		names[c.PodName()] = true
	}
}

// declaration is the file of a declaration, and its value if it is a constant string.
type declaration struct{ file, value string }

// declared reads the sources: the constants of api/contract without a type (the words of closed lists have types), its functions
// and methods that make or parse names, and the functions of podsnapshots that derive names from a VM's name.
func declared(t *testing.T) map[string]declaration {
	t.Helper()
	out := map[string]declaration{}
	files, err := filepath.Glob("../../api/contract/*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("no sources of api/contract: %v", err)
	}
	values := map[string]string{}
	for _, path := range append(files, "../../internal/kube/podsnapshots/podsnapshots.go") {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.GenDecl:
				if d.Tok == token.CONST && f.Name.Name == "contract" {
					constants(d, strings.TrimPrefix(path, "../../"), values, out)
				}
			case *ast.FuncDecl:
				if name := maker(d, f.Name.Name == "contract"); name != "" {
					out[name] = declaration{file: strings.TrimPrefix(path, "../../")}
				}
			}
		}
	}
	return out
}

// constants records the constants of d that are strings without a type.
func constants(d *ast.GenDecl, file string, values map[string]string, out map[string]declaration) {
	for _, s := range d.Specs {
		spec := s.(*ast.ValueSpec)
		for i, id := range spec.Names {
			if i >= len(spec.Values) {
				continue
			}
			value, ok := textOf(spec.Values[i], values)
			values[id.Name] = value
			if ok && spec.Type == nil && (id.IsExported() || strings.HasSuffix(id.Name, "Prefix")) {
				out[id.Name] = declaration{file, value}
			}
		}
	}
}

// textOf is the value of a constant string expression.
func textOf(e ast.Expr, values map[string]string) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		s, err := strconv.Unquote(e.Value)
		return s, err == nil && e.Kind == token.STRING
	case *ast.Ident:
		s, ok := values[e.Name]
		return s, ok
	case *ast.BinaryExpr:
		x, okX := textOf(e.X, values)
		y, okY := textOf(e.Y, values)
		return x + y, okX && okY
	}
	return "", false
}

// maker returns the name of a function that makes or parses names, "" for others. In the contract these are exported functions
// that return strings, references, or whether a name is allowed. In a node these are functions whose name ends in Name.
func maker(d *ast.FuncDecl, contract bool) string {
	name := d.Name.Name
	if !contract {
		if d.Recv == nil && strings.HasSuffix(name, "Name") {
			return name
		}
		return ""
	}
	if !d.Name.IsExported() || d.Type.Results == nil {
		return ""
	}
	if d.Recv != nil && len(d.Recv.List) == 1 {
		on := d.Recv.List[0].Type
		if star, ok := on.(*ast.StarExpr); ok {
			on = star.X
		}
		if id, ok := on.(*ast.Ident); ok {
			name = id.Name + "." + name
		}
	}
	switch r := d.Type.Results.List[0].Type.(type) {
	case *ast.Ident:
		if slices.Contains([]string{"string", "SnapshotRef", "int"}, r.Name) || strings.Contains(name, "Name") || strings.HasPrefix(name, "Member.") {
			return name
		}
	case *ast.ArrayType:
		if id, ok := r.Elt.(*ast.Ident); ok && id.Name == "string" {
			return name
		}
	}
	return ""
}
