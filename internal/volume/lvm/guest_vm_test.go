//go:build vm

package lvm_test

import (
	"cmp"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/machine"
)

const guestTime = 20 * time.Minute // on a busy machine; a minute or two on others

// quickTests are the tests of the guest that are quick enough for every run. `make test-lvm` runs all of them.
const quickTests = "^(TestDevices|TestFull|TestHostMounts)$"

// TestVMThinPool runs tests with the build tag lvmguest in a guest whose kernel has device-mapper, on a real thin pool. COCOON_LVM_RUN
// chooses others.
func TestVMThinPool(t *testing.T) {
	said := machine.Run(t, machine.Machine{
		Start: "#!/bin/sh\nexport TMPDIR=/tmp\n/test -test.v -test.timeout 20m -test.run '" + cmp.Or(os.Getenv("COCOON_LVM_RUN"), quickTests) + "'\necho \"exit status $?\"\n",
		Files: map[string][]byte{"test": machine.Tests(t)}, Memory: 768, Limit: guestTime,
	})
	for _, line := range regexp.MustCompile(`(?m)^\s*--- .*$`).FindAllString(said, -1) {
		t.Log(line)
	}
	if !strings.Contains(said, "\nPASS\nexit status 0\n") {
		t.Errorf("the guest failed:\n%s", said)
	}
}
