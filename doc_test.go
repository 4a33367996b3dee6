package cocoon

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Every package says in one sentence what it is; mains say what they do.
func TestEveryPackageHasAComment(t *testing.T) {
	for _, p := range packages(t) {
		switch {
		case p.Doc == "":
			t.Errorf("%s has no package comment", p.ImportPath)
		case len(strings.Fields(p.Doc)) < 6:
			t.Errorf("%s: the package comment %q does not say what it is", p.ImportPath, p.Doc)
		}
	}
}

// Every test that docs/security.md names exists.
func TestSecurityNamesTestsThatExist(t *testing.T) {
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	there := map[string]bool{}
	for _, dir := range []string{"api", "deploy", "guest", "internal", "test"} {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, "_test.go") {
				return err
			}
			source, err := os.ReadFile(path)
			for _, m := range declared.FindAllSubmatch(source, -1) {
				there[string(m[1])] = true
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(filepath.Join("docs", "security.md"))
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`((?:Test|Fuzz)\\w+)`").FindAllSubmatch(text, -1)
	if len(named) < 40 {
		t.Errorf("docs/security.md names %d tests only", len(named))
	}
	for _, m := range named {
		if !there[string(m[1])] {
			t.Errorf("docs/security.md names %s, which is not there", m[1])
		}
	}
}
