package cocoon

import (
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
