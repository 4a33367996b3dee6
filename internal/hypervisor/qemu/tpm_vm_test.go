//go:build vm

package qemu

import (
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// A guest finds its TPM. The state stays over a restart if it is kept. The VM ends with its TPM, and the TPM with the VM.
func TestTPM(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	if _, err := d.swtpm(); err != nil {
		need.Missing(t, err.Error())
	}
	for _, kind := range []vm.TPM{vm.TPMEphemeral, vm.TPMPersistent} {
		t.Run(string(kind), func(t *testing.T) {
			p := a.plan(t)
			p.TPM, p.FirmwareDir = kind, secretDir(t)
			keep := kind == vm.TPMPersistent
			dir := filepath.Join(map[bool]string{false: p.Dir, true: p.FirmwareDir}[keep], tpmDir)
			boot := func() hypervisor.Instance {
				i := start(t, d, p)
				logged(t, i, "GUEST-READY")
				say(t, i, "sh cat /sys/class/tpm/tpm0/tpm_version_major")
				logged(t, i, "2 .")
				if !exists(filepath.Join(dir, "tpm2-00.permall")) {
					t.Error("the TPM has no state")
				}
				return i
			}
			i := boot()
			kept := filepath.Join(dir, "kept")
			if err := os.WriteFile(kept, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := i.Kill(t.Context()); err != nil {
				t.Fatal(err)
			}
			if left := left(t, p); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
			if err := os.Remove(filepath.Join(p.Dir, consoleLog)); err != nil { // of the first run
				t.Fatal(err)
			}
			again := boot()
			if exists(kept) != keep {
				t.Errorf("kept: %v, want %v", !keep, keep)
			}
			if err := again.Close(); err != nil { // as if the daemon had ended
				t.Fatal(err)
			}
			adopted, err := d.Adopt(t.Context(), again.Handle())
			if err != nil {
				t.Fatal(err)
			}
			defer adopted.Close()
			if err := adopted.(*instance).shares[0].proc.Kill(t.Context()); err != nil {
				t.Fatal(err)
			}
			if exit, err := adopted.Wait(t.Context()); err != nil || exit.Cause != lost("") {
				t.Errorf("the VM without its TPM: %+v, %v", exit, err)
			}
		})
	}
}
