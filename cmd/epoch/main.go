// Command epoch is the registry of Cocoon's snapshots and images. It only sets up the process: signals and streams.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"cocoonstack.io/cocoon/internal/app/epoch"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return epoch.Main(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
}
