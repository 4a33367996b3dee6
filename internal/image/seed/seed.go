// Package seed writes the disk that configures a disk guest through cloud-init: a small ISO 9660 image with the documents
// of internal/cloudinit. It runs no other program.
//
// It does not decide about the documents and starts nothing. A guest gets:
//   - the documents of Spec.CloudInit, over the generated ones;
//   - Spec.Process.Env as /etc/cloud/environment;
//   - the files of Spec.Volumes at the paths of Spec.Mounts, if a caller has loaded them;
//   - the folders of the node in Spec.Volumes, mounted at the paths of Spec.Mounts.
//
// The guest writes the files and the list of mounts when it boots for the first time. Nobody updates them later.
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
func (Maker) Seed(ctx context.Context, id vm.ID, s vm.Spec, nics []vm.NIC, dir string) (vm.Disk, error) {
	disk := vm.Disk{Path: filepath.Join(dir, FileName), Format: vm.DiskRaw, ReadOnly: true, Serial: Serial, Role: vm.RoleCidat}
	if err := ctx.Err(); err != nil {
		return disk, err
	}
	var c vm.CloudInit
	if s.CloudInit != nil {
		c = *s.CloudInit
	}
	content, err := cloudinit.Build(cloudinit.Guest{ID: id, Hostname: s.Hostname, NICs: nics, Env: s.Process.Env, Files: files(s), Mounts: cloudinit.MountsOf(s)}, c)
	if err != nil {
		return disk, fmt.Errorf("seed of VM %s: %w", s.Name, err)
	}
	iso, err := encode(content.Label, content.Files)
	if err != nil {
		return disk, fmt.Errorf("seed of VM %s: %w", s.Name, err)
	}
	if old, err := os.ReadFile(disk.Path); err == nil && bytes.Equal(old, iso) {
		return disk, nil
	}
	// The documents may be secret: the file is readable only by us.
	if err := atomicfile.WriteFile(disk.Path, iso, 0o600); err != nil {
		return disk, fmt.Errorf("seed of VM %s: %w", s.Name, err)
	}
	return disk, nil
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
