package settings

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

type config struct {
	Name   string
	Count  int
	On     bool
	Wait   time.Duration
	Size   int64
	List   []string
	Level  string
	Tree   map[string]struct{ To string }
	Maybe  *bool
	Secret string
}

func (c *config) settings() []Setting {
	return []Setting{
		{Flag: "name", Env: "T_NAME", Key: "name", Default: "nobody", Usage: "who", Value: Text(&c.Name)},
		{Flag: "count", Env: "T_COUNT", Key: "count", Default: "3", Usage: "how many", Value: Number(&c.Count)},
		{Flag: "on", Env: "T_ON", Key: "turned", Default: "true", Usage: "whether", Value: Bool(&c.On)},
		{Flag: "wait", Env: "T_WAIT", Key: "wait", Default: "24h", Usage: "how long", Value: Duration(&c.Wait)},
		{Flag: "size", Env: "T_SIZE", Key: "size", Usage: "how large", Value: Size(&c.Size)},
		{Flag: "list", Env: "T_LIST", Key: "list", Default: "x,y", Usage: "which", Value: List(&c.List)},
		{Flag: "log-level", Env: "T_LOG_LEVEL", Key: "log.level", Usage: "how much", Value: Text(&c.Level)},
		{Key: "tree", Usage: "what else", Value: Tree(&c.Tree)},
		{Key: "log.maybe", Usage: "perhaps", Value: Tree(&c.Maybe)},
		{Env: "T_SECRET", Usage: "hush", Value: Text(&c.Secret)},
	}
}

// parse reads settings of a file with that text, if it has one.
func parse(t *testing.T, text string, env map[string]string, args ...string) (config, error) {
	t.Helper()
	var c config
	if text != "" {
		path := filepath.Join(t.TempDir(), "t.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config="+path)
	}
	err := New("t", "T_CONFIG", c.settings()).Parse("", args, func(k string) string { return env[k] }, io.Discard)
	return c, err
}

func TestSourcesByWeight(t *testing.T) {
	file := "name: of-file\ncount: 4\nturned: false\nwait: 1m\nsize: 2Ki\nlist: [a, 'b,c', 7]\nlog: {level: high, maybe: false}\ntree: {r: {To: s}}\n"
	no := false
	ofFile := config{"of-file", 4, false, time.Minute, 2048, []string{"a", "b,c", "7"}, "high", map[string]struct{ To string }{"r": {"s"}}, &no, ""}
	env := map[string]string{"T_NAME": "of-env", "T_COUNT": "5", "T_ON": "true", "T_WAIT": "2m", "T_SIZE": "1k", "T_LIST": `a,"b,c"`, "T_LOG_LEVEL": "low", "T_SECRET": "s"}
	ofEnv := config{"of-env", 5, true, 2 * time.Minute, 1000, []string{"a", "b,c"}, "low", ofFile.Tree, &no, "s"}
	flags := []string{"--name=", "--count", "0", "--on=false", "--wait", "3m", "--size=0", "--list", "p", "--list", "q,r", "--log-level=x", "--log-level=y"}
	ofFlags := config{"", 0, false, 3 * time.Minute, 0, []string{"p", "q", "r"}, "y", ofFile.Tree, &no, "s"}
	for name, tt := range map[string]struct {
		file string
		env  map[string]string
		args []string
		want config
	}{
		"nothing":            {"", nil, nil, config{Name: "nobody", Count: 3, On: true, Wait: 24 * time.Hour, List: []string{"x", "y"}}},
		"empty":              {"# nothing\n", map[string]string{"T_NAME": ""}, nil, config{Name: "nobody", Count: 3, On: true, Wait: 24 * time.Hour, List: []string{"x", "y"}}},
		"null":               {"name:\nlog:\n", nil, nil, config{Name: "nobody", Count: 3, On: true, Wait: 24 * time.Hour, List: []string{"x", "y"}}},
		"file":               {file, nil, nil, ofFile},
		"variables":          {file, env, nil, ofEnv},
		"flags":              {file, env, flags, ofFlags},
		"the case of keys":   {"NAME: me\nLog: {Level: high}\n", nil, nil, config{Name: "me", Count: 3, On: true, Wait: 24 * time.Hour, List: []string{"x", "y"}, Level: "high"}},
		"a number as a text": {"name: 7\n", nil, []string{"--on"}, config{Name: "7", Count: 3, On: true, Wait: 24 * time.Hour, List: []string{"x", "y"}}},
	} {
		got, err := parse(t, tt.file, tt.env, tt.args...)
		if d := diff.Of(tt.want, got); err != nil || d != "" {
			t.Errorf("%s: %v, %s", name, err, d)
		}
	}
}

// Every error names the setting and its source, and is one line.
func TestErrors(t *testing.T) {
	for _, tt := range []struct {
		file string
		env  map[string]string
		args []string
		say  []string
	}{
		{args: []string{"--count=x"}, say: []string{"--count: ", `"x" is not a number`}},
		{args: []string{"--on=perhaps"}, say: []string{"--on: ", "neither true nor false"}},
		{args: []string{"--wait=-1s"}, say: []string{"--wait: ", "not a duration"}},
		{args: []string{"--wait", "7"}, say: []string{"--wait: ", "not a duration such as 90s"}},
		{args: []string{"--list", `a"b`}, say: []string{"--list: ", "separated by commas"}},
		{args: []string{"--what"}, say: []string{"unknown flag: --what"}},
		{args: []string{"now"}, say: []string{"t takes no arguments", `"now"`}},
		{env: map[string]string{"T_SIZE": "much"}, say: []string{"T_SIZE: ", "not a size such as 500Gi"}},
		{env: map[string]string{"T_COUNT": "x"}, args: []string{"--count=1"}, say: []string{"T_COUNT: "}},
		{file: "count: many\n", args: []string{"--count=1"}, say: []string{"t.yaml: count: ", `"many" is not a number`}},
		{file: "colour: green\n", say: []string{"t.yaml: unknown field", `"colour"`}},
		{file: "log: {colour: green}\n", say: []string{`"log.colour"`}},
		{file: "tree: {r: {Too: s}}\n", say: []string{"tree: unknown field", `"Too"`}},
		{file: "name: a\nname: b\n", say: []string{"already set"}},
		{file: "name: [a]\n", say: []string{"name: ", "array"}},
		{file: "list: a\n", say: []string{"list: ", "string"}},
		{file: "log.level: high\n", say: []string{`unknown field "log.level"`}},
		{file: "'': s\n", say: []string{`unknown field ""`}},
		{file: "log: {'': s}\n", say: []string{`unknown field "log."`}},
		{file: "lo: s\n", say: []string{`unknown field "lo"`}},
		{file: "names: s\n", say: []string{`unknown field "names"`}},
		{file: "log: high\n", say: []string{"log is not a map"}},
		{file: "- a\n", say: []string{"it is not a map"}},
		{file: "{", say: []string{"t.yaml: "}},
		{args: []string{"--config=/dev/null"}, say: []string{"/dev/null: it is not a regular file of at most 1 MiB"}},
		{args: []string{"--config=/"}, say: []string{"/: it is not a regular file of at most 1 MiB"}},
		{file: "# " + strings.Repeat("x", maxFile), say: []string{"it is not a regular file of at most 1 MiB"}},
	} {
		_, err := parse(t, tt.file, tt.env, tt.args...)
		if !errdefs.IsInvalid(err) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%+v: %v", tt, err)
			continue
		}
		for _, s := range tt.say {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("%q does not say %q", err, s)
			}
		}
	}
	if _, err := parse(t, "", map[string]string{"T_CONFIG": "/no/such/file"}); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "/no/such/file") {
		t.Errorf("no file: %v", err)
	}
	if _, err := parse(t, "", map[string]string{"T_CONFIG": "/no/such/file"}, "--config="); err != nil {
		t.Errorf("the flag does not win: %v", err)
	}
}

func TestHelp(t *testing.T) {
	var c config
	var help strings.Builder
	env := func(k string) string { return map[string]string{"T_NAME": "me", "T_SECRET": "s3cret"}[k] }
	if err := New("t", "T_CONFIG", c.settings()).Parse("What t is.\n", []string{"--help"}, env, &help); !errors.Is(err, pflag.ErrHelp) {
		t.Fatal(err)
	}
	for _, s := range []string{
		"What t is.", "--config FILE", "[$T_CONFIG]", "--name string", `who [$T_NAME, name:] (default "nobody")`, "--wait duration", "(default 24h)",
		"--list strings", "(default x,y)", "--on ", "[$T_LOG_LEVEL, log.level:]", "tree:  ", "what else", "$T_SECRET  ", "hush",
	} {
		if !strings.Contains(help.String(), s) {
			t.Errorf("the help lacks %q:\n%s", s, help.String())
		}
	}
	if strings.Contains(help.String(), "s3cret") {
		t.Error("the help tells a secret")
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "7": 7, "2Ki": 2048, "3k": 3000, "500Gi": 500 << 30, "1Ti": 1 << 40} {
		if n, err := parseSize(text); err != nil || n != want {
			t.Errorf("%s: %d, %v", text, n, err)
		}
	}
	for _, bad := range []string{"", "-1", "x", "Gi", "1.5Gi", "9999999999Ti", "1 Gi", "1KiKi", "1Tk"} {
		if _, err := parseSize(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}
