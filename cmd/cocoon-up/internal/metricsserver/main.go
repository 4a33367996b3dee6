// Package metricsserver is the unmodified metrics-server. It only includes it
// in this binary.
package metricsserver

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"sigs.k8s.io/metrics-server/cmd/metrics-server/app"
)

// Main runs metrics-server with its own flags until a signal arrives, and
// returns the exit code.
func Main(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once

	cmd := app.NewMetricsServerCommand(ctx.Done())
	cmd.Use = "cocoon-up metrics-server"
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetArgs(args)
	if err := cmd.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "metrics-server:", err)
		return 1
	}
	return 0
}
