// Package leak checks that a whole test run left nothing of ours on the machine. hack/test.sh runs it before and after.
package leak

import (
	"os"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/leak"
)

// TestNothingIsLeft writes what exists to the file that COCOON_LEAK_BEFORE names, or, if that file exists, compares with it.
func TestNothingIsLeft(t *testing.T) {
	path := os.Getenv("COCOON_LEAK_BEFORE")
	if path == "" {
		t.Skip("only meaningful around a test run: hack/test.sh sets COCOON_LEAK_BEFORE")
	}
	now := leak.Snapshot()
	before, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		if err := os.WriteFile(path, []byte(strings.Join(now, "\n")), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range leak.New(strings.Split(string(before), "\n"), now) {
		t.Errorf("left behind: %s", l)
	}
}
