package main

import (
	"bytes"
	"io"
	"strings"
	"testing"
)

func TestPrintenv(t *testing.T) {
	t.Setenv("with-dash.1", "value")
	for _, tt := range []struct {
		names  []string
		want   string
		status int
	}{
		{[]string{"with-dash.1"}, "value\n", 0},
		{[]string{"with-dash.1", "none"}, "value\n", 1},
	} {
		var out bytes.Buffer
		if status := run("printenv", tt.names, &out, io.Discard); status != tt.status || out.String() != tt.want {
			t.Errorf("printenv %v: %d, %q; want %d, %q", tt.names, status, out.String(), tt.status, tt.want)
		}
	}
	var out bytes.Buffer
	if run("printenv", nil, &out, io.Discard); !strings.Contains(out.String(), "with-dash.1=value\n") {
		t.Errorf("printenv lacks the variable:\n%s", out.String())
	}
}

func TestGetent(t *testing.T) {
	var out bytes.Buffer
	if status := run("getent", []string{"ahostsv4", "127.0.0.1"}, &out, io.Discard); status != 0 || !strings.HasPrefix(out.String(), "127.0.0.1 ") {
		t.Errorf("getent: %d, %q", status, out.String())
	}
	if status := run("getent", []string{"passwd", "root"}, io.Discard, io.Discard); status != 1 {
		t.Errorf("getent passwd: %d", status)
	}
}

func TestShell(t *testing.T) {
	for want, environ := range map[string][]string{
		"/bin/busybox": {"PATH=/bin", "_=x", "a1=-"},
		"/bin/bash":    {"PATH=/bin", "p-data=1"},
	} {
		if got := shell(environ); got != want {
			t.Errorf("the shell for %v is %s", environ, got)
		}
	}
}
