package hostmount

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
)

// mountLine is what the kernel says about one mount.
type mountLine struct {
	id, parent    string
	group         string // of mounts that follow each other; "": it follows none
	device        string // MAJOR:MINOR
	at            string
	kind          string // of the file system
	readOnly      bool   // the mount
	superReadOnly bool   // the file system
}

// mountLines returns the mounts that this process sees, in the order in which they were made.
func mountLines() ([]mountLine, error) {
	f, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list the mounts: %w", err)
	}
	defer f.Close()
	var out []mountLine
	s := bufio.NewScanner(f)
	const longest = 1 << 20 // a line has several paths and lists of options
	s.Buffer(nil, longest)
	for s.Scan() {
		if l, ok := parseMount(s.Text()); ok {
			out = append(out, l)
		}
	}
	if err := s.Err(); err != nil {
		return nil, fmt.Errorf("list the mounts: %w", err)
	}
	return out, nil
}

// parseMount parses a line of /proc/PID/mountinfo (proc(5)).
func parseMount(line string) (l mountLine, ok bool) {
	before, after, ok := strings.Cut(line, " - ")
	f, g := strings.Fields(before), strings.Fields(after)
	if !ok || len(f) < 6 || len(g) < 3 {
		return l, false
	}
	l = mountLine{
		id: f[0], parent: f[1], device: f[2], at: proc.MountPath(f[4]), kind: g[0],
		readOnly: readOnly(f[5]), superReadOnly: readOnly(g[len(g)-1]),
	}
	for _, field := range f[6:] {
		if n, found := strings.CutPrefix(field, "shared:"); found {
			l.group = n
		}
	}
	return l, true
}

func readOnly(options string) bool { return slices.Contains(strings.Split(options, ","), "ro") }

// mountAt returns the topmost mount at dir, nil if there is none.
func mountAt(dir string) (*mountLine, error) {
	lines, err := mountLines()
	if err != nil {
		return nil, err
	}
	var top *mountLine
	for i, l := range lines {
		if l.at == dir {
			top = &lines[i]
		}
	}
	return top, nil
}

// noLink returns an InvalidArgument error if a part of a path is a symbolic link: the kernel would show what is mounted there by another path.
func noLink(path string) error {
	real, err := filepath.EvalSymlinks(path)
	if err == nil && real != path {
		err = errdefs.Invalidf("the path %s has a symbolic link in it; use %s", path, real)
	}
	return err
}

// own makes the folder of all mounts a mount of its own, in a group of its own. The mount namespaces of other processes that are copies of this
// one, as those of hypervisors, would otherwise keep what is unmounted here. Idempotent, also after a kill in the middle.
func (m *Mounter) own(ctx context.Context) error {
	unlock, err := m.dirs.Lock(ctx, m.dir)
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		return err
	}
	if err := noLink(m.dir); err != nil {
		return err
	}
	lines, err := mountLines()
	if err != nil {
		return err
	}
	var here, above *mountLine
	for i, l := range lines {
		if l.at == m.dir {
			here = &lines[i]
		}
	}
	if here == nil {
		err = unix.Mount(m.dir, m.dir, "", unix.MS_BIND, "")
	} else {
		for i, l := range lines {
			if l.id == here.parent {
				above = &lines[i]
			}
		}
		if here.group != "" && (above == nil || above.group != here.group) {
			return nil
		}
	}
	for _, flag := range []uintptr{unix.MS_PRIVATE, unix.MS_SHARED} {
		if err == nil {
			err = unix.Mount("", m.dir, "", flag, "")
		}
	}
	if err != nil {
		return fmt.Errorf("make %s a mount of its own: %w", m.dir, err)
	}
	return nil
}
