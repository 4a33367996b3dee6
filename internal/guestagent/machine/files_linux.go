package machine

import (
	"encoding/hex"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

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

// largest is the size of a file that overwrite takes for one of ours, in bytes.
const largest = 64 << 10

// overwrite is replace for a guest that has just been resumed: it writes into the file that an earlier replace made.
// A rename makes the file system allocate and write blocks at once, which is most of what such a guest would do before
// it is itself. What reads the file in this moment may see a mixture, of a content that is wrong by now anyway.
func overwrite(path, text string) error {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return replace(path, text) // not there, or a symbolic link
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 1 || st.Size > largest {
		return replace(path, text)
	}
	old := make([]byte, st.Size)
	if n, err := unix.Pread(fd, old, 0); err == nil && string(old[:n]) == text {
		return nil
	}
	for done := 0; done < len(text); {
		n, err := unix.Pwrite(fd, []byte(text[done:]), int64(done))
		if err != nil {
			return err
		}
		done += n
	}
	if st.Size > int64(len(text)) {
		return unix.Ftruncate(fd, int64(len(text)))
	}
	return nil
}

// ensureMachineID gives a machine whose image has no machine id one of its own.
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
