package local

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	recordVersion = 1
	maxRecord     = 64 << 10 // bytes; the largest that is written is smaller
)

// record is what the disk has of a publication. It has no attributes, mount flags or secrets: all of these may be confidential.
type record struct {
	Version int         `json:"version"`
	Key     csinode.Key `json:"key"`
	Driver  string      `json:"driver"`
	Handle  string      `json:"handle"`

	Access    csinode.Access `json:"access"`
	Mode      string         `json:"mode"`
	FSType    string         `json:"fs_type,omitempty"`
	ReadOnly  bool           `json:"read_only,omitempty"`
	Ephemeral bool           `json:"ephemeral,omitempty"`

	Staged  bool   `json:"staged,omitempty"`  // the volume may be staged for this publication
	Grouped bool   `json:"grouped,omitempty"` // see Published.Grouped
	Boot    string `json:"boot,omitempty"`    // the boot in which it was published completely; "": it was not

	Released bool `json:"released,omitempty"` // nothing is left of it but this record; see Node.Release
}

// recordNames are the names of records: the id of the key and that of the volume. So a damaged record still says what it is about.
var recordNames = regexp.MustCompile(`^([0-9a-f]{32})-([0-9a-f]{32})\.json$`)

// id returns a name for a list of strings that is safe in a path.
func id(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// keyID returns the id of a key.
func keyID(k csinode.Key) string { return id("key", k.Owner.Namespace, k.Holder, k.Name) }

func volumeID(driver, handle string) string { return id("volume", driver, handle) }

// parseRecord reads and checks the record of the key and the volume with these ids. Errors: DataLoss.
func parseRecord(text []byte, key, volume string) (record, error) {
	var r record
	dec := json.NewDecoder(bytes.NewReader(text))
	if err := dec.Decode(&r); err != nil {
		return r, errdefs.DataLossf("it cannot be read (%w)", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return r, errdefs.DataLossf("something follows it in its file")
	}
	if r.Version != recordVersion {
		return r, errdefs.DataLossf("it has the version %d; this release reads %d", r.Version, recordVersion)
	}
	req := csinode.Request{Key: r.Key, Driver: r.Driver, Handle: r.Handle, Access: r.Access, Mode: r.Mode, FSType: r.FSType, ReadOnly: r.ReadOnly, Ephemeral: r.Ephemeral}
	if err := validate(&req); err != nil {
		return r, errdefs.DataLossf("it is invalid: %w", err)
	}
	switch {
	case r.Handle == "":
		return r, errdefs.DataLossf("it has no handle")
	case keyID(r.Key) != key || volumeID(r.Driver, r.Handle) != volume:
		return r, errdefs.DataLossf("it is the record of another publication: %s", r.Key)
	case r.Ephemeral && r.Staged:
		return r, errdefs.DataLossf("it says that an ephemeral volume is staged")
	case r.Released && (r.Staged || r.Boot != ""):
		return r, errdefs.DataLossf("it says that a released volume is staged or published")
	case len(r.Boot) > 64:
		return r, errdefs.DataLossf("the id of its boot has %d bytes", len(r.Boot))
	}
	return r, nil
}

func (n *Node) recordPath(key, volume string) string {
	return n.below(recordsName, key+"-"+volume+".json")
}

// load reads all records.
func (n *Node) load() error {
	files, err := os.ReadDir(n.below(recordsName))
	if err != nil {
		return err
	}
	for _, f := range files {
		path := n.below(recordsName, f.Name())
		names := recordNames.FindStringSubmatch(f.Name())
		if strings.HasPrefix(f.Name(), ".") && strings.Contains(f.Name(), ".tmp-") {
			if err := os.Remove(path); err != nil { // an interrupted atomicfile.WriteFile has left it
				return err
			}
			continue
		}
		if names == nil {
			n.log.Warn("unknown file among the records of CSI volumes is left", "path", path)
			continue
		}
		key, volume := names[1], names[2]
		e := entry{volume: volume}
		text, err := readPlain(path)
		if err == nil {
			e.rec, err = parseRecord(text, key, volume)
		}
		if _, twice := n.entries[key]; err == nil && twice {
			err = errdefs.DataLossf("there is another record of the same publication")
		}
		if err != nil {
			e = entry{volume: volume, bad: errdefs.DataLossf("the record %s of a published CSI volume is damaged: %w; "+
				"unmount what is published, and remove the record", path, err)}
			n.log.Error("record of a CSI volume is damaged", "path", path, "err", err)
		}
		n.entries[key] = e
	}
	n.reportUnknown()
	return nil
}

// readPlain reads a regular file. It follows no link and waits for no pipe.
func readPlain(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errdefs.As(errdefs.DataLoss, err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(err, errdefs.DataLossf("it is not a regular file"))
	}
	text, err := io.ReadAll(io.LimitReader(f, maxRecord+1))
	if err == nil && len(text) > maxRecord {
		err = errdefs.DataLossf("it has more than %d bytes", maxRecord)
	}
	return text, err
}

// reportUnknown logs folders of which no record says anything. They are left: a driver may have something mounted there.
func (n *Node) reportUnknown() {
	known := map[string]bool{lockName: true, recordsName: true, stagedName: true, publishedName: true}
	damaged := false
	for _, e := range n.entries {
		if e.bad != nil {
			damaged = true
			continue
		}
		for _, p := range []string{n.target(e.rec.Key), n.staging(e.rec.Driver, e.volume)} {
			for ; p != n.dir; p = filepath.Dir(p) {
				known[strings.TrimPrefix(p, n.dir+"/")] = true
			}
		}
	}
	if damaged {
		return // the folders may be theirs
	}
	var look func(dir string, depth int)
	look = func(dir string, depth int) {
		names, _ := os.ReadDir(n.below(dir))
		for _, f := range names {
			switch path := filepath.Join(dir, f.Name()); {
			case !known[path]:
				n.log.Warn("unknown folder among the CSI volumes is left", "path", n.below(path))
			case depth > 0 && path != recordsName && path != lockName:
				look(path, depth-1)
			}
		}
	}
	look("", 3)
}

// save writes the record of a publication, and lets others see it. Preconditions: the lock of its volume is held.
func (n *Node) save(r record) error {
	r.Version = recordVersion
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the record of %s: %w", r.Key, err)
	}
	volume := volumeID(r.Driver, r.Handle)
	if err := atomicfile.WriteFile(n.recordPath(keyID(r.Key), volume), append(text, '\n'), 0o600); err != nil {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			err = errdefs.As(errdefs.ResourceExhausted, err)
		}
		return fmt.Errorf("record %s: %w", r.Key, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.entries[keyID(r.Key)] = entry{rec: r, volume: volume}
	return nil
}

// forget removes the record of a publication. Preconditions: the lock of its volume is held.
func (n *Node) forget(r record) error {
	path := n.recordPath(keyID(r.Key), volumeID(r.Driver, r.Handle))
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the record of %s: %w", r.Key, err)
	}
	if err := atomicfile.SyncDir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("remove the record of %s: %w", r.Key, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.entries, keyID(r.Key))
	return nil
}
