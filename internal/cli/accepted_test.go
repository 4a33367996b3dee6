package cli

import (
	"io"
	"os"
	"strings"
	"testing"
)

// A row of the table that names no command, or a flag that the command has with an effect, would be a mistake in it.
func TestAcceptedFlagsBelongToCommands(t *testing.T) {
	a := &app{Options: Options{Stdout: io.Discard, Stderr: io.Discard, Getenv: func(string) string { return "" }}}
	root := a.root()
	doc, err := os.ReadFile("../../docs/compat.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range acceptedFlags {
		if !strings.Contains(string(doc), "`--"+f.flag+"`") {
			t.Errorf("docs/compat.md does not name --%s", f.flag)
		}
		if f.command == "" {
			continue
		}
		for command := range strings.SplitSeq(f.command, "|") {
			cmd, rest, err := root.Find(strings.Fields(command))
			if err != nil || len(rest) > 0 || path(cmd) != command {
				t.Errorf("--%s: there is no command %q", f.flag, command)
				continue
			}
			if cmd.Flags().Lookup(f.flag) == nil {
				t.Errorf("%s has no --%s", command, f.flag)
			}
			if help := cmd.UsageString(); !strings.Contains(help, "Accepted without effect") || !strings.Contains(help, f.reason) {
				t.Errorf("the help of %s lacks --%s:\n%s", command, f.flag, help)
			}
		}
	}
	if help := root.UsageString(); !strings.Contains(help, "--cni-bin-dir DIR") || strings.Contains(help, "--no-direct-io") {
		t.Errorf("help of cocoon:\n%s", help)
	}
}
