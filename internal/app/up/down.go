package up

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/app/assets"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// downLimit is the timeout for a supervisor to stop everything.
const downLimit = 2 * time.Minute

// Down stops the instance in dir: VMs, daemons, links, rules and mounts of CSI drivers. Files on disk stay, so that Run can start it again.
// If the instance is not up, Down removes what a killed supervisor may have left; that is no error.
// Errors: NotFound when dir holds no instance, FailedPrecondition without root, Unavailable when something cannot be stopped or released.
func Down(ctx context.Context, dir string, a Assets) error {
	if err := needRoot("down"); err != nil {
		return err
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return fmt.Errorf("locate %s: %w", dir, err)
	}
	l := layout{dir}
	if !assets.Exists(l.settings()) {
		return errdefs.NotFoundf("%s contains no instance; `cocoon up --dir` creates one", dir)
	}
	ctx, cancel := context.WithTimeout(ctx, downLimit)
	defer cancel()
	pid, err := lockHolder(l.lock())
	if err != nil {
		return err
	}
	if pid != 0 {
		if err := endProcess(ctx, pid, unix.SIGTERM, func() bool { p, err := lockHolder(l.lock()); return err == nil && p == pid }); err != nil {
			return fmt.Errorf("stop instance %s: %w", dir, err)
		}
	}
	return errors.Join(sweepKubelet(ctx, l.kubelet()), downServices(l), stopVMsOf(ctx, l, a))
}

// downServices removes the rules for Services that a killed supervisor has left, unless another instance serves them now.
func downServices(l layout) error {
	var p ports
	defer p.Close()
	if why := p.claimServices(); why != "" {
		return nil
	}
	return dropServices(l)
}

// endProcess sends a signal to pid if mine still confirms that the process is ours, and waits for its end through a
// pidfd.
func endProcess(ctx context.Context, pid int, signal unix.Signal, mine func() bool) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", pid, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	if !mine() { // it ended before the open; the pid may belong to another process now
		return nil
	}
	if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal process %d: %w", pid, err)
	}
	deadline, _ := ctx.Deadline()
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(time.Until(deadline).Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("wait for process %d: %w", pid, err)
		case n > 0:
			return nil
		default:
			return errdefs.Unavailablef("process %d did not end in time", pid)
		}
	}
}

// stopVMsOf stops every VM of an instance whose daemons are not running, makes CSI drivers release their volumes, and takes their networks
// down. It uses the written configuration files: a node that is no longer wanted may also have left VMs.
func stopVMsOf(ctx context.Context, l layout, a Assets) error {
	configs, err := filepath.Glob(l.config("cocoond*.yaml"))
	if err != nil {
		return fmt.Errorf("find the nodes: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, stopGuests)
	defer cancel()
	var all []error
	for _, config := range configs {
		cmd := exec.CommandContext(ctx, a.Daemon, "shutdown", "--config", config, "--log-level", "error")
		var out bytes.Buffer // its error; the log would hide it
		cmd.Stderr = &out
		if err := cmd.Run(); err != nil {
			all = append(all, errdefs.Unavailablef("stop the VMs of %s: %s (%w)", l.dir, strings.TrimPrefix(strings.TrimSpace(out.String()), "Error: "), err))
		}
	}
	return errors.Join(all...)
}

// lastLine returns the last non-empty line of a log, for an error message.
func lastLine(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return "no log"
	}
	defer f.Close()
	const tail = 4096
	if fi, err := f.Stat(); err == nil && fi.Size() > tail {
		_, _ = f.Seek(-tail, 2)
	}
	var buf bytes.Buffer
	_, _ = buf.ReadFrom(f)
	lines := strings.Split(strings.TrimSpace(buf.String()), "\n")
	return lines[len(lines)-1]
}
