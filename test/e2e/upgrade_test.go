//go:build e2e && upgrade

package e2e

import (
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestUpgrade runs the scripts in upgrade: this build takes over guests that an older build started. `make test-upgrade`
// builds the older one and sets its path.
func TestUpgrade(t *testing.T) {
	old := os.Getenv("COCOON_TEST_OLD")
	if old == "" {
		t.Fatal("COCOON_TEST_OLD is to be the folder of an older build; use `make test-upgrade OLD=REV`")
	}
	scriptsIn(t, "upgrade", func(env *testscript.Env) error {
		env.Setenv("OLD", old)
		return setup(env)
	})
}
