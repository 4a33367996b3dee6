package guestagent

import (
	"strings"
	"testing"
)

func TestValueIn(t *testing.T) {
	for name, tc := range map[string]struct{ text, key, want, fails string }{
		"plain":               {"A='1'\nB='2'\n", "B", "2", ""},
		"without a last end":  {"A='1'\nB='2'", "B", "2", ""},
		"carriage returns":    {"A='1'\r\nB='x\r\ny'\r\n", "B", "x\ny", ""},
		"spaces and comments": {"# B='0'\n\n \t B='2'  # two\n", "B", "2", ""},
		"the first counts":    {"B='1'\nB='2'\n", "B", "1", ""},
		"absent":              {"A='1'\n", "B", "", ""},
		"empty file":          {"", "B", "", ""},
		"empty value":         {"B=''\n", "B", "", ""},
		"a space begins none": {"A= '1'\nB='2'\n", "A", "", ""},
		"and is skipped":      {"A= '1'\nB='2'\n", "B", "2", ""},
		"literal":             {`B='$A \n "x" #y='` + "\n", "B", `$A \n "x" #y=`, ""},
		"several lines":       {"A='1\n2\n\n3' #\nB='2'\n", "A", "1\n2\n\n3", ""},
		"behind several":      {"A='1\n2\n\n3' #\nB='2'\n", "B", "2", ""},
		"a key with space":    {"A B='2'\n", "A B", "2", ""},
		"faults after it":     {"B='2'\nnonsense\n", "B", "2", ""},
		"no =":                {"nonsense\nB='2'\n", "B", "", "line 1"},
		"no name":             {"\n='1'\nB='2'\n", "B", "", "line 2"},
		"only space":          {"# \n #\n\t\n  ='1'\n", "B", "", "line 4"},
		"space before =":      {"A ='1'\nB='2'\n", "B", "", "line 1"},
		"no quotes":           {"A=1\nB='2'\n", "B", "", "line 1"},
		"double quotes":       {"B=\"2\"\n", "B", "", "line 1"},
		"nothing":             {"A=\nB='2'\n", "B", "", "line 1"},
		"more after it":       {"A='1''2'\nB='2'\n", "B", "", "line 1"},
		"no end":              {"A='1'\nB='2\n\n", "B", "", "line 2"},
		"export":              {"export B='2'\n", "B", "", ""},
	} {
		got, err := valueIn(tc.text, tc.key)
		if got != tc.want || (err == nil) != (tc.fails == "") || err != nil && !strings.Contains(err.Error(), tc.fails) {
			t.Errorf("%s: %q, %v, want %q, %s", name, got, err, tc.want, tc.fails)
		}
	}
}

// What is written as the value of a key is read back, whatever stands before it, unless that is refused; nothing else is read.
func FuzzValueIn(f *testing.F) {
	f.Add("A='1'\n", "B", "2")
	f.Add("# x\n\nA='1\n2' # y\n", "KEY", "a\nb")
	f.Add("A= '1'\nB", "B", "")
	f.Fuzz(func(t *testing.T, before, key, value string) {
		got, err := valueIn(before, key)
		if err != nil && got != "" || got != "" && !strings.Contains(strings.ReplaceAll(before, "\r\n", "\n"), got) {
			t.Fatalf("%q, %v of %q", got, err, before)
		}
		if key == "" || strings.Trim(key, " \t") != key || strings.ContainsAny(key, "=\n#") || strings.ContainsAny(key+value, "'\r") {
			return
		}
		if before != "" && !strings.HasSuffix(before, "\n") {
			before += "\n"
		}
		with, werr := valueIn(before+key+"='"+value+"'\n", key)
		switch {
		case err == nil && got != "":
			if with != got || werr != nil {
				t.Fatalf("the first counts: %q, %v, not %q", with, werr, got)
			}
		case err == nil && werr == nil && with != value && !strings.Contains(before, key):
			t.Fatalf("%q, not %q", with, value)
		}
	})
}
