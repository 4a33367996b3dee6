// Package record reads and writes the records of volume stores, and admits VMs within their limits.
//
// It trusts no record, and does not know where a store keeps it.
package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// MaxAttachments is how many VMs can have one volume attached. It bounds the size of a record.
const MaxAttachments = 1024

// maxRecord is the largest record that is read, in bytes. The largest that can be written is smaller.
const maxRecord = 4 << 20

// Volume reads the record of a volume of a kind and checks it. With an error it returns what could be read.
// Errors: DataLoss.
func Volume(text []byte, kind string) (volume.Volume, error) {
	var v volume.Volume
	if err := json.Unmarshal(text, &v); err != nil {
		return v, errdefs.DataLossf("its record cannot be read (%w)", err)
	}
	if err := checkHead(v.Named(), v.Kind, kind, v.Size, v.Labels); err != nil {
		return v, err
	}
	if v.From != "" && !vm.ID(v.From).Valid() {
		return v, errdefs.DataLossf("its record says that it is a copy of %.100q", v.From)
	}
	if err := checkFor(v.For); err != nil {
		return v, err
	}
	return v, checkAttachments(v)
}

func checkFor(id string) error {
	if id != "" && !vm.ID(id).Valid() {
		return errdefs.DataLossf("its record says that it was made for %.100q", id)
	}
	return nil
}

func checkAttachments(v volume.Volume) error {
	if len(v.Attachments) > MaxAttachments {
		return errdefs.DataLossf("its record lists %d attachments", len(v.Attachments))
	}
	if !volume.Together(v.Attachments) {
		return errdefs.DataLossf("according to its record, %s have it attached, of which one writes and not all share it", v.Users())
	}
	seen := map[vm.ID]bool{}
	for _, a := range v.Attachments {
		if !a.VM.Valid() || seen[a.VM] {
			return errdefs.DataLossf("its record has an invalid attachment to VM %.100q", a.VM)
		}
		seen[a.VM] = true
	}
	return nil
}

// Snapshot is Volume for a snapshot.
func Snapshot(text []byte, kind string) (volume.Snapshot, error) {
	var s volume.Snapshot
	if err := json.Unmarshal(text, &s); err != nil {
		return s, errdefs.DataLossf("its record cannot be read (%w)", err)
	}
	if err := checkHead(s.Named(), s.Kind, kind, s.Size, s.Labels); err != nil {
		return s, err
	}
	if !s.Volume.Valid() || vm.Volumes.ValidateName(s.Source) != nil {
		return s, errdefs.DataLossf("its record says that it is of the volume %.100q with the id %.100q", s.Source, s.Volume)
	}
	return s, checkFor(s.For)
}

// checkHead checks what the two kinds of records have in common.
func checkHead(n vm.Named, kind, want string, size int64, labels map[string]string) error {
	if !n.ID.Valid() {
		return errdefs.DataLossf("its record has the invalid id %.100q", n.ID)
	}
	if err := vm.Volumes.ValidateName(n.Name); err != nil {
		return errdefs.DataLossf("its record has an invalid name: %w", err)
	}
	if kind != want {
		return errdefs.DataLossf("its record has the kind %.100q instead of %q", kind, want)
	}
	if rounded, err := volume.RoundSize(size); err != nil || rounded != size {
		return errdefs.DataLossf("its record has the invalid size of %d bytes", size)
	}
	if err := volume.ValidateLabels(labels); err != nil {
		return errdefs.DataLossf("its record has invalid labels: %w", err)
	}
	return nil
}

// Write writes a record durably.
func Write(path string, rec any) error {
	text, err := json.MarshalIndent(rec, "", "  ")
	if err != nil {
		return fmt.Errorf("encode %s: %w", filepath.Base(path), err)
	}
	return atomicfile.WriteFile(path, append(text, '\n'), 0o600)
}

// OpenPlain opens a regular file; it follows no link and waits for no pipe. Errors: DataLoss if it is anything else, or not there.
func OpenPlain(path string, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, flag|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, errdefs.DataLossf("its file %s is missing", path)
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENXIO), errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENODEV):
		return nil, irregular(path)
	case err != nil:
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		f.Close()
		return nil, errors.Join(err, irregular(path))
	}
	return f, nil
}

func irregular(path string) error {
	return errdefs.DataLossf("%s is not a regular file and is not used", path)
}

// Read reads the file of a record. Errors: DataLoss if it is missing, or cannot be one.
func Read(path string) ([]byte, error) {
	f, err := OpenPlain(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxRecord+1))
	if err == nil && len(text) > maxRecord {
		err = errdefs.DataLossf("%s has more than %d bytes", path, maxRecord)
	}
	return text, err
}

// Failed says in the message of err what failed on which object of a kind. name is "" if the store was to choose it.
func Failed(verb string, k vm.Kind, name string, err error) error {
	if name == "" {
		return fmt.Errorf("%s a %s: %w", verb, k.Noun, Full(err))
	}
	return fmt.Errorf("%s %s %s: %w", verb, k.Noun, name, Full(err))
}

// As is " as NAME" in a message about an object that is to get a name, and "" if the store chooses the name.
func As(name string) string {
	if name == "" {
		return ""
	}
	return " as " + name
}

// Full turns errors of a full disk into ResourceExhausted.
func Full(err error) error {
	switch {
	case err == nil || errdefs.ClassOf(err) != errdefs.Internal:
		return err
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errdefs.Exhaustedf("the disk of the volume store is full; `%s` frees room (%w)", vm.Volumes.Remove, err)
	case errors.Is(err, unix.EFBIG):
		return errdefs.Exhaustedf("the file system of the volume store holds no file of that size; choose a smaller size (%w)", err)
	}
	return err
}

// Admit is Volume.Admits with the limit of a record.
// Errors: those of Volume.Admits, ResourceExhausted.
func Admit(v volume.Volume, to vm.ID, as volume.Mode) (has bool, err error) {
	if has, err := v.Admits(to, as); err != nil || has {
		return has, err
	}
	if len(v.Attachments) >= MaxAttachments {
		return false, errdefs.Exhaustedf("%d VMs have it attached, which is the limit; remove one of them first", MaxAttachments)
	}
	return false, nil
}
