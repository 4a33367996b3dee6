package machine

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/proc"
)

// From linux/fs.h.
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

// frozen is a file system that we have frozen.
type frozen struct {
	file  *os.File
	close bool // it was opened for the freeze
}

// Freeze implements guestagent.Machine. It freezes the writable file systems on disks, the latest mount first, because
// a later mount may lie in an earlier one.
func (m *Machine) Freeze() (int, error) {
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return 0, fmt.Errorf("list the file systems: %w", err)
	}
	points, err := onDisks(mounts)
	mounts.Close()
	if err != nil {
		return 0, fmt.Errorf("list the file systems: %w", err)
	}
	var open []frozen
	for _, path := range points {
		f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			continue // covered by another mount, or already unmounted
		}
		open = append(open, frozen{file: f, close: true})
	}
	for _, f := range m.volumes() { // mounted where only containers see them
		open = append(open, frozen{file: f})
	}
	if m.disk != nil {
		open = append(open, frozen{file: m.disk})
	}
	for _, f := range open { // so that nothing is left to write during the freeze
		_ = unix.Syncfs(int(f.file.Fd()))
	}
	for i, f := range open {
		err := unix.IoctlSetInt(int(f.file.Fd()), fiFreeze, 0)
		switch {
		case err == nil:
			m.frozen = append(m.frozen, f)
			continue
		case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EOPNOTSUPP): // already frozen, or cannot be frozen
			f.done()
			continue
		}
		for _, rest := range open[i:] {
			rest.done()
		}
		_, thawed := m.Thaw()
		return 0, errors.Join(fmt.Errorf("freeze the file system on %s: %w", f.file.Name(), err), thawed)
	}
	return len(m.frozen), nil
}

// Thaw implements guestagent.Machine.
func (m *Machine) Thaw() (int, error) {
	n := len(m.frozen)
	for len(m.frozen) > 0 { // the last one first: the earlier ones may lie in it
		f := m.frozen[len(m.frozen)-1]
		err := unix.IoctlSetInt(int(f.file.Fd()), fiThaw, 0)
		if err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: another program has thawed it
			return 0, fmt.Errorf("thaw the file system on %s: %w", f.file.Name(), err)
		}
		f.done()
		m.frozen = m.frozen[:len(m.frozen)-1]
	}
	return n, nil
}

func (f frozen) done() {
	if f.close {
		f.file.Close()
	}
}

// onDisks returns the mount points of writable file systems on disks, each file system once, the latest first. r is in
// the format of /proc/self/mountinfo.
func onDisks(r io.Reader) ([]string, error) {
	var points []string
	seen := map[string]bool{}
	scan := bufio.NewScanner(r)
	for scan.Scan() {
		// id parent major:minor root mount-point options [optional...] - type source super-options
		before, after, ok := strings.Cut(scan.Text(), " - ")
		head, tail := strings.Fields(before), strings.Fields(after)
		if !ok || len(head) < 6 || len(tail) < 3 {
			continue
		}
		device, point, source := head[2], proc.MountPath(head[4]), tail[1]
		readOnly := slices.Contains(strings.Split(tail[2], ","), "ro")
		if readOnly || seen[device] || !strings.HasPrefix(source, "/dev/") || tail[0] == "devtmpfs" {
			continue
		}
		seen[device] = true
		points = append(points, point)
	}
	slices.Reverse(points)
	return points, scan.Err()
}

// Settle implements guestagent.Machine. It opens the files that Resume and Forget will open, and looks up the paths
// that they will look up. The kernel then has the names, found or not found, and the files' pages in memory.
func (m *Machine) Settle(ctx context.Context) error {
	if _, err := m.random(); err != nil {
		return err
	}
	s, err := m.link()
	if err != nil {
		return err
	}
	s.nearby()
	if _, err := s.addresses(); err != nil {
		return err
	}
	for i := range m.files {
		m.files[i].open()
	}
	for _, s := range sources {
		_, _ = os.ReadDir(filepath.Join(m.root+"/", s.dir))
	}
	return m.flush(ctx)
}

// flush writes pending data to the disks until that is done or ctx ends. The write continues after ctx ends.
func (m *Machine) flush(ctx context.Context) error {
	done := make(chan struct{})
	go func() { // ends when all data is on the disks
		defer close(done)
		unix.Sync()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("write the file systems to their disks: %w", context.Cause(ctx))
	}
}
