package kubelet

import (
	"crypto/tls"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/guest"
)

func entry(stream, data string, second int) guest.LogEntry {
	return guest.LogEntry{Stream: stream, Data: []byte(data), Time: time.Date(2026, 1, 1, 0, 0, second, 5000, time.UTC)}
}

func TestLogs(t *testing.T) {
	n := serve(t)
	n.backend.entries = []guest.LogEntry{entry("stdout", "one\n", 1), entry("stderr", "two ", 2), entry("stderr", "halves\n", 3)}
	for query, want := range map[string]string{
		"":              "one\ntwo halves\n",
		"timestamps=1":  "2026-01-01T00:00:01.000005Z one\n2026-01-01T00:00:02.000005Z two halves\n",
		"limitBytes=6":  "one\ntw",
		"stream=Stderr": "two halves\n",
	} {
		if code, body := n.get(t, "/containerLogs/default/web/c?"+query, token("good")); code != 200 || body != want {
			t.Errorf("%q: %d %q, want %q", query, code, body, want)
		}
	}
	if n.backend.asked.Tail != -1 {
		t.Errorf("no tail was requested, but the backend got %d", n.backend.asked.Tail)
	}
	n.get(t, "/containerLogs/default/web/c?tailLines=0&previous=true&sinceTime=2026-01-01T00:00:00Z", token("good"))
	if o := n.backend.asked; o.Tail != 0 || !o.Previous || o.Since.Year() != 2026 {
		t.Errorf("the backend got %+v", o)
	}
	for _, bad := range []string{"tailLines=-1", "tailLines=x", "limitBytes=0", "sinceSeconds=0", "sinceTime=now", "follow=perhaps", "stream=x", "sinceSeconds=1&sinceTime=2026-01-01T00:00:00Z"} {
		if code, body := n.get(t, "/containerLogs/default/web/c?"+bad, token("good")); code != 400 {
			t.Errorf("%s: %d %s", bad, code, body)
		}
	}
	if code, body := n.get(t, "/containerLogs/default/new/c", token("good")); code != 400 || !strings.Contains(body, "ContainerCreating") {
		t.Errorf("a container that waits: %d %s", code, body)
	}
}

func TestLogsFollow(t *testing.T) {
	n := serve(t)
	n.backend.entries = []guest.LogEntry{entry("stdout", "now\n", 1)}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, n.addr+"/containerLogs/default/web/c?follow=true", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer good")
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: n.pool}}
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	line := make([]byte, 4)
	if _, err := io.ReadFull(resp.Body, line); err != nil || string(line) != "now\n" { // the first line arrives while the log is still open
		t.Errorf("%q, %v", line, err)
	}
	close(n.backend.hold)
	if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
		t.Errorf("%q, %v", rest, err)
	}
}

func FuzzLogQuery(f *testing.F) {
	f.Add("follow=true&tailLines=5&sinceSeconds=3&timestamps=true&limitBytes=9")
	f.Add("sinceTime=2026-01-01T00:00:00.123456789Z&stream=Stdout")
	f.Add("tailLines=99999999999999999999")
	f.Fuzz(func(t *testing.T, raw string) {
		q, err := url.ParseQuery(raw)
		if err != nil {
			return
		}
		if l, err := parseLogQuery(q, time.Unix(1e9, 0)); err == nil && (l.options.Tail < -1 || l.limit == 0) {
			t.Errorf("%q gave %+v", raw, l)
		}
	})
}
