package qemu

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestEnoughHugePages(t *testing.T) {
	at := t.TempDir()
	have := func(free, reserved string) {
		t.Helper()
		for name, text := range map[string]string{"free_hugepages": free, "resv_hugepages": reserved} {
			if err := os.WriteFile(filepath.Join(at, name), []byte(text+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	plan := hypervisor.Plan{Name: "web", Memory: 4 * vm.HugePage, Huge: true}
	have("4", "0")
	if err := enoughHugePages(at, plan); err != nil {
		t.Error(err)
	}
	have("4", "1") // another VM is about to use one
	if err := enoughHugePages(at, plan); !errdefs.Is(err, errdefs.ResourceExhausted) || !strings.Contains(err.Error(), "needs 4 huge pages of 2 MiB, and this node has 3") {
		t.Error(err)
	}
	have("many", "0")
	if err := enoughHugePages(at, plan); !errdefs.IsUnavailable(err) {
		t.Error(err)
	}
	if err := enoughHugePages(filepath.Join(at, "none"), plan); !errdefs.Is(err, errdefs.Unsupported) {
		t.Error(err)
	}
	if err := enoughHugePages(filepath.Join(at, "none"), hypervisor.Plan{}); err != nil {
		t.Errorf("a VM without huge pages: %v", err)
	}
}
