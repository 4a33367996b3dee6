package qemu

import (
	"context"
	"os"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
)

// sockets are removed when the VM has ended.
var sockets = []string{qmpSocket, consoleSocket, agentSocket, shareSocket}

// openFiles opens the files that the process inherits, in order. On error nothing stays open. memory is a guest's saved memory,
// nil for one that boots; the caller keeps owning it, and shares.
func openFiles(ctx context.Context, files []file, dir jail.Dir, p hypervisor.Plan, memory *os.File, shares servers) (_ []*os.File, err error) {
	open := make([]*os.File, len(files))
	defer func() {
		if err != nil {
			jail.CloseAll(open)
		}
	}()
	taps, err := jail.OpenTaps(ctx, p.NICs)
	if err != nil {
		return nil, err
	}
	for i, f := range files {
		switch f.kind {
		case fileRead, fileWrite:
			open[i], err = f.open()
		case fileLog:
			open[i], err = dir.AppendTo(f.path)
		case fileSocket:
			open[i], err = dir.Listen(f.path)
		case fileTap:
			open[i], taps[f.nic] = taps[f.nic], nil
		case fileMemory:
			open[i], err = jail.Duplicate(memory)
		case fileVSOCK:
			open[i], err = openVSOCK(f.path)
		case fileShare:
			open[i], err = jail.Duplicate(shares.of(f.path).conn)
		}
		if err != nil {
			jail.CloseAll(taps)
			return nil, err
		}
	}
	return open, nil
}

// open opens f, which is data: a disk, kernel or firmware.
func (f file) open() (*os.File, error) { return jail.OpenData(f.path, f.root, f.kind == fileWrite) }

// checkReadable checks that the unprivileged process can open the files that it must open by itself.
func checkReadable(paths ...string) error {
	for _, path := range paths {
		if path == "" {
			continue
		}
		st, err := os.Stat(path)
		if err != nil {
			return errdefs.Preconditionf("open %s: %w", path, err)
		}
		if st.Mode().Perm()&0o004 == 0 {
			return errdefs.Preconditionf("%s must be readable for all users, because VM processes are unprivileged; run `chmod a+r` on it", path)
		}
	}
	return nil
}
