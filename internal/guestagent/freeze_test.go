package guestagent

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
)

// still is a machine that can only freeze.
type still struct {
	Machine
	frozen atomic.Int32
}

func (m *still) Freeze() (int, error) { return int(m.frozen.Add(1)), nil }
func (m *still) Thaw() (int, error)   { return int(m.frozen.Swap(0)), nil }

func TestAHostThatForgetsToThaw(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &still{}
		s := New(Config{}, m)
		freeze := func(ctx context.Context) error {
			_, err := s.Freeze(ctx, &guestv1.FreezeRequest{})
			return err
		}
		if err := freeze(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(freezeMost - time.Second) //nolint:forbidigo // of a bubble's own time
		if err := freeze(t.Context()); err != nil || m.frozen.Load() != 1 {
			t.Fatalf("frozen %d times, %v", m.frozen.Load(), err)
		}
		time.Sleep(freezeMost - time.Second) //nolint:forbidigo // of a bubble's own time
		if m.frozen.Load() != 1 {
			t.Error("the second freeze did not begin the time anew")
		}
		time.Sleep(2 * time.Second) //nolint:forbidigo // of a bubble's own time
		if m.frozen.Load() != 0 || s.mayWrite() != nil {
			t.Error("nobody thawed it")
		}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		if err := freeze(gone); err == nil || m.frozen.Load() != 0 || s.mayWrite() != nil {
			t.Errorf("frozen for a host that has gone: %v", err)
		}
	})
}

func TestHostKeys(t *testing.T) {
	keygen, err := exec.LookPath("ssh-keygen")
	if err != nil {
		t.Skip("ssh-keygen is needed")
	}
	procs := newProcs(false)
	k := hostKeys{root: t.TempDir()}
	if err := k.renew(t.Context(), procs); err != nil {
		t.Fatalf("a guest without keys: %v", err)
	}
	dir := filepath.Join(k.root, "etc/ssh")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(dir, "ssh_host_ed25519_key")
	if out, err := exec.Command(keygen, "-q", "-t", "ed25519", "-N", "", "-f", key).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	old, err := os.ReadFile(key + ".pub")
	if err != nil {
		t.Fatal(err)
	}
	if err := k.renew(t.Context(), procs); err != nil {
		t.Fatal(err)
	}
	if now, err := os.ReadFile(key + ".pub"); err != nil || string(now) == string(old) {
		t.Errorf("the key is %q, %v", now, err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.renew(gone, procs); err == nil { // interrupted after the old keys were removed
		t.Skip("ssh-keygen was quicker than its end")
	}
	if err := k.renew(t.Context(), procs); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(key); err != nil {
		t.Errorf("a second attempt made no keys: %v", err)
	}
}
