package capsulectl

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/textui"
)

// leaves calls fn for every command that does something.
func leaves(c *cobra.Command, fn func(*cobra.Command)) {
	if len(c.Commands()) == 0 {
		fn(c)
	}
	for _, sub := range c.Commands() {
		leaves(sub, fn)
	}
}

// docs/capsulectl.md names every command as it is used, and no other.
func TestDocumentNamesTheCommands(t *testing.T) {
	text, err := os.ReadFile("../../docs/capsulectl.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "| `") {
			rows++
		}
	}
	a := &app{Options: Options{Getenv: func(string) string { return "" }}}
	leaves(a.root(), func(c *cobra.Command) {
		use := strings.TrimPrefix(strings.TrimSuffix(c.UseLine(), " [flags]"), "capsulectl ")
		if !strings.Contains(string(text), "| `"+strings.ReplaceAll(use, "|", `\|`)+"`") && c.Name() != "exit-codes" && c.Name() != "version" {
			t.Errorf("docs/capsulectl.md has no row `%s`", use)
		}
		rows--
	})
	if rows != -2 { // exit-codes and version have none
		t.Errorf("docs/capsulectl.md has %d rows too many", rows+2)
	}
}

func TestHelp(t *testing.T) {
	a := &app{Options: Options{Getenv: func(string) string { return "" }}}
	leaves(a.root(), func(c *cobra.Command) {
		if c.Short == "" || strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: %q", c.CommandPath(), c.Short)
		}
	})
}

func TestExitCodesAreDocumented(t *testing.T) {
	for class := errdefs.Internal; class <= errdefs.DeadlineExceeded; class++ {
		if code := textui.ExitCode(errdefs.New(class, "x")); !strings.Contains(exitCodesText, fmt.Sprintf("%5d  ", code)) {
			t.Errorf("%v: the exit code %d is not in the help", class, code)
		}
	}
}
