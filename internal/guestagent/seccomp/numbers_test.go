package seccomp

import (
	"bytes"
	"flag"
	"fmt"
	"go/format"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

var update = flag.Bool("update", false, "write numbers.go")

// TestNumbers: the table of names has all calls that golang.org/x/sys knows.
func TestNumbers(t *testing.T) {
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "unix", "zsysnum_linux_amd64.go"))
	if err != nil {
		t.Fatal(err)
	}
	var table bytes.Buffer
	table.WriteString("package seccomp\n\n// numbers are the numbers of system calls of 64-bit programs. TestNumbers writes this table with -update.\nvar numbers = map[string]uint32{\n")
	for _, m := range regexp.MustCompile(`(?m)^\s+SYS_(\w+)\s*= (\d+)$`).FindAllSubmatch(text, -1) {
		fmt.Fprintf(&table, "%q: %s,\n", bytes.ToLower(m[1]), m[2])
	}
	table.WriteString("}\n")
	want, err := format.Source(table.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile("numbers.go", want, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := os.ReadFile("numbers.go"); err != nil || !bytes.Equal(got, want) {
		t.Errorf("numbers.go is stale; run this test with -update: %s%v", diff.Of(string(want), string(got)), err)
	}
}
