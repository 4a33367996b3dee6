// Command cocoon-manager runs the controllers of Cocoon's custom resources.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"cocoonstack.io/cocoon/internal/app/cocoonmanager"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := cocoonmanager.Main(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
