package vkcocoon

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/settings"
)

// Unauthenticated metrics stay on the machine, unless an operator configures otherwise, which the log then reports.
func TestMetricsStayOnTheMachine(t *testing.T) {
	var o options
	settings.Fill(o.settings())
	if host, _, err := net.SplitHostPort(o.MetricsAddr); err != nil || !net.ParseIP(host).IsLoopback() {
		t.Errorf("by default they are served on %s", o.MetricsAddr)
	}
	for host, warned := range map[string]bool{"127.0.0.1": false, "[::1]": false, "": true, "0.0.0.0": true} {
		free, err := net.Listen("tcp", host+":0") //nolint:noctx // only to learn of a port
		if err != nil {
			t.Fatal(err)
		}
		_, port, _ := net.SplitHostPort(free.Addr().String())
		free.Close()
		var log bytes.Buffer
		n := &Node{cfg: Config{MetricsAddr: host + ":" + port}, log: slog.New(slog.NewTextHandler(&log, nil))}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- n.serveMetrics(ctx, prometheus.NewRegistry()) }()
		at := "http://" + net.JoinHostPort(strings.Trim(host, "[]"), port) + "/metrics"
		for deadline := time.Now().Add(10 * time.Second); ; <-time.After(10 * time.Millisecond) {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			if resp, err := http.DefaultClient.Do(req); err == nil {
				resp.Body.Close()
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s is not served", at)
			}
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("it ended with %v", err)
		}
		if got := strings.Contains(log.String(), "level=WARN"); got != warned {
			t.Errorf("%q: warned %v: %s", host, got, log.String())
		}
	}
}
