//go:build vm

package qemu

import (
	"errors"
	"io/fs"
	"os"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Two guests have virtio sockets with different context ids, or are refused where the host has no such sockets.
func TestGuestsWithVSOCK(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	p.VSOCK = true
	if _, err := os.Stat(vhostVSOCK); errors.Is(err, fs.ErrNotExist) {
		if _, err := d.Launch(t.Context(), p); !errdefs.Is(err, errdefs.Unsupported) {
			t.Errorf("without %s: %v", vhostVSOCK, err)
		}
		if left := left(t, p); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
		return
	}
	first := start(t, d, p)
	logged(t, first, "GUEST-READY")
	other := a.plan(t)
	other.VSOCK = true
	second := start(t, d, other)
	logged(t, second, "GUEST-READY")
	one, two := first.(*instance).CID(), second.(*instance).CID()
	if one < 3 || two < 3 || one == two {
		t.Errorf("the context ids are %d and %d", one, two)
	}
	adopted, err := testDriver(t).Adopt(t.Context(), first.Handle())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = adopted.Close() }()
	if got := adopted.(*instance).CID(); got != one {
		t.Errorf("after a restart of the daemon it is %d, and was %d", got, one)
	}
}
