package engine

import (
	"fmt"
	"syscall"
)

// Room is the free space of a file system for non-root users, and its size, in bytes.
type Room struct{ Free, Size int64 }

// statfs is the Room of the file system that dir is on.
func statfs(dir string) (Room, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return Room{}, fmt.Errorf("read the free space of %s: %w", dir, err)
	}
	return Room{Free: int64(st.Bavail) * st.Bsize, Size: int64(st.Blocks) * st.Bsize}, nil
}
