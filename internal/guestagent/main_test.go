package guestagent_test

import (
	"os"
	"testing"

	"cocoonstack.io/cocoon/internal/guestagent/launch"
)

// TestMain lets this program be the agent that becomes programs.
func TestMain(m *testing.M) {
	launch.Main()
	os.Exit(m.Run())
}
