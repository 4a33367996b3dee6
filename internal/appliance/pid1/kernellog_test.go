package pid1

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestLastLines(t *testing.T) {
	for _, tc := range []struct {
		text  string
		lines int
		want  string
	}{
		{"", 3, ""},
		{"<6>[    1.0] one\n<30>[    2.0] pid1: two\n", 1, "[    2.0] pid1: two\n"},
		{"<6>[    1.0] one\n<30>[    2.0] pid1: two", 5, "[    1.0] one\n[    2.0] pid1: two"},
		{"n>[    1.0] cut\n<6>[    2.0] <5> is no priority\n", 2, "n>[    1.0] cut\n[    2.0] <5> is no priority\n"},
	} {
		if got := string(lastLines([]byte(tc.text), tc.lines)); got != tc.want {
			t.Errorf("%d lines of %q: %q", tc.lines, tc.text, got)
		}
	}
}

func TestLastSaid(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.log")
	if got := lastSaid(path); got != "" {
		t.Errorf("of no log: %q", got)
	}
	for text, want := range map[string]string{
		"":                                      "",
		"one\ntwo\n\n":                          "two",
		"no end":                                "no end",
		strings.Repeat("x", 1000):               strings.Repeat("x", 400),
		"a\n" + strings.Repeat("é", 300) + "\n": "?" + strings.Repeat("é", 199),
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := lastSaid(path); got != want {
			t.Errorf("of %q: %q, want %q", text, got, want)
		}
	}
}
