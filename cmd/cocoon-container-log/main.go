// Command cocoon-container-log is what the shim of a container starts: it writes the log of the container, and keeps how it has ended.
package main

import (
	"os"

	"cocoonstack.io/cocoon/internal/app/cocooncontainerlog"
)

func main() { os.Exit(cocooncontainerlog.Main(os.Args[1:])) }
