// Package section compares a generated section of the documentation with what the code says. With a flag it writes the
// section instead.
package section

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update-docs", false, "write the section of the documentation anew")

// Check compares the section called name of a file below the repository's root with want. The section is between the
// comments <!-- NAME --> and <!-- end of NAME -->.
func Check(t *testing.T, file, name, want string) {
	t.Helper()
	path := filepath.Join(Root(t), file)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	begin, end := "<!-- "+name+" -->\n", "<!-- end of "+name+" -->"
	before, rest, ok := strings.Cut(string(data), begin)
	old, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("%s has no section %q", file, name)
	}
	if old == want {
		return
	}
	if !*update {
		t.Fatalf("the section %q of %s is stale; write it anew with: go test %s -run %s -args -update-docs\n%s", name, file, "./"+here(t), t.Name(), want)
	}
	if err := os.WriteFile(path, []byte(before+begin+want+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// Root is the folder of the repository.
func Root(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		up := filepath.Dir(dir)
		if up == dir {
			t.Fatal("no go.mod above this folder")
		}
		dir = up
	}
}

func here(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	rel, err := filepath.Rel(Root(t), dir)
	if err != nil {
		t.Fatal(err)
	}
	return rel
}
