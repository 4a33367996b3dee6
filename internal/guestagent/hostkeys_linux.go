package guestagent

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// hostKeys are the SSH host keys of the guest under root.
type hostKeys struct {
	root string // "/" except in tests
	due  bool   // the old keys are removed and not all new ones exist yet
}

// renew replaces the keys with new ones and makes a running sshd load them. It does nothing in a guest without keys or
// without ssh-keygen.
func (k *hostKeys) renew(ctx context.Context, procs *procs) error {
	dir := filepath.Join(k.root, "etc/ssh")
	old, err := filepath.Glob(filepath.Join(dir, "ssh_host_*_key*"))
	if err != nil {
		return err
	}
	if len(old) == 0 && !k.due {
		return nil
	}
	keygen, err := lookPath("ssh-keygen", defaultPath, "/")
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	k.due = true
	for _, file := range old {
		if err := os.Remove(file); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	args := []string{"ssh-keygen", "-A"}
	if k.root != "/" {
		args = append(args, "-f", k.root)
	}
	if err := runQuietly(ctx, procs, program{path: keygen, args: args, env: []string{"PATH=" + defaultPath, "HOME=/"}, dir: "/"}); err != nil {
		return err
	}
	k.due = false
	k.reload()
	return nil
}

// reload makes sshd read its keys again.
func (k *hostKeys) reload() {
	text, err := os.ReadFile(filepath.Join(k.root, "run/sshd.pid"))
	if err != nil {
		return
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid <= 1 {
		return
	}
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err == nil && string(bytes.TrimSpace(name)) == "sshd" { // and not another process with its old pid
		_ = unix.Kill(pid, unix.SIGHUP)
	}
}

// runQuietly runs p to its end without input or output.
func runQuietly(ctx context.Context, procs *procs, p program) error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	c, err := p.start(procs, null, null, null, false)
	if err != nil {
		return err
	}
	select {
	case <-c.done:
	case <-ctx.Done():
		c.signal(killSignal)
		<-c.done
		return context.Cause(ctx)
	}
	if code := c.code(); code != 0 {
		return errdefs.New(errdefs.Internal, "%s ended with code %d", p.path, code)
	}
	return nil
}
