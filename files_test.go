package cocoon

import (
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// staircases are large packages. Their files must not depend on each other in a circle.
var staircases = []string{"internal/engine", "internal/kube/podprovider"}

func TestFilesPointOneWay(t *testing.T) {
	for _, dir := range staircases {
		t.Run(dir, func(t *testing.T) {
			uses := usesOf(t, dir)
			done := map[string]bool{}
			var visit func(path []string, file string)
			visit = func(path []string, file string) {
				if at := slices.Index(path, file); at >= 0 {
					for i, from := range path[at:] {
						to := append(path[at:], file)[i+1]
						t.Errorf("%s uses %s: %s", from, to, strings.Join(slices.Compact(slices.Sorted(slices.Values(uses[from][to]))), ", "))
					}
					t.Fatalf("these files depend on each other in a circle: move what is used below its users")
				}
				if done[file] {
					return
				}
				for _, to := range slices.Sorted(maps.Keys(uses[file])) {
					visit(append(slices.Clip(path), file), to)
				}
				done[file] = true
			}
			for _, file := range slices.Sorted(maps.Keys(uses)) {
				visit(nil, file)
			}
		})
	}
}

// usesOf returns, for each file of a package, the other files of the package that it uses, and what it uses of each.
// A method belongs to the file in which it is declared, not to that of its type.
func usesOf(t *testing.T, dir string) map[string]map[string][]string {
	t.Helper()
	exports := exportsBelow(t, dir)
	fset := token.NewFileSet()
	paths, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("no files in %s: %v", dir, err)
	}
	uses := map[string]map[string][]string{}
	var files []*ast.File
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
		uses[filepath.Base(path)] = map[string][]string{}
	}
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	conf := types.Config{Importer: importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })}
	p, err := conf.Check(module+"/"+dir, fset, files, info)
	if err != nil {
		t.Fatal(err)
	}
	receivers := map[token.Pos]bool{} // a method is not a use of its type
	for _, f := range files {
		for _, d := range f.Decls {
			if d, ok := d.(*ast.FuncDecl); ok && d.Recv != nil {
				ast.Inspect(d.Recv, func(n ast.Node) bool {
					if n != nil {
						receivers[n.Pos()] = true
					}
					return true
				})
			}
		}
	}
	for ident, used := range info.Uses {
		if used.Pkg() != p || receivers[ident.Pos()] {
			continue
		}
		from, to := filepath.Base(fset.Position(ident.Pos()).Filename), filepath.Base(fset.Position(used.Pos()).Filename)
		if from != to {
			uses[from][to] = append(uses[from][to], used.Name())
		}
	}
	return uses
}

// exportsBelow returns the files with the compiled declarations of the packages that dir imports, by import path.
func exportsBelow(t *testing.T, dir string) map[string]string {
	t.Helper()
	cmd := exec.Command("go", "list", "-trimpath", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", "./"+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(fmt.Errorf("go list -export: %w", err))
	}
	files := map[string]string{}
	for line := range strings.Lines(string(out)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		files[path] = file
	}
	return files
}
