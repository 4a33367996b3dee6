// Package service tells systemd how a daemon is: ready, stopping, alive. Without systemd it does nothing.
//
// What alive means is the daemon's to say; the package only asks it in time.
package service

import (
	"context"
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// Ready says that the daemon serves.
func Ready(log *slog.Logger) { notify(daemon.SdNotifyReady, log) }

// Stopping says that the daemon ends by its own will.
func Stopping(log *slog.Logger) { notify(daemon.SdNotifyStopping, log) }

func notify(state string, log *slog.Logger) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("service manager not notified", "err", err)
	}
}

// Watchdog asks alive at half of the interval that systemd waits (WatchdogSec) and passes the answer on, until ctx ends. A
// daemon that hangs in alive, or says that it is broken, is restarted by systemd. alive is given half the interval.
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
			log.Error("not alive, the watchdog is not fed", "err", err)
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
