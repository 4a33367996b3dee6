package machine

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// kept is a file that Resume writes. It stays open after the first use. In a guest with cold code, checking that its
// path still names it takes a fraction of the time of opening, reading and closing it.
type kept struct {
	path string
	own  bool // create it where it is missing

	file *keptFile // nil: not open
	text string    // its text, when the file is longer than that; see write
}

type keptFile struct {
	fd       int
	dev, ino uint64
}

// largest is the maximum size of a file that we write into, in bytes. A larger file was not made by us.
const largest = 64 << 10

// ours reports whether st is of a file that replace can have made.
func ours(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink == 1 && st.Size <= largest
}

// open opens the file if it is not open, and returns its size. ok is false when there is no file of ours.
func (k *kept) open() (size int64, ok bool) {
	var st unix.Stat_t
	if err := unix.Lstat(k.path, &st); err != nil || !ours(&st) {
		k.close()
		return 0, false
	}
	if k.file != nil && k.file.dev == st.Dev && k.file.ino == st.Ino {
		return st.Size, true
	}
	k.close()
	fd, err := unix.Open(k.path, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return 0, false
	}
	if err := unix.Fstat(fd, &st); err != nil || !ours(&st) { // it was replaced meanwhile
		unix.Close(fd)
		return 0, false
	}
	k.file = &keptFile{fd: fd, dev: st.Dev, ino: st.Ino}
	return st.Size, true
}

func (k *kept) close() {
	if k.file != nil {
		unix.Close(k.file.fd)
		k.file = nil
	}
}

// write is replace for a guest that has just been resumed: it writes into the file that an earlier replace made. A
// rename would make the file system allocate and write blocks at once, which is most of the work of setting up such a
// guest. A reader at this moment may see a mixture with the old content, which is wrong by now anyway.
//
// In such a guest, shortening a file takes as long as writing it. A file that was longer keeps its length until trim,
// with empty lines at its end. Those mean nothing in the files that we write.
func (k *kept) write(text string) error {
	k.text = ""
	size, ok := k.open()
	switch {
	case !ok && !k.own:
		return nil
	case !ok:
		return replace(k.path, text)
	}
	b := make([]byte, max(int(size), len(text)))
	for i := copy(b, text); i < len(b); i++ {
		b[i] = '\n'
	}
	for done := 0; done < len(b); {
		n, err := unix.Pwrite(k.file.fd, b[done:], int64(done))
		if err != nil {
			return err
		}
		done += n
	}
	if len(b) > len(text) {
		k.text = text
	}
	return nil
}

// trim removes the empty lines that write has left at the end, unless another program has written the file meanwhile.
func (k *kept) trim() error {
	if k.text == "" {
		return nil
	}
	text := k.text
	k.text = ""
	size, ok := k.open()
	if !ok || int(size) <= len(text) {
		return nil
	}
	b := make([]byte, size)
	if n, err := unix.Pread(k.file.fd, b, 0); err != nil || n < len(b) || string(b[:len(text)]) != text {
		return err
	}
	for _, c := range b[len(text):] {
		if c != '\n' {
			return nil
		}
	}
	if err := unix.Ftruncate(k.file.fd, int64(len(text))); err != nil {
		return fmt.Errorf("shorten %s: %w", k.path, err)
	}
	return nil
}

// replace writes a file by renaming: a symbolic link of the image (to systemd's files, say) is replaced, not followed.
func replace(path, text string) error {
	if old, err := os.ReadFile(path); err == nil && string(old) == text {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	tmp := path + ".cocoon"
	_ = os.Remove(tmp)
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		_ = os.Remove(tmp)
	}
	return err
}

// ensureMachineID gives a new machine id to a machine whose image has none.
func ensureMachineID(path string) error {
	switch st, err := os.Stat(path); {
	case err == nil && st.Size() > 0:
		return nil
	case err != nil && !os.IsNotExist(err):
		return err
	}
	var id [16]byte
	if _, err := unix.Getrandom(id[:], unix.GRND_NONBLOCK); err != nil {
		return nil //nolint:nilerr // too early: the guest has no random numbers yet, and is better off waiting for none
	}
	return replace(path, hex.EncodeToString(id[:])+"\n")
}
