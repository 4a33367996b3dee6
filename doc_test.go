package cocoon

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Every package comment says in one sentence what the package is. Main packages say what they do.
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

// The table of layers in docs/architecture.md names the same folders as arch_test.go, in the same layers.
func TestArchitectureNamesTheLayers(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("docs", "architecture.md"))
	if err != nil {
		t.Fatal(err)
	}
	said := map[int][]string{}
	for _, row := range regexp.MustCompile(`(?m)^\| L(\d) [^|]*\|([^|]*)\|`).FindAllStringSubmatch(string(text), -1) {
		rank := int(row[1][0] - '0')
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[2], -1) {
			for _, dir := range expand(m[1]) {
				said[rank] = append(said[rank], strings.TrimSuffix(dir, "/*"))
			}
		}
	}
	held := map[int][]string{}
	for _, l := range layers {
		if l.rank == 9 { // tests
			continue
		}
		for _, p := range l.packages {
			held[l.rank] = append(held[l.rank], strings.TrimSuffix(p, "/"))
		}
	}
	for rank := range 8 {
		slices.Sort(said[rank])
		slices.Sort(held[rank])
		if !slices.Equal(said[rank], held[rank]) {
			t.Errorf("L%d: docs/architecture.md has %q, arch_test.go %q", rank, said[rank], held[rank])
		}
	}
}

// expand returns the names that a pattern with at most one list in braces stands for.
func expand(pattern string) []string {
	before, rest, ok := strings.Cut(pattern, "{")
	if !ok {
		return []string{pattern}
	}
	list, after, _ := strings.Cut(rest, "}")
	var all []string
	for item := range strings.SplitSeq(list, ",") {
		all = append(all, before+item+after)
	}
	return all
}

// Every file that the code tour names exists.
func TestTourNamesFilesThatExist(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("docs", "tour.md"))
	if err != nil {
		t.Fatal(err)
	}
	links := regexp.MustCompile(`\]\(\.\./([^)#]+)\)`).FindAllStringSubmatch(string(text), -1)
	if len(links) < 12 {
		t.Errorf("docs/tour.md names %d files only", len(links))
	}
	for _, m := range links {
		if _, err := os.Stat(m[1]); err != nil {
			t.Errorf("docs/tour.md names %s: %v", m[1], err)
		}
	}
}
