// Package capsulectl is the composition root of the operator's command line for appliances. It only passes on the process's
// environment.
package capsulectl

import (
	"context"
	"io"
	"os"

	"cocoonstack.io/cocoon/internal/capsulectl"
	"cocoonstack.io/cocoon/internal/version"
)

// Main runs one command line (without the program's name) and returns the exit code.
func Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	return capsulectl.Run(ctx, args, capsulectl.Options{Stdin: stdin, Stdout: stdout, Stderr: stderr, Getenv: os.Getenv, Version: version.Version})
}
