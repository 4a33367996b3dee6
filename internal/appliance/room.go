package appliance

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// What a push of an image must leave of its file system, so that workloads and the state have room: the larger of the two.
const (
	keepPart  = 20        // the 20th part of it
	keepBytes = 256 << 20 // or all of it, if it is smaller
)

// room counts the bytes of an archive while it arrives, and refuses more than there is room for. The archive is stored and unpacked
// afterwards, so it may take half of the room.
type room struct{ left int64 }

// roomFor returns the room of the file system of f.
func roomFor(f *os.File) (*room, error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil { //nolint:gosec // a descriptor is small
		return nil, fmt.Errorf("look how much room there is: %w", err)
	}
	return roomOf(int64(fs.Blocks)*fs.Bsize, int64(fs.Bavail)*fs.Bsize), nil //nolint:gosec // sizes of file systems
}

// roomOf returns the room of a file system by its size and what is free there, in bytes.
func roomOf(size, free int64) *room {
	return &room{left: max(free-max(size/keepPart, keepBytes), 0) / 2}
}

// admit returns ResourceExhausted if that many bytes have no room.
func (r *room) admit(n uint64) error {
	if n > uint64(max(r.left, 0)) {
		return errdefs.Exhaustedf("there is no room for an archive of this size beside what workloads need; remove workloads, images or volumes first (capsulectl capsule info shows the disks)")
	}
	return nil
}

// Write implements io.Writer.
func (r *room) Write(p []byte) (int, error) {
	if err := r.admit(uint64(len(p))); err != nil {
		return 0, err
	}
	r.left -= int64(len(p))
	return len(p), nil
}
