package textui

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"

	"golang.org/x/term"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// maxSecret bounds a secret that is read, in bytes.
const maxSecret = 64 << 10

// Secret reads the first line of in, which may read more. If in is a terminal, prompt is written to out, and the terminal does not show
// what is typed. Errors: InvalidArgument, also if the line is empty; they never quote it.
func Secret(in io.Reader, out io.Writer, prompt string) (string, error) {
	var line string
	var err error
	if IsTerminal(in) {
		fmt.Fprint(out, prompt)
		var b []byte
		b, err = term.ReadPassword(int(File(in).Fd())) //nolint:gosec // a descriptor is small
		fmt.Fprintln(out)
		line = string(b)
	} else if line, err = bufio.NewReader(io.LimitReader(in, maxSecret)).ReadString('\n'); errors.Is(err, io.EOF) {
		err = nil
	}
	if err != nil {
		return "", errdefs.New(errdefs.InvalidArgument, "read a secret from standard input: %w", err)
	}
	if line = strings.TrimRight(line, "\r\n"); line == "" {
		return "", errdefs.Invalidf("standard input has no secret in its first line; write it there, such as with <FILE")
	}
	return line, nil
}
