package jail

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Follower reads a file that another process appends to, and waits for more at its end. When the file was cut, as Keeper does, it goes on at the new end.
type Follower struct {
	file, watch *os.File
	at          int64

	once sync.Once
	shut chan struct{} // closed by Close
	over <-chan struct{}
}

// Follow begins to read a file at an offset, or at its end if from is negative. When over is closed, the reader gets what there is and then io.EOF.
func Follow(path string, from int64, over <-chan struct{}) (*Follower, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	f := &Follower{file: os.NewFile(uintptr(fd), path), at: from, shut: make(chan struct{}), over: over}
	wfd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err == nil {
		f.watch = os.NewFile(uintptr(wfd), "inotify") // non-blocking, so that Close ends a read
		_, err = unix.InotifyAddWatch(wfd, fmt.Sprintf("/proc/self/fd/%d", fd), unix.IN_MODIFY)
	}
	if err == nil && from < 0 {
		f.at, err = f.file.Seek(0, io.SeekEnd)
	}
	if err != nil {
		CloseAll([]*os.File{f.file, f.watch})
		return nil, fmt.Errorf("follow %s: %w", path, err)
	}
	go func() {
		select {
		case <-over:
			_ = f.watch.Close()
		case <-f.shut:
		}
	}()
	return f, nil
}

// Read implements io.Reader. Only one goroutine may read.
func (f *Follower) Read(p []byte) (int, error) {
	buf := make([]byte, 4096)
	for last := false; ; {
		if f.closed() {
			return 0, os.ErrClosed
		}
		n, err := f.file.ReadAt(p, f.at)
		if n > 0 {
			f.at += int64(n)
			return n, nil
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return 0, err
		}
		if len(p) == 0 {
			return 0, nil
		}
		if st, err := f.file.Stat(); err != nil {
			return 0, err
		} else if st.Size() < f.at {
			f.at = st.Size()
			continue
		}
		if last {
			return 0, io.EOF
		}
		if _, err := f.watch.Read(buf); err != nil { // closed: nobody appends any more
			last = true
		}
	}
}

func (f *Follower) closed() bool {
	select {
	case <-f.shut:
		return true
	default:
		return false
	}
}

// Close ends a read in progress.
func (f *Follower) Close() error {
	f.once.Do(func() {
		close(f.shut)
		_ = f.watch.Close()
		_ = f.file.Close()
	})
	return nil
}
