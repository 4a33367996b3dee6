//go:build vm

package machine_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/machine"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// TestVMExec runs a script on the machine with KVM. It sees a file and the environment of this host, and it has what hypervisors need.
func TestVMExec(t *testing.T) {
	checkout := filepath.Dir(filepath.Dir(filepath.Dir(need.Built(t, "bin/kvm/initramfs", "make kvm-guest"))))
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "host"), []byte("it's the host\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const script = `cat host && echo "$SAID" >new && cat new && for one in kvm vhost-vsock vhost-net net/tun; do test -c /dev/$one || echo "no $one"; done
		test -e /sys/fs/cgroup/cgroup.controllers && cd "$TMPDIR" && exit 7`
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute) // on a busy machine; some seconds on others
	defer cancel()
	var out bytes.Buffer
	code, err := machine.Exec(ctx, need.QEMU(t), machine.Program{
		Checkout: checkout, Args: []string{need.Tool(t, "sh"), "-c", script}, Dir: dir, Env: append(os.Environ(), "SAID=two\nlines's"),
		CPUs: 1, Memory: 1024, Output: &out,
	})
	if want := "it's the host\ntwo\nlines's\n"; err != nil || code != 7 || out.String() != want {
		t.Errorf("got code %d, %v, output %q, want code 7, output %q", code, err, out.String(), want)
	}
	if _, err := os.Stat(filepath.Join(dir, "new")); !os.IsNotExist(err) {
		t.Errorf("what the program wrote is on this host: %v", err)
	}
}
