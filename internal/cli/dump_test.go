package cli_test

import (
	"slices"
	"testing"
)

func TestDumpMemory(t *testing.T) {
	n := &node{}
	run := serve(t, n)
	for _, tt := range []struct {
		args []string
		code int
		want []string
	}{
		{[]string{"web", "core"}, 0, []string{"web writes its memory to memory.dump of core"}},
		{[]string{"web", "core", "--file", "a.dump"}, 0, []string{"web writes its memory to a.dump of core"}},
		{[]string{"web"}, 2, nil},
	} {
		n.killed = nil
		if code, _, stderr := run("", append([]string{"vm", "dump-memory"}, tt.args...)...); code != tt.code || !slices.Equal(n.killed, tt.want) {
			t.Errorf("%v: %d %q, %v", tt.args, code, stderr, n.killed)
		}
	}
}
