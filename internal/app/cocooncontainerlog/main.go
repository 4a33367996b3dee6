// Package cocooncontainerlog wires the program that serves the log of a container. It is a program of its own, because there is one process
// of it per container, and cocoond needs several times its memory before it does anything.
package cocooncontainerlog

import (
	"fmt"
	"os"

	"cocoonstack.io/cocoon/internal/container/containerd/shimlog"
)

// Main runs the program, and returns its exit code.
func Main(args []string) int {
	if len(args) != 2 || args[0] != shimlog.Command {
		fmt.Fprintf(os.Stderr, "usage: cocoon-container-log %s DIR\nA shim of containerd starts it, with the output of the container as descriptors 3 and 4.\n", shimlog.Command)
		return 2
	}
	if err := shimlog.Serve(args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "container-log:", err)
		return 1
	}
	return 0
}
