// Command cocoond is the node daemon of Cocoon. It only sets up the process: signals, streams and umask.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"cocoonstack.io/cocoon/internal/app/cocoond"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	syscall.Umask(0o022) // each file has the mode that its code asks for, whoever starts the daemon
	return cocoond.Main(ctx, os.Args[1:], os.Stdout, os.Stderr)
}
