package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestFreeName(t *testing.T) {
	taken := []vm.Record{{Spec: vm.Spec{Name: "cocoon-demo"}}, {Spec: vm.Spec{Name: "cocoon-demo-2"}}}
	long := strings.Repeat("x", 80)
	for image, want := range map[string]string{
		"demo":                            "cocoon-demo-3",
		"cocoon/demo:latest":              "cocoon-demo-3",
		"debian:12":                       "cocoon-debian",
		"reg.example:5000/a/b.c_d@sha256": "cocoon-b.c_d",
		"sha256:abc":                      "cocoon-sha256",
		"https://me:pw@h.example/d.img?k": "cocoon-d.img",
		"we ird/na me!":                   "cocoon-na-me",
		"/":                               "cocoon",
		long:                              ("cocoon-" + long)[:vm.MaxNameLength],
	} {
		got := freeName(image, taken)
		if got != want {
			t.Errorf("freeName(%q) = %q, want %q", image, got, want)
		}
		if err := vm.ValidateName(got); err != nil {
			t.Errorf("freeName(%q): %v", image, err)
		}
	}
	first := freeName(long, nil)
	if second := freeName(long, []vm.Record{{Spec: vm.Spec{Name: first}}}); second == first || len(second) > vm.MaxNameLength {
		t.Errorf("a long name that is taken became %q", second)
	}
}

func TestParseEscape(t *testing.T) {
	for in, want := range map[string]int{"^]": 0x1d, "^a": 1, "^A": 1, "ctrl-]": 0x1d, "Ctrl-X": 0x18, "~": '~', "": -1, "^": '^'} {
		if got, err := parseEscape(in); err != nil || got != want {
			t.Errorf("parseEscape(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"^1", "ab", "ctrl-", "ctrl-ab", "é", "^é"} {
		if got, err := parseEscape(in); !errdefs.IsInvalid(err) {
			t.Errorf("parseEscape(%q) = %d, %v", in, got, err)
		}
	}
}

func TestParseSince(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	for in, want := range map[string]time.Time{
		"": {}, "10m": now.Add(-10 * time.Minute), "2026-11-21T10:00:00Z": now.Add(-2 * time.Hour),
	} {
		if got, err := parseSince(in, now); err != nil || !got.Equal(want) {
			t.Errorf("parseSince(%q) = %v, %v", in, got, err)
		}
	}
	for _, in := range []string{"yesterday", "-5m", "10"} {
		if _, err := parseSince(in, now); !errdefs.IsInvalid(err) {
			t.Errorf("parseSince(%q): %v", in, err)
		}
	}
}

func TestStampsBeginLines(t *testing.T) {
	var out bytes.Buffer
	p := printer{w: &out, stamps: true}
	at := func(s int) time.Time { return time.Date(2026, 1, 1, 0, 0, s, 0, time.UTC) }
	for _, e := range []guest.LogEntry{
		{Time: at(1), Data: []byte("one\ntwo\n")}, {Time: at(2), Data: []byte("par")}, {Time: at(3), Data: []byte("tial\n")}, {Time: at(4), Data: []byte("\n")},
	} {
		if err := p.print(e); err != nil {
			t.Fatal(err)
		}
	}
	stamp := func(s int) string { return fmt.Sprintf("2026-01-01T00:00:%02d.000000000Z ", s) }
	want := stamp(1) + "one\n" + stamp(1) + "two\n" + stamp(2) + "partial\n" + stamp(4) + "\n"
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", out.String(), want)
	}
}

func TestExitCodesAreDocumented(t *testing.T) {
	for class := errdefs.Internal; class <= errdefs.DeadlineExceeded; class++ {
		if code := textui.ExitCode(errdefs.New(class, "x")); !strings.Contains(exitCodesText, fmt.Sprintf("%5d  ", code)) {
			t.Errorf("exit code %d of class %v is not in `cocoon help exit-codes`", code, class)
		}
	}
}

func TestReport(t *testing.T) {
	interrupted, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		ctx  context.Context
		err  error
		code int
		text string
	}{
		{t.Context(), nil, 0, ""},
		{t.Context(), textui.CommandExit(7), 7, ""},
		{t.Context(), errors.New("boom"), 1, "Error: boom\n"},
		{t.Context(), errors.Join(errdefs.NotFoundf("a"), errdefs.Invalidf("b")), 3, "Error: a\nError: b\n"},
		{interrupted, interrupted.Err(), 130, ""},
		{t.Context(), errdefs.New(errdefs.Canceled, "nothing was changed"), 130, "Error: nothing was changed\n"},
	} {
		var out bytes.Buffer
		if code := textui.Report(c.ctx, &out, c.err); code != c.code || out.String() != c.text {
			t.Errorf("%v: code %d, %q; want %d, %q", c.err, code, out.String(), c.code, c.text)
		}
	}
}

func TestCellsCannotForgeLines(t *testing.T) {
	var out bytes.Buffer
	if err := textui.PrintTable(&out, []string{"A", "B"}, [][]string{{"x\nEVIL\x1b[2J", ""}}); err != nil {
		t.Fatal(err)
	}
	if got := out.String(); strings.Count(got, "\n") != 2 || strings.Contains(got, "\x1b") || !strings.HasSuffix(got, "-\n") {
		t.Errorf("%q", got)
	}
}
