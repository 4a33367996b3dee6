package cocoon_test

import (
	"context"

	"github.com/rogpeppe/go-internal/testscript"

	"cocoonstack.io/cocoon/internal/nodecli"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/testkit/runtimetest"
)

// tryRuntimes is `runtimes IMAGE`: it runs the suite on the node API and on the binary, both with the script's daemon.
func tryRuntimes(ts *testscript.TestScript, _ bool, args []string) {
	socket := ts.MkAbs("run/cocoond.sock")
	api, err := nodeclient.Dial(socket)
	ts.Check(err)
	defer api.Close()
	cli, err := nodecli.New("cocoon", socket)
	ts.Check(err)
	for name, r := range map[string]runtimetest.Runtime{"api": api, "cli": cli} {
		ts.Logf("runtime %s", name)
		s := &suite{TestScript: ts}
		runtimetest.Run(s, r, args[0])
		if s.failed {
			ts.Fatalf("the suite failed for %s:\n%s", name, ts.ReadFile("log"))
		}
	}
}

// suite adapts a script to the test interface of runtimetest.
type suite struct {
	*testscript.TestScript

	failed bool
}

func (*suite) Context() context.Context { return context.Background() }

func (s *suite) Errorf(format string, args ...any) {
	s.failed = true
	s.Logf(format, args...)
}
