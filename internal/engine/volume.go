package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// The content of volumes may be secret. It is in no record, only in root-only files in the VM's folder, and is
// removed with the folder.

// pushTimeout bounds how long UpdateVolume waits for a guest to accept the content.
const pushTimeout = 10 * time.Second

// UpdateVolume replaces the content of a file volume, first durably on the host, then in the guest if it is
// connected. A guest that is starting, stopped or lost meanwhile gets it at its next setup. A disk guest does not get
// it.
// Errors: NotFound (VM, volume), InvalidArgument (not a file volume, bad files), Unavailable and others when a
// connected guest does not accept it: the caller should retry then.
func (e *Engine) UpdateVolume(caller context.Context, ref, volume string, files []vm.VolumeFile) error {
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return err
	}
	defer leave()
	err = e.updateVolume(ctx, ref, volume, files)
	if err != nil {
		return e.life.ended(caller, fmt.Errorf("update volume %s of vm %s: %w", volume, ref, err))
	}
	return nil
}

func (e *Engine) updateVolume(ctx context.Context, ref, volume string, files []vm.VolumeFile) error {
	m, release, err := e.take(ctx, ref)
	if err != nil {
		return err
	}
	v, err := volumeOf(m.record(), volume)
	if err == nil {
		v.Files = files
		err = vm.ValidateFiles(volume, files)
	}
	if err == nil {
		err = e.writeVolume(m.id, v)
	}
	// The guest gets it after the VM is released: a slow guest does not delay a stop.
	release()
	if err != nil {
		return err
	}
	return e.pushVolume(ctx, m, v)
}

// volumeOf returns the definition of a file volume.
func volumeOf(r vm.Record, name string) (vm.Volume, error) {
	i := slices.IndexFunc(r.Spec.Volumes, func(v vm.Volume) bool { return v.Name == name })
	switch {
	case i < 0:
		return vm.Volume{}, errdefs.NotFoundf("the VM has no such volume")
	case r.Spec.Volumes[i].Kind != vm.VolumeFiles:
		return vm.Volume{}, errdefs.Invalidf("it is not a volume of files; only its guest writes to it")
	}
	return r.Spec.Volumes[i], nil
}

// pushVolume sends the content of v that is now on the host to the guest. A session that is lost meanwhile is no
// error: the next one begins with all volumes.
func (e *Engine) pushVolume(ctx context.Context, m *machine, v vm.Volume) error {
	unlock, err := m.volumes.take(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	r := m.run.Load()
	if r == nil || r.link == nil {
		return nil
	}
	agent, _, _ := r.link.peek()
	if agent == nil || r.link.kind != vm.ImageOCI {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, pushTimeout)
	defer cancel()
	err = e.put(ctx, m, agent, v)
	select {
	case <-agent.Done():
		return nil
	default:
		return err
	}
}

// pushVolumes sends all file volumes to a guest that is about to be set up. Preconditions: m.link has agent, so that
// whoever writes a volume from now on also sends it.
func (e *Engine) pushVolumes(ctx context.Context, m *machine, agent guest.Agent) error {
	unlock, err := m.volumes.take(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	for _, v := range m.record().Spec.Volumes {
		if v.Kind != vm.VolumeFiles {
			continue
		}
		if err := e.put(ctx, m, agent, v); err != nil {
			return err
		}
	}
	return nil
}

// put sends the stored content of v to the guest. Preconditions: m's volumes are locked, so that the last content
// wins.
func (e *Engine) put(ctx context.Context, m *machine, agent guest.Agent, v vm.Volume) error {
	keeper, ok := agent.(guest.VolumeKeeper)
	if !ok {
		return errdefs.Unsupportedf("the guest's agent takes no volumes")
	}
	var err error
	if v.Files, err = e.readVolume(m.id, v.Name); err != nil {
		return err
	}
	return keeper.PutVolume(ctx, v)
}

func (e *Engine) volumeDir(id vm.ID) string { return filepath.Join(e.stateDir(id), "volumes") }

func (e *Engine) volumePath(id vm.ID, name string) string {
	return filepath.Join(e.volumeDir(id), name+".json") // the name was validated: it is one element of a path
}

// writeVolumes stores the first content of the volumes of a VM that is being created.
func (e *Engine) writeVolumes(id vm.ID, volumes []vm.Volume) error {
	for _, v := range volumes {
		if v.Kind != vm.VolumeFiles {
			continue
		}
		if err := os.Mkdir(e.volumeDir(id), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("keep the content of volumes: %w", err)
		}
		if err := e.writeVolume(id, v); err != nil {
			return err
		}
	}
	return nil
}

func (e *Engine) writeVolume(id vm.ID, v vm.Volume) error {
	text, err := json.Marshal(v.Files)
	if err != nil {
		return fmt.Errorf("keep the content of volume %s: %w", v.Name, err)
	}
	return atomicfile.WriteFile(e.volumePath(id, v.Name), text, 0o600)
}

func (e *Engine) readVolume(id vm.ID, name string) ([]vm.VolumeFile, error) {
	text, err := os.ReadFile(e.volumePath(id, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.DataLossf("the content of volume %s is missing; make the VM anew", name)
	}
	if err != nil {
		return nil, fmt.Errorf("read the content of volume %s: %w", name, err)
	}
	var files []vm.VolumeFile
	if json.Unmarshal(text, &files) != nil { // the error could quote a secret
		return nil, errdefs.DataLossf("the content of volume %s is damaged; make the VM anew", name)
	}
	return files, nil
}

// withFiles returns the spec of r with the content of its volumes, for callers that write them to a disk.
func (e *Engine) withFiles(r vm.Record) (vm.Spec, error) {
	s := r.Spec.Clone()
	for i, v := range s.Volumes {
		if v.Kind != vm.VolumeFiles {
			continue
		}
		var err error
		if s.Volumes[i].Files, err = e.readVolume(r.ID, v.Name); err != nil {
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
