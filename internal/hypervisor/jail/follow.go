package jail

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Follower reads a file that another process appends to, and waits for more at its end. When the file was cut, as Keeper does, it goes on at the new end.
type Follower struct {
	file *os.File
	at   int64

	watch int
	more  chan struct{} // the file has changed

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
	f := &Follower{file: os.NewFile(uintptr(fd), path), at: from, more: make(chan struct{}, 1), shut: make(chan struct{}), over: over}
	n, err := notices()
	if err == nil {
		f.watch, err = n.join(fd, f.more)
	}
	if err == nil && from < 0 {
		if f.at, err = f.file.Seek(0, io.SeekEnd); err != nil {
			n.leave(f.watch, f.more)
		}
	}
	if err != nil {
		_ = f.file.Close()
		return nil, fmt.Errorf("follow %s: %w", path, err)
	}
	return f, nil
}

// Read implements io.Reader. Only one goroutine may read.
func (f *Follower) Read(p []byte) (int, error) {
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
		select {
		case <-f.more:
		case <-f.over: // nobody appends any more
			last = true
		case <-f.shut:
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
		if n, err := notices(); err == nil {
			n.leave(f.watch, f.more)
		}
		_ = f.file.Close()
	})
	return nil
}

// noticer tells followers that their files have changed. All of them share it: Linux gives a user 128 instances of inotify(7).
type noticer struct {
	fd int

	mu  sync.Mutex
	all map[int]map[chan struct{}]bool // by the watch of their file
}

// notices returns the one of this process, which lasts as long as the process.
var notices = sync.OnceValues(func() (*noticer, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch files: %w", err)
	}
	n := &noticer{fd: fd, all: map[int]map[chan struct{}]bool{}}
	go n.run(os.NewFile(uintptr(fd), "inotify"))
	return n, nil
})

func (n *noticer) join(fd int, more chan struct{}) (watch int, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if watch, err = unix.InotifyAddWatch(n.fd, fmt.Sprintf("/proc/self/fd/%d", fd), unix.IN_MODIFY); err != nil {
		return 0, err
	}
	if n.all[watch] == nil { // several follow one file by one watch
		n.all[watch] = map[chan struct{}]bool{}
	}
	n.all[watch][more] = true
	return watch, nil
}

func (n *noticer) leave(watch int, more chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if delete(n.all[watch], more); len(n.all[watch]) == 0 {
		delete(n.all, watch)
		_, _ = unix.InotifyRmWatch(n.fd, uint32(watch)) // it is gone already if its file is
	}
}

// run reads the events of the kernel: watch, mask, cookie and length of a name, 4 bytes each, and the name.
func (n *noticer) run(events *os.File) {
	buf := make([]byte, 64<<10)
	for {
		size, err := events.Read(buf)
		if err != nil {
			return
		}
		for b := buf[:size]; len(b) >= unix.SizeofInotifyEvent; {
			n.tell(int(int32(binary.NativeEndian.Uint32(b))))
			b = b[min(len(b), unix.SizeofInotifyEvent+int(binary.NativeEndian.Uint32(b[12:]))):]
		}
	}
}

// tell wakes the followers of a file, or all if the kernel has dropped events (-1).
func (n *noticer) tell(watch int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if watch >= 0 {
		wake(n.all[watch])
		return
	}
	for _, followers := range n.all {
		wake(followers)
	}
}

func wake(followers map[chan struct{}]bool) {
	for more := range followers {
		select {
		case more <- struct{}{}:
		default: // it has not looked since the last change
		}
	}
}
