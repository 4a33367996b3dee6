package vm_test

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Programs that run the CLI search its messages for these words (docs/compat.md).
func TestWordsOfTheContract(t *testing.T) {
	pod := vm.Owner{Namespace: "prod"}
	for _, c := range []struct {
		err   error
		class errdefs.Class
		words string
	}{
		{vm.VMs.Missing(vm.Owner{}, "web"), errdefs.NotFound, `vm not found: "web"; `},
		{vm.VMs.Missing(pod, "web"), errdefs.NotFound, `vm not found: "web" in namespace prod; `},
		{vm.Snapshots.Missing(vm.Owner{}, "warm"), errdefs.NotFound, `snapshot not found: "warm"; `},
		{vm.Snapshots.Missing(pod, "warm"), errdefs.NotFound, `snapshot not found: "warm" in namespace prod; `},
		{vm.VMs.Taken("web"), errdefs.AlreadyExists, "already exists; "},
		{vm.Snapshots.Taken("prod/warm"), errdefs.AlreadyExists, "already exists; "},
	} {
		if errdefs.ClassOf(c.err) != c.class || !strings.Contains(c.err.Error(), c.words) {
			t.Errorf("%v: class %v; want %v and the words %q", c.err, errdefs.ClassOf(c.err), c.class, c.words)
		}
	}
	if _, err := vm.Snapshots.Match(pod, "warm", func(func(vm.Named) bool) {}); err == nil || err.Error() != vm.Snapshots.Missing(pod, "warm").Error() {
		t.Errorf("no object matches: %v", err)
	}
}
