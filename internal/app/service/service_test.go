package service

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"time"
)

func TestWatchdogIsFedByTheLivingOnly(t *testing.T) {
	addr := &net.UnixAddr{Net: "unixgram", Name: filepath.Join(t.TempDir(), "notify")}
	l, err := net.ListenUnixgram("unixgram", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	log := slog.New(slog.DiscardHandler)
	t.Setenv("NOTIFY_SOCKET", addr.Name)
	t.Setenv("WATCHDOG_USEC", strconv.Itoa(int((20 * time.Millisecond).Microseconds())))
	var asked atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- Watchdog(ctx, func(context.Context) error {
			if asked.Add(1) <= 3 {
				return errors.New("hurt")
			}
			return nil
		}, log)
	}()
	buf := make([]byte, 64)
	n, err := l.Read(buf)
	if err != nil || string(buf[:n]) != "WATCHDOG=1" || asked.Load() < 4 {
		t.Errorf("%q, %v after %d questions", buf[:n], err, asked.Load())
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	t.Setenv("WATCHDOG_USEC", "")
	if err := Watchdog(t.Context(), nil, log); err != nil { // returns at once
		t.Error(err)
	}
}
