package jail

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
	if err := os.MkdirAll(vm.HugePages1G.Dir(at), 0o700); err != nil {
		t.Fatal(err)
	}
	have := func(free, reserved string) {
		t.Helper()
		for name, text := range map[string]string{"free_hugepages": free, "resv_hugepages": reserved} {
			if err := os.WriteFile(filepath.Join(vm.HugePages1G.Dir(at), name), []byte(text+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	plan := hypervisor.Plan{Name: "web", Memory: 4 << 30, Huge: vm.HugePages1G}
	have("4", "0")
	if err := EnoughHugePages(at, plan); err != nil {
		t.Error(err)
	}
	have("4", "1") // another VM is about to use one
	if err := EnoughHugePages(at, plan); !errdefs.Is(err, errdefs.ResourceExhausted) || !strings.Contains(err.Error(), "needs 4 huge pages of 1Gi, and this node has 3") {
		t.Error(err)
	}
	have("many", "0")
	if err := EnoughHugePages(at, plan); !errdefs.IsUnavailable(err) {
		t.Error(err)
	}
	if err := EnoughHugePages(filepath.Join(at, "none"), plan); !errdefs.Is(err, errdefs.Unsupported) {
		t.Error(err)
	}
	if err := EnoughHugePages(filepath.Join(at, "none"), hypervisor.Plan{}); err != nil {
		t.Errorf("a VM without huge pages: %v", err)
	}
}
