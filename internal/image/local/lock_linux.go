package local

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	shared    = unix.LOCK_SH
	exclusive = unix.LOCK_EX
)

// lock takes the store's lock, which is held only for a few file operations. It excludes other processes and other
// goroutines, because each call opens the file again.
func (s *Store) lock(how int) (unlock func(), err error) {
	f, err := os.OpenFile(s.path("lock"), os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the image store: %w", full(err))
	}
	if err := flock(f, how); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock the image store: %w", err)
	}
	return func() { f.Close() }, nil
}

func flock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// full turns the errors of a full disk into ResourceExhausted.
func full(err error) error {
	if err == nil || errdefs.ClassOf(err) != errdefs.Internal {
		return err
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG) {
		return errdefs.Exhaustedf("the disk of the image store is full; `cocoon image rm` frees room (%w)", err)
	}
	return err
}

// reserve is the space that imports leave free for the VMs that write to the same disk.
const reserve = 1 << 30

// room returns how many bytes an import may use.
func (s *Store) room() (int64, error) {
	disk, err := s.statfs(s.cfg.Dir)
	return disk.avail - min(reserve, disk.avail/8), err
}

// roomFor is room. It refuses an import that needs more.
func (s *Store) roomFor(need int64) (int64, error) {
	room, err := s.room()
	if err == nil && need > room {
		err = errdefs.Exhaustedf("the image needs %s, and the disk of the image store has only %s free; free some with `cocoon image rm`", human(need), human(room))
	}
	return room, err
}

// outOfRoom adds the free space before an import to the error of an import that had too little.
func outOfRoom(err error, room int64) error {
	if errdefs.Is(err, errdefs.ResourceExhausted) {
		return fmt.Errorf("%w (the disk of the image store had %s free)", err, human(room))
	}
	return err
}
