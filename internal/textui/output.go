// Package textui is what our command lines have in common on a terminal: tables and JSON, sizes and durations, progress bars, raw
// terminals, and exit codes.
//
// It knows no service and no command.
package textui

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Format is the value of -o.
type Format string

// The formats of output.
const (
	FormatTable Format = "table"
	FormatJSON  Format = "json"
)

// String, Type and Set make it the value of a flag.
func (f *Format) String() string { return string(*f) }

// Type names the kind of value.
func (f *Format) Type() string { return "format" }

// Set reads the format. Errors: InvalidArgument.
func (f *Format) Set(v string) error {
	if !slices.Contains([]Format{FormatTable, FormatJSON}, Format(v)) {
		return errdefs.Invalidf("it is table or json")
	}
	*f = Format(v)
	return nil
}

// OutputFlag adds -o, and its other name --format, to cmd.
func OutputFlag(cmd *cobra.Command, f *Format) {
	*f = FormatTable
	cmd.Flags().VarP(f, "output", "o", "table or json")
	cmd.Flags().Var(f, "format", "the same as --output")
	cmd.Flags().Lookup("format").DefValue = ""
	for _, name := range []string{"output", "format"} {
		CompleteWords(cmd, name, string(FormatTable), string(FormatJSON))
	}
}

// PrintJSON writes v indented.
func PrintJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("write output: %w", err)
	}
	return nil
}

// PrintTable aligns rows under an upper-case header. Cells are sanitized: they may hold text of a guest or an image.
func PrintTable(w io.Writer, header []string, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	for _, row := range append([][]string{header}, rows...) {
		for i := range row {
			row[i] = Cell(row[i])
		}
		fmt.Fprintln(tw, strings.Join(row, "\t"))
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("write output: %w", err)
	}
	return nil
}

// Cell makes s fit for a cell: without control characters, and never empty.
func Cell(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
	if s == "" {
		return "-"
	}
	return s
}

// Age returns how long ago t was, in one unit.
func Age(now, t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	d := max(now.Sub(t), 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// CompleteWords offers these words for a flag.
func CompleteWords(cmd *cobra.Command, flag string, words ...string) {
	// Fails only for a flag that does not exist, which the first use of the command would show.
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}
