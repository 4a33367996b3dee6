//go:build e2e && kubevirt

package e2e

import (
	"errors"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestKubeVirt runs the scripts in kubevirt. Each covers one feature of KubeVirt's virtual machines. `make test-kubevirt` runs it. The scripts of
// testdata cover the life of such a machine, and `make test` runs them.
func TestKubeVirt(t *testing.T) {
	scriptsIn(t, "kubevirt", func(env *testscript.Env) error { return errors.Join(setup(env), plugins(t, env), exports(t, env)) })
}
