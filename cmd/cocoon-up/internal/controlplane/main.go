package controlplane

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/config"
)

// Main is "cocoon-up control-plane". It returns the exit code: 0 after a
// signal and a clean stop, 1 after a failure, 2 for wrong usage.
func Main(args []string, stderr io.Writer) int {
	fs := flag.NewFlagSet("cocoon-up control-plane", flag.ContinueOnError)
	fs.SetOutput(stderr)
	path := fs.String("config", "", "configuration `file`, YAML or JSON (required)")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	if *path == "" || fs.NArg() > 0 {
		fmt.Fprintln(stderr, "usage: cocoon-up control-plane --config FILE")
		return 2
	}
	c, err := config.Load(*path)
	if err != nil {
		fmt.Fprintln(stderr, "cocoon-up:", err)
		return 2
	}

	// All files that are written from here on hold the cluster's secrets.
	syscall.Umask(0o077)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once

	log := newLogger(c, stderr)
	if err := Run(ctx, c, log); err != nil {
		log.Error("control plane failed", "err", err)
		return 1
	}
	return 0
}

func newLogger(c *config.Config, w io.Writer) *slog.Logger {
	var h slog.Handler = slog.NewTextHandler(w, nil)
	if c.LogFormat == "json" {
		h = slog.NewJSONHandler(w, nil)
	}
	return slog.New(h).With("component", "cocoon-up")
}
