// Package service reports the state of a daemon to systemd: ready, stopping, alive. Without systemd it does nothing.
//
// The daemon defines what alive means; the package only calls it in time.
package service

import (
	"context"
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// Ready reports that the daemon serves.
func Ready(log *slog.Logger) { notify(daemon.SdNotifyReady, log) }

// Stopping reports that the daemon ends on purpose.
func Stopping(log *slog.Logger) { notify(daemon.SdNotifyStopping, log) }

func notify(state string, log *slog.Logger) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("service manager not notified", "err", err)
	}
}

// Watchdog calls alive at half of systemd's interval (WatchdogSec) and reports the result, until ctx ends. systemd
// restarts a daemon that blocks in alive or reports an error. alive has a timeout of half the interval.
func Watchdog(ctx context.Context, alive func(context.Context) error, log *slog.Logger) error {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("the watchdog's interval cannot be read", "err", err)
	}
	if err != nil || interval <= 0 {
		return nil
	}
	tick := time.NewTicker(interval / 2)
	defer tick.Stop()
	for {
		ask, cancel := context.WithTimeout(ctx, interval/2)
		err := alive(ask)
		cancel()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			log.Error("health check failed, watchdog not notified", "err", err)
		default:
			notify(daemon.SdNotifyWatchdog, log)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
