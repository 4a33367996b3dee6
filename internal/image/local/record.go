package local

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// File names inside data/<sha256>/.
const (
	recordFile    = "image.json"
	rawFile       = "disk.raw"
	qcow2File     = "disk.qcow2"
	sourceFile    = "disk" // original file before conversion; only in temporary folders
	unclaimedFile = "unclaimed"
	usedFile      = "used" // empty; its modification time is the last use of the image
)

const recordVersion = 1

// record is image.json, the description of stored content, written once.
type record struct {
	Version     int           `json:"version"`
	ID          string        `json:"id"`
	Type        vm.ImageType  `json:"type"`
	File        string        `json:"file"` // "" when there are only layers
	Format      vm.DiskFormat `json:"format"`
	VirtualSize int64         `json:"virtual_size"` // bytes, as the guest sees it
	Length      int64         `json:"length"`       // bytes of the file, holes included
	Size        int64         `json:"size"`         // bytes on disk
	CreatedAt   time.Time     `json:"created_at"`
	Process     vm.Process    `json:"config,omitzero"`
	Arch        string        `json:"arch,omitempty"`
	Layers      []string      `json:"layers,omitempty"` // its folders in layers/, the lowest first
}

// load reads the record of content. NotFound when the content does not exist.
func (s *Store) load(hex string) (record, error) {
	path := s.path("data", hex, recordFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, notFound(digest(hex))
	}
	if err != nil {
		return record{}, fmt.Errorf("read image record: %w", err)
	}
	var r record
	if err := json.Unmarshal(data, &r); err != nil || r.ID != digest(hex) {
		return record{}, errdefs.DataLossf("the image record %s is damaged; remove the image with `cocoon image rm %s` and import it again", path, digest(hex))
	}
	if r.Version != recordVersion {
		return record{}, errdefs.Unsupportedf("the image record %s has version %d, this program supports version %d", path, r.Version, recordVersion)
	}
	return r, nil
}

// intact reports whether content exists in its full length: a crash or a person may have truncated it.
func (s *Store) intact(hex string) bool {
	r, err := s.load(hex)
	if err != nil {
		return false
	}
	if r.File == "" {
		return len(r.Layers) > 0 && !slices.ContainsFunc(r.Layers, func(k string) bool { return !s.layerIntact(k) })
	}
	info, err := os.Stat(s.path("data", hex, r.File))
	return err == nil && info.Size() == r.Length
}

func (r record) write(dir string) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode image record: %w", err)
	}
	return full(atomicfile.WriteFile(filepath.Join(dir, recordFile), append(data, '\n'), 0o600))
}

// onDisk returns the bytes that the files in dir use.
func onDisk(dir string) (sum int64) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			sum += sparse.Occupied(info)
		}
	}
	return sum
}

// use loads the record of content that is about to be used, and records the use. The lock ensures that a collection cannot
// remove it between its inUse check and the removal: a caller that reported the image as in use before this call keeps it.
func (s *Store) use(id string) (record, error) {
	hex, ok := hexOf(id)
	if !ok {
		return record{}, notFound(id)
	}
	unlock, err := s.lock(shared)
	if err != nil {
		return record{}, err
	}
	defer unlock()
	rec, err := s.load(hex)
	if err == nil {
		s.Touch(rec.ID)
	}
	return rec, err
}

// hexOf returns the hex digits of an id.
func hexOf(id string) (hex string, ok bool) {
	hex = strings.TrimPrefix(id, "sha256:")
	return hex, isHex(hex)
}
