// Command capsulectl is the command line of the operator of an appliance. It only sets up the process: signals and streams.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"cocoonstack.io/cocoon/internal/app/capsulectl"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return capsulectl.Main(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
}
