package qemu

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

// A plan with a virtio socket is refused where the host has none, and says what to do. The context id of an instance is that of its user.
func TestVSOCK(t *testing.T) {
	at := filepath.Join(t.TempDir(), "vhost-vsock")
	p := hypervisor.Plan{Name: "web"}
	if err := hasVSOCK(at, p); err != nil {
		t.Errorf("without a socket: %v", err)
	}
	p.VSOCK = true
	if err := hasVSOCK(at, p); !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), "modprobe vhost_vsock") {
		t.Errorf("without the device: %v", err)
	}
	if err := os.WriteFile(at, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := hasVSOCK(at, p); err != nil {
		t.Errorf("with the device: %v", err)
	}
	for want, h := range map[uint32]handle{0: {Handle: jail.Handle{UID: 500017}}, 500017: {Handle: jail.Handle{UID: 500017}, VSOCK: true}} {
		h.Driver, h.Version, h.ID, h.PID, h.Dir = Name, handleVersion, vm.NewID(), 4711, "/run/x"
		h.UUID = jail.UUID(h.ID)
		b, err := jail.Encode(&h)
		if err != nil {
			t.Fatal(err)
		}
		again, err := decodeHandle(b)
		if got := (&instance{h: again}).CID(); err != nil || got != want {
			t.Errorf("the instance of %s has %d, want %d; %v", b, got, want, err)
		}
	}
}
