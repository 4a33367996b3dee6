package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// The content of volumes may be secret. It is in no record, only in root-only files in the VM's folder, and is
// removed with the folder.

func (d folders) volumes(id vm.ID) string { return filepath.Join(d.state(id), "volumes") }

func (d folders) volume(id vm.ID, name string) string {
	return filepath.Join(d.volumes(id), name+".json") // the name was validated: it is one element of a path
}

// writeVolumes stores the first content of the volumes of a VM that is being created.
func (d folders) writeVolumes(id vm.ID, volumes []vm.Volume) error {
	for _, v := range volumes {
		if v.Kind != vm.VolumeFiles {
			continue
		}
		if err := os.Mkdir(d.volumes(id), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("store the content of volumes: %w", err)
		}
		if err := d.writeVolume(id, v); err != nil {
			return err
		}
	}
	return nil
}

func (d folders) writeVolume(id vm.ID, v vm.Volume) error {
	text, err := json.Marshal(v.Files)
	if err != nil {
		return fmt.Errorf("store the content of volume %s: %w", v.Name, err)
	}
	return atomicfile.WriteFile(d.volume(id, v.Name), text, 0o600)
}

func (d folders) readVolume(id vm.ID, name string) ([]vm.VolumeFile, error) {
	text, err := os.ReadFile(d.volume(id, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.DataLossf("the content of volume %s is missing; remove the VM and create it again", name)
	}
	if err != nil {
		return nil, fmt.Errorf("read the content of volume %s: %w", name, err)
	}
	var files []vm.VolumeFile
	if json.Unmarshal(text, &files) != nil { // the error could quote a secret
		return nil, errdefs.DataLossf("the content of volume %s is damaged; remove the VM and create it again", name)
	}
	return files, nil
}

// withFiles returns the spec of r with the content of its volumes, for callers that write them to a disk.
func (d folders) withFiles(r vm.Record) (vm.Spec, error) {
	s := r.Spec.Clone()
	for i, v := range s.Volumes {
		if v.Kind != vm.VolumeFiles {
			continue
		}
		var err error
		if s.Volumes[i].Files, err = d.readVolume(r.ID, v.Name); err != nil {
			return s, err
		}
	}
	return s, nil
}

// withoutFiles returns s as it is recorded.
func withoutFiles(s vm.Spec) vm.Spec {
	s.Volumes = slices.Clone(s.Volumes)
	for i := range s.Volumes {
		s.Volumes[i].Files = nil
	}
	return s
}

// volumeOf returns the definition of a file volume.
func volumeOf(r vm.Record, name string) (vm.Volume, error) {
	i := slices.IndexFunc(r.Spec.Volumes, func(v vm.Volume) bool { return v.Name == name })
	switch {
	case i < 0:
		return vm.Volume{}, errdefs.NotFoundf("the VM has no such volume")
	case r.Spec.Volumes[i].Kind != vm.VolumeFiles:
		return vm.Volume{}, errdefs.Invalidf("it is not a volume of files; only its guest can write to it")
	case r.Spec.Volumes[i].Label != "": // a guest that sleeps has the disk mounted
		return vm.Volume{}, errdefs.Invalidf("its files are a disk, which stays as it is; create the VM again")
	}
	return r.Spec.Volumes[i], nil
}
