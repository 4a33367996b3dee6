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
