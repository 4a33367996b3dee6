package pid1

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// The group of hypervisors gets the device, and nobody else does.
func TestOpenKVM(t *testing.T) {
	device := filepath.Join(t.TempDir(), "kvm")
	if err := openKVM(device, "none-of-that-name"); err != nil {
		t.Errorf("without the device: %v", err)
	}
	if err := os.WriteFile(device, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := openKVM(device, "none-of-that-name"); err == nil {
		t.Error("a group that is not there gets it")
	}
	if os.Geteuid() != 0 {
		t.Skip("only root gives files away")
	}
	if err := openKVM(device, "daemon"); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(device)
	if err != nil {
		t.Fatal(err)
	}
	if st := info.Sys().(*syscall.Stat_t); st.Uid != 0 || st.Gid == 0 || info.Mode().Perm() != 0o660 {
		t.Errorf("it belongs to %d and group %d with %v", st.Uid, st.Gid, info.Mode())
	}
}
