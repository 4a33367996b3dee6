// Package settingsdoc keeps the documentation of settings correct: a daemon's test compares docs/reference.md, an example of
// its environment file and its manifests with the table of its settings. It reads no settings.
package settingsdoc

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/settings"
	"cocoonstack.io/cocoon/internal/testkit/section"
)

// Reference compares the daemon's section of docs/reference.md with the table.
func Reference(t *testing.T, daemon string, all []settings.Setting) {
	t.Helper()
	code := func(before, s string) string {
		if s == "" {
			return ""
		}
		return "`" + before + s + "`"
	}
	var b strings.Builder
	b.WriteString("| variable | flag | key | default | meaning |\n|---|---|---|---|---|\n")
	for _, s := range all {
		if s.Default != "" {
			if err := s.Value.Set(s.Default); err != nil {
				t.Errorf("default of %s%s: %v", s.Key, s.Env, err)
			}
		}
		key := code("", s.Key)
		if s.Value.Type() == "strings" {
			key += " (list)"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", code("", s.Env), code("--", s.Flag), key, code("", shown(s)), strings.ReplaceAll(s.Usage, "|", `\|`))
	}
	section.Check(t, "docs/reference.md", "settings of "+daemon, b.String())
}

// shown is the default as a user would write it.
func shown(s settings.Setting) string { return cmp.Or(s.Default, s.Value.String()) }

// Example checks that an example of an environment file, below the repository's root, has every variable of the table and
// no other, in lines #NAME=VALUE, and that each value is the default if there is one. The variables other may be there or not.
func Example(t *testing.T, file string, all []settings.Setting, other ...string) {
	t.Helper()
	values := map[string]string{}
	for _, m := range find(t, file, `(?m)^#?([A-Z][A-Z0-9_]*)=(.*)$`) {
		values[m[1]] = m[2]
	}
	for _, s := range all {
		value, there := values[s.Env]
		delete(values, s.Env)
		switch {
		case s.Env == "" || slices.Contains(other, s.Env):
		case !there:
			t.Errorf("%s lacks %s", file, s.Env)
		case shown(s) != "" && value != shown(s):
			t.Errorf("%s has %s=%s; the default is %s", file, s.Env, value, shown(s))
		}
	}
	for name := range values {
		if !slices.Contains(other, name) {
			t.Errorf("%s has %s, which nobody reads", file, name)
		}
	}
}

// Manifest checks that the variables of a container, in a manifest below the repository's root, are in the table.
func Manifest(t *testing.T, file string, all []settings.Setting) {
	t.Helper()
	found := find(t, file, `(?m)^ *- (?:\{ ?)?name: ([A-Z][A-Z0-9_]*)\b()`)
	if len(found) == 0 {
		t.Errorf("%s has no variables", file)
	}
	for _, m := range found {
		if !slices.ContainsFunc(all, func(s settings.Setting) bool { return s.Env == m[1] }) {
			t.Errorf("%s has %s, which nobody reads", file, m[1])
		}
	}
}

func find(t *testing.T, file, pattern string) [][]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(section.Root(t), file))
	if err != nil {
		t.Fatal(err)
	}
	return regexp.MustCompile(pattern).FindAllStringSubmatch(string(text), -1)
}
