package pid1

import "testing"

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
