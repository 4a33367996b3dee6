// Package seed writes the disks that tell a disk guest things: one that configures it through cloud-init, and one for each volume of files
// that shall be a disk. Each is a small ISO 9660 image. It runs no other program.
//
// It does not decide about the documents (internal/cloudinit does) and starts nothing. Through cloud-init a guest gets:
//   - the documents of Spec.CloudInit, over the generated ones;
//   - Spec.Process.Env as /etc/cloud/environment;
//   - the files of Spec.Volumes at the paths of Spec.Mounts, if a caller has loaded them;
//   - the folders of the node in Spec.Volumes, mounted at the paths of Spec.Mounts.
//
// The guest writes the files and the list of mounts when it boots for the first time. Nobody updates them later. The disks are written
// again before each start, those of files with the same files.
package seed

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/cloudinit"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// FileName is the seed's file in a VM's folder.
const FileName = "cidata.iso"

// Serial is the serial of the seed's disk.
const Serial = "cocoon-cidata"

// Maker is an image.Seeder. Its zero value is ready to use.
type Maker struct{}

var _ image.Seeder = Maker{}

// Seed implements image.Seeder. Equal input gives equal bytes. A file that already has these bytes is not written again.
func (Maker) Seed(ctx context.Context, id vm.ID, s vm.Spec, nics []vm.NIC, dir string) ([]vm.Disk, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var c vm.CloudInit
	if s.CloudInit != nil {
		c = *s.CloudInit
	}
	content, err := cloudinit.Build(cloudinit.Guest{ID: id, Hostname: s.Hostname, NICs: nics, Env: s.Process.Env, Files: files(s), Mounts: cloudinit.MountsOf(s)}, c)
	if err != nil {
		return nil, fmt.Errorf("seed of VM %s: %w", s.Name, err)
	}
	disk, err := write(filepath.Join(dir, FileName), Serial, content.Label, content.Files)
	if err != nil {
		return nil, fmt.Errorf("seed of VM %s: %w", s.Name, err)
	}
	disks := []vm.Disk{disk}
	for i, v := range s.Volumes {
		if v.Label == "" {
			continue
		}
		all := make(map[string][]byte, len(v.Files))
		for _, f := range v.Files {
			all[f.Path] = f.Data
		}
		disk, err := write(filepath.Join(dir, fmt.Sprintf("files-%d.iso", i)), fmt.Sprintf("cocoon-files-%d", i), v.Label, all)
		if err != nil {
			return nil, fmt.Errorf("disk with the files of volume %s of VM %s: %w", v.Name, s.Name, err)
		}
		disks = append(disks, disk)
	}
	return disks, nil
}

// write writes an image, unless the file has it already. The files may be secret: the image is readable only by us.
func write(file, serial, label string, files map[string][]byte) (vm.Disk, error) {
	disk := vm.Disk{Path: file, Format: vm.DiskRaw, ReadOnly: true, Serial: serial, Role: vm.RoleCidat}
	iso, err := encode(label, files)
	if err != nil {
		return disk, err
	}
	if old, err := os.ReadFile(file); err == nil && bytes.Equal(old, iso) {
		return disk, nil
	}
	return disk, atomicfile.WriteFile(file, iso, 0o600)
}

// files returns the files of volumes at the paths where they are mounted.
func files(s vm.Spec) []cloudinit.File {
	volumes := make(map[string]vm.Volume, len(s.Volumes))
	for _, v := range s.Volumes {
		volumes[v.Name] = v
	}
	var out []cloudinit.File
	for _, m := range s.Mounts {
		for _, f := range volumes[m.Volume].Files {
			rest, ok := below(f.Path, m.SubPath)
			if !ok {
				continue
			}
			out = append(out, cloudinit.File{Path: path.Join(m.Path, rest), Data: f.Data, Mode: f.Mode})
		}
	}
	return out
}

// below returns the part of name after sub. sub is a folder above name, or name itself.
func below(name, sub string) (string, bool) {
	if sub == "" || sub == name {
		return strings.TrimPrefix(name, sub), true
	}
	return strings.CutPrefix(name, sub+"/")
}
