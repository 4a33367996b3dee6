package hostmount

import (
	"context"
	"errors"
	"os/exec"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filesystem"
)

// This file runs the programs of the host that know file systems.

// rules are those of guests, with the tools of the host.
func (m *Mounter) rules(b *backing, o Options) filesystem.Rules {
	return filesystem.Rules{
		ReadOnly: b.readOnly, FSType: o.FSType, Group: o.Group,
		MountsXFS: func() error { return nil }, // the kernel loads what it needs, or the mount fails
		MakeXFS:   makeXFS, Check: check,
	}
}

func check(ctx context.Context, args ...string) (int, string, error) {
	return run(ctx, "e2fsck", "install e2fsprogs", args...)
}

func makeXFS(ctx context.Context, dev string) error {
	code, output, err := run(ctx, "mkfs.xfs", "use ext4, or install xfsprogs", "-q", dev)
	if err == nil && code != 0 {
		err = errdefs.New(errdefs.Internal, "mkfs.xfs ended with code %d: %s", code, output)
	}
	return err
}

// run runs a program of the host, and returns its exit code and the end of what it printed.
func run(ctx context.Context, tool, remedy string, args ...string) (int, string, error) {
	path, err := find(tool)
	if err != nil {
		return 0, "", errdefs.Unsupportedf("the node has no %s; %s", tool, remedy)
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = []string{"LC_ALL=C", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	out, err := cmd.CombinedOutput()
	const most = 2000
	text := strings.ToValidUTF8(strings.TrimSpace(string(out[max(0, len(out)-most):])), "?")
	if exit, is := errors.AsType[*exec.ExitError](err); is && exit.Exited() {
		return exit.ExitCode(), text, nil
	}
	return 0, text, err
}

// find looks for a tool where distributions have it, whatever PATH is.
func find(tool string) (path string, err error) {
	for _, dir := range []string{"/usr/sbin/", "/sbin/", "/usr/bin/", "/bin/"} {
		if path, err = exec.LookPath(dir + tool); err == nil {
			return path, nil
		}
	}
	return "", err
}
