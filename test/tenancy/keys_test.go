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

// TestEveryKeyIsDecided holds the table to the sources: every key, label, tag, prefix and function of api/contract that makes a
// name, and every name that a node makes of a VM's, has a row, or names nothing and the list says why.
func TestEveryKeyIsDecided(t *testing.T) {
	found := declared(t)
	byValue := map[string]string{}
	for name, d := range found {
		if d.value != "" {
			byValue[d.value] = name
		}
	}
	decided := map[string]string{} // by whom
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

// declaration is where something is declared, and its value if that is a constant text.
type declaration struct{ file, value string }

// declared reads the sources: constants of api/contract, but for the words of closed lists, which have types; its functions and
// methods that make or read names; and those of podprovider that make names of a VM's.
func declared(t *testing.T) map[string]declaration {
	t.Helper()
	out := map[string]declaration{}
	files, err := filepath.Glob("../../api/contract/*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("no sources of api/contract: %v", err)
	}
	values := map[string]string{}
	for _, path := range append(files, "../../internal/kube/podprovider/snapshots.go") {
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

// constants notes those of d that are texts without a type.
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

// textOf is the value of a constant expression of texts.
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

// maker is the name of a function that makes names or reads them, "" for others: of the contract's those that are exported and
// return texts, references or whether a name may be; of a node's those that are called so.
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
