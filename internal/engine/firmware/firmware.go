// Package firmware keeps what the firmware of a guest has written, the variables of UEFI and the state of a TPM, after the VM is
// removed, for the next VM of the same owner, name and key. The state of the last VM stays until that of a later one has replaced it.
package firmware

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// maxSize is the most that one VM may keep, in bytes. UEFI has a few MiB, and a TPM less than one.
const maxSize = 64 << 20

// entryFile is the file of an entry that says whose it is, and in which of its folders the state is.
const entryFile = "kept.json"

// Store keeps the state of firmware in a folder:
//
//	<hash of owner, name and key>/kept.json   an entry
//	<hash of owner, name and key>/<id of VM>/ its state, as the driver has written it
type Store struct {
	dir string
	mu  sync.Mutex
}

// New returns the store in dir, which need not exist.
func New(dir string) *Store { return &Store{dir: dir} }

// entry is the content of entryFile.
type entry struct {
	Namespace string    `json:"namespace,omitempty"`
	VM        string    `json:"vm"`
	Key       string    `json:"key"`
	From      vm.ID     `json:"from"` // the VM that has written it, and the name of the folder
	Since     time.Time `json:"since"`
}

func (s *Store) at(namespace, name, key string) string {
	sum := sha256.Sum256([]byte(namespace + "\x00" + name + "\x00" + key))
	return filepath.Join(s.dir, hex.EncodeToString(sum[:16]))
}

// Keep moves the folder from, which the firmware of r has written, into the store. State that the owner had under that name goes. Without the
// folder there is nothing to keep. Keep is idempotent, also if it was interrupted.
func (s *Store) Keep(r vm.Record, from string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := entry{Namespace: r.Owner.Namespace, VM: r.Spec.Name, Key: r.Spec.KeepsFirmware(), From: r.ID, Since: time.Now().UTC().Truncate(time.Second)}
	at := s.at(e.Namespace, e.VM, e.Key)
	if err := s.move(from, at, e); err != nil {
		return fmt.Errorf("keep the state of the firmware of vm %s: %w", e.VM, err)
	}
	return nil
}

func (s *Store) move(from, at string, e entry) error {
	to := filepath.Join(at, string(e.From))
	switch _, err := os.Lstat(from); {
	case err == nil:
		if err := os.MkdirAll(at, 0o700); err != nil {
			return err
		}
		if err := atomicfile.RemoveAll(to); err != nil { // an earlier state of the same VM
			return err
		}
		if err := os.Rename(from, to); err != nil {
			return err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	default:
		if _, err := os.Lstat(to); errors.Is(err, fs.ErrNotExist) {
			return nil // the VM has not started, or its state was kept before
		} else if err != nil {
			return err
		}
	}
	if err := errors.Join(syncTree(to), atomicfile.SyncDir(at), atomicfile.SyncDir(s.dir), atomicfile.SyncDir(filepath.Dir(s.dir))); err != nil {
		return err
	}
	data, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if err := atomicfile.WriteFile(filepath.Join(at, entryFile), data, 0o600); err != nil {
		return err
	}
	if err := removeOthers(at, entryFile, string(e.From)); err != nil {
		return err
	}
	return s.removeEarlier(e)
}

// removeOthers removes what the folder at has beside the names.
func removeOthers(at string, names ...string) error {
	all, err := os.ReadDir(at)
	for _, one := range all {
		if !slices.Contains(names, one.Name()) {
			err = errors.Join(err, atomicfile.RemoveAll(filepath.Join(at, one.Name())))
		}
	}
	return err
}

// removeEarlier removes the state that the owner has of earlier VMs of the name, with another key.
func (s *Store) removeEarlier(e entry) error {
	all, err := s.entries()
	for _, x := range all {
		if x.Namespace == e.Namespace && x.VM == e.VM && x.Key != e.Key {
			err = errors.Join(err, atomicfile.RemoveAll(s.at(x.Namespace, x.VM, x.Key)))
		}
	}
	return err
}

// entries returns all that can be read. What cannot be read stays, and is in no list.
func (s *Store) entries() ([]entry, error) {
	dirs, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var out []entry
	for _, d := range dirs {
		if e, err := read(filepath.Join(s.dir, d.Name())); err == nil && s.at(e.Namespace, e.VM, e.Key) == filepath.Join(s.dir, d.Name()) {
			out = append(out, e)
		}
	}
	return out, err
}

func read(at string) (e entry, err error) {
	data, err := os.ReadFile(filepath.Join(at, entryFile))
	if err != nil {
		return e, err
	}
	if err := json.Unmarshal(data, &e); err != nil {
		return e, errdefs.DataLossf("%s is damaged: %w; remove its folder to begin with new firmware", filepath.Join(at, entryFile), err)
	}
	if e.From == "" || strings.ContainsAny(string(e.From), "/.") {
		return e, errdefs.DataLossf("%s is damaged: it names no folder; remove its folder to begin with new firmware", filepath.Join(at, entryFile))
	}
	return e, nil
}

// Lay copies the state that is kept for the VM of r to the folder to, which it replaces. Without kept state it does nothing.
// Errors: DataLoss if the state is damaged.
func (s *Store) Lay(r vm.Record, to string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := lay(s.at(r.Owner.Namespace, r.Spec.Name, r.Spec.KeepsFirmware()), to); err != nil {
		return fmt.Errorf("give vm %s the state of its firmware: %w", r.Spec.Name, err)
	}
	return nil
}

func lay(at, to string) error {
	e, err := read(at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(filepath.Join(at, string(e.From)))
	if err != nil {
		return errdefs.DataLossf("what was kept cannot be read: %w; remove %s to begin with new firmware", err, at)
	}
	defer root.Close()
	part := to + ".part" // a crash leaves no half of the state at to, which Keep would take
	if err := errors.Join(atomicfile.RemoveAll(to), atomicfile.RemoveAll(part)); err != nil {
		return err
	}
	left := int64(maxSize)
	err = fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		dst := filepath.Join(part, path)
		switch {
		case d.IsDir():
			return os.Mkdir(dst, 0o700)
		case !d.Type().IsRegular(): // a TPM that was taken over has written it
			return errdefs.DataLossf("%s is not a file; remove %s to begin with new firmware", path, at)
		}
		n, err := copyFile(root, path, dst, left)
		left -= n
		return err
	})
	if err == nil {
		err = syncTree(part)
	}
	if err != nil {
		return err
	}
	return atomicfile.Rename(part, to)
}

// syncTree makes the files of dir and their names durable.
func syncTree(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	return fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() && !d.Type().IsRegular() {
			return err
		}
		f, err := root.Open(path)
		if err != nil {
			return err
		}
		return errors.Join(f.Sync(), f.Close())
	})
}

func copyFile(root *os.Root, path, dst string, most int64) (int64, error) {
	in, err := root.Open(path)
	if err != nil {
		return 0, err
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(out, io.LimitReader(in, most+1))
	if err == nil && n > most {
		err = errdefs.DataLossf("what was kept has more than %d bytes", maxSize)
	}
	return n, errors.Join(err, out.Close())
}

// List returns what is kept for the VMs that by may use, sorted by namespace and name.
func (s *Store) List(by vm.Owner) ([]vm.KeptFirmware, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.entries()
	if err != nil {
		return nil, fmt.Errorf("list the kept state of firmware: %w", err)
	}
	var out []vm.KeptFirmware
	for _, e := range all {
		if owner := (vm.Owner{Namespace: e.Namespace}); by.Reaches(owner) {
			out = append(out, vm.KeptFirmware{Owner: owner, VM: e.VM, Key: e.Key, Since: e.Since})
		}
	}
	slices.SortFunc(out, func(a, b vm.KeptFirmware) int {
		return strings.Compare(a.Owner.Namespace+"\x00"+a.VM+"\x00"+a.Key, b.Owner.Namespace+"\x00"+b.VM+"\x00"+b.Key)
	})
	return out, nil
}

// Drop removes what is kept for a VM. Errors: NotFound, also for state that by may not use.
func (s *Store) Drop(by vm.Owner, k vm.KeptFirmware) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.at(k.Owner.Namespace, k.VM, k.Key)
	if _, err := os.Lstat(at); err != nil || !by.Reaches(k.Owner) {
		return errdefs.NotFoundf("no state of firmware is kept for VM %s with key %q", k.Owner.Qualify(k.VM), k.Key)
	}
	if err := atomicfile.RemoveAll(at); err != nil {
		return fmt.Errorf("remove the state of the firmware of vm %s: %w", k.VM, err)
	}
	return nil
}
