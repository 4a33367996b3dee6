package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) vmConsoleCommand() *cobra.Command {
	var escape string
	cmd := &cobra.Command{
		Use:   "console REF",
		Short: "Connect to the serial console of a VM",
		Long: `Connect to the serial console of a VM. The escape character ends the connection, not the VM.

One person at a time can be connected.` + refHelp,
		Example: "  cocoon vm console web                      # leave with Ctrl-]\n  cocoon vm console --escape-char ^A web     # leave with Ctrl-A",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeVMs,
		RunE: func(cmd *cobra.Command, args []string) error {
			esc, err := parseEscape(escape)
			if err != nil {
				return err
			}
			return a.withClient(func(c *nodeclient.Client) error { return a.console(cmd.Context(), c, args[0], esc, escape) })
		},
	}
	cmd.Flags().StringVar(&escape, "escape-char", "^]", "character that ends the connection: ^X for Ctrl-X, or the character; empty for none")
	return cmd
}

// parseEscape returns the byte that s describes, -1 for no escape character.
func parseEscape(s string) (int, error) {
	name := strings.TrimPrefix(strings.ToLower(s), "ctrl-")
	switch {
	case s == "":
		return -1, nil
	case len(s) == 1 && s[0] < 0x80:
		return int(s[0]), nil
	case len(s) == 2 && s[0] == '^':
		name = strings.ToLower(s[1:])
	}
	if len(name) == 1 {
		if c := strings.ToUpper(name)[0]; c >= '@' && c <= '_' {
			return int(c & 0x1f), nil
		}
	}
	return 0, errdefs.Invalidf("--escape-char %q is neither a character nor ^X for Ctrl-X", s)
}

func (a *app) console(ctx context.Context, c *nodeclient.Client, ref string, esc int, escName string) error {
	con, err := c.Console(ctx, ref)
	if err != nil {
		return err
	}
	defer con.Close()
	defer context.AfterFunc(ctx, func() { con.Close() })()
	if f := textui.File(a.Stdin); f != nil && term.IsTerminal(int(f.Fd())) {
		if esc >= 0 {
			fmt.Fprintf(a.Stderr, "Connected to the console of %s; %s leaves it.\r\n", ref, escName)
		}
		restore, err := a.rawTerminal(true)
		if err != nil {
			return err
		}
		defer restore()
	}
	left := make(chan struct{})
	go func() { // ends with the process: a terminal's Read cannot be interrupted
		if typeInto(con, a.Stdin, esc) {
			close(left)
			con.Close()
		}
	}()
	_, err = io.Copy(a.Stdout, con)
	select {
	case <-left:
		return nil
	default:
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// typeInto copies keys to the console and returns true at the escape character. It returns false at the end of the
// console, or at the end of input, which is not the end of the console's output.
func typeInto(con io.Writer, in io.Reader, esc int) bool {
	buf := make([]byte, 4096)
	for {
		n, err := in.Read(buf)
		keys, escaped := buf[:n], false
		if esc >= 0 {
			if i := bytes.IndexByte(keys, byte(esc)); i >= 0 {
				keys, escaped = keys[:i], true
			}
		}
		if len(keys) > 0 {
			if _, err := con.Write(keys); err != nil && !errors.Is(err, os.ErrClosed) {
				return false
			}
		}
		if escaped {
			return true
		}
		if err != nil {
			return false
		}
	}
}
