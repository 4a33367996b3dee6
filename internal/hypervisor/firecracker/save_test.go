package firecracker

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

// TestProgramReplaced: saved state is labelled with the program that runs the guest, also after another one is installed. A handle of an earlier build does not
// name the program; then the process itself says its version.
func TestProgramReplaced(t *testing.T) {
	i, api := answered(t)
	go serve(api, map[string]string{"/": `{"state":"Running"}`, "/version": `{"firecracker_version":"1.16.1"}`})
	for what, c := range map[string]struct {
		program, format string // in the handle
		now, nowFormat  string // installed
		want            string // the type of the machine, "" if it cannot be saved
	}{
		"the same":                       {"1.16.1", "10.0.0", "1.16.1", "10.0.0", "snapshot-10.0.0"},
		"replaced":                       {"1.16.1", "10.0.0", "1.17.0", "11.0.0", "snapshot-10.0.0"},
		"removed":                        {"1.16.1", "10.0.0", "", "", "snapshot-10.0.0"},
		"of an earlier build":            {"", "", "1.16.1", "10.0.0", "snapshot-10.0.0"},
		"of an earlier build, replaced":  {"", "", "1.17.0", "11.0.0", ""},
		"of an earlier build, and older": {"", "", "1.15.1", "10.0.0", ""},
	} {
		install(t, i.d, c.now, c.nowFormat)
		i.h.Program, i.h.Format = c.program, c.format
		s := &save{i: i, plan: hypervisor.SavePlan{State: "state", Memory: "memory"}}
		err := s.look(t.Context())
		switch {
		case c.want != "" && (err != nil || s.machine.Version != "1.16.1" || s.machine.Type != c.want):
			t.Errorf("%s: %s of %q, %v", what, s.machine.Type, s.machine.Version, err)
		case c.want == "" && (!errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "1.16.1") || !strings.Contains(err.Error(), c.now)):
			t.Errorf("%s: %s of %q, %v", what, s.machine.Type, s.machine.Version, err)
		}
	}
}

// TestHungSave: a program that does not answer while it saves its guest keeps nobody for ever.
func TestHungSave(t *testing.T) {
	i, _ := answered(t) // nobody serves its API
	i.d.cfg.LaunchTime = 50 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := (&save{i: i}).write(ctx); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "within 50ms") {
		t.Errorf("a save: %v", err)
	}
}

// install makes a program of that version the one of d, or none.
func install(t *testing.T, d *Driver, version, format string) {
	t.Helper()
	d.cfg.Binary = filepath.Join(t.TempDir(), "firecracker")
	if version == "" {
		return
	}
	text := fmt.Sprintf("#!/bin/sh\n[ $1 = --version ] && echo Firecracker v%s || echo v%s\n", version, format)
	if err := os.WriteFile(d.cfg.Binary, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}

// serve answers the requests to an API by their paths.
func serve(api net.Listener, answers map[string]string) {
	serveBy(api, func(path, _ string) string { return answers[path] })
}

// unheard is an answer that serveBy does not give: it hangs up.
const unheard = "-"

// serveBy answers the requests to an API, each for itself.
func serveBy(api net.Listener, answer func(path, body string) string) {
	for {
		conn, err := api.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			r, err := http.ReadRequest(bufio.NewReader(conn))
			if err != nil {
				return
			}
			body, _ := io.ReadAll(r.Body)
			text := answer(r.URL.Path, string(body))
			if text == unheard {
				return
			}
			_, _ = fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
		}()
	}
}
