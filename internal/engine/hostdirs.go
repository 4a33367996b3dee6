package engine

import (
	"fmt"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hostdir"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file shares folders of the node with VMs: only those that its operator allows to the owner of the VM. That is compared when a VM
// is created and each time that it starts, because the list may have become shorter. The driver opens the folders.

// sharesOf returns the folders of the node that r asks for.
// Errors: FailedPrecondition if r may not have one of them.
func (n *node) sharesOf(r vm.Record) ([]hypervisor.Share, error) {
	var out []hypervisor.Share
	for i, v := range r.Spec.Dirs() {
		d := *v.Dir
		d.Trusted = d.Trusted && r.Spec.Sandbox // a record of another VM may say so, but no kubelet has asked for it
		s, err := n.shareOf(r.Owner, d)
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", v.Name, err)
		}
		s.Tag = vm.DirTag(i)
		out = append(out, s)
	}
	if r.Spec.Sandbox && r.ImageType == vm.ImageOCI {
		out = append(out, hypervisor.Share{Tag: vm.SharedTag, Path: n.dirs.shared(r.ID), Live: true})
	}
	return out, nil
}

// shareOf returns the folder d for a VM of owner.
func (n *node) shareOf(owner vm.Owner, d vm.HostDir) (hypervisor.Share, error) {
	s := hypervisor.Share{Path: d.Path, ReadOnly: d.ReadOnly}
	if d.File {
		s.File = vm.DirFile
	}
	if !d.Trusted {
		allowed, err := n.allowed(owner, d)
		s.Root, s.Create = allowed.Path, d.Create && !allowed.ReadOnly
		return s, err
	}
	path, err := filepath.EvalSymlinks(d.Path) // from here on, none of its parts may be replaced by a link
	if err != nil {
		return s, errdefs.Preconditionf("%w", err)
	}
	s.Root, s.Path, s.Below, s.ReadOnlyBelow = "/", path, d.Below, d.ReadOnlyBelow
	return s, nil
}

// allowed returns the entry by which a VM of owner may have the folder d.
func (n *node) allowed(owner vm.Owner, d vm.HostDir) (hostdir.Allowed, error) {
	switch {
	case !d.Published:
		return n.cfg.HostPaths.Find(owner.Namespace, d.Path, !d.ReadOnly)
	case n.cfg.Published == nil:
		return hostdir.Allowed{}, errdefs.Unsupportedf("this node has no volumes of CSI drivers (csiPlugins of cocoond)")
	}
	return hostdir.Allowed{Namespace: owner.Namespace, Path: n.cfg.Published.Root(), ReadOnly: d.ReadOnly}, n.cfg.Published.Find(owner, d.Path, !d.ReadOnly)
}

// designDirs checks the folders of the node that r asks for. It changes nothing.
func (n *node) designDirs(r vm.Record) error {
	shares, err := n.sharesOf(r)
	if err != nil {
		return err
	}
	for i, v := range r.Spec.Dirs() {
		if err := mountable(r, v); err != nil {
			return err
		}
		if s := shares[i]; !s.Create { // otherwise the driver makes it when the VM starts
			dir, err := hostdir.Open(s.Root, s.Path, false, s.File != "")
			if err != nil {
				return fmt.Errorf("volume %s: %w", v.Name, err)
			}
			_ = dir.Close()
		}
	}
	return nil
}

// designSocket checks that the guest of r may have a virtio socket, if it asks for one.
func (n *node) designSocket(r vm.Record) error {
	if h := r.Spec.Hardware; h != nil && h.VSOCK && r.ImageType != vm.ImageOCI && !n.cfg.VSOCK {
		return errdefs.Unsupportedf("it asks for a virtio socket (VSOCK), and this node gives guests none, because they reach whatever listens for AF_VSOCK there; its operator allows them with the setting vsock of cocoond")
	}
	return nil
}

// mountable returns an InvalidArgument error if the guest of r boots itself and v needs something that cloud-init cannot do.
func mountable(r vm.Record, v vm.Volume) error {
	if r.ImageType == vm.ImageOCI {
		return nil
	}
	if v.Group != nil {
		return errdefs.Invalidf("image %s boots itself, so nobody gives the files of volume %s to group %d; leave out the group", r.Spec.Image, v.Name, *v.Group)
	}
	if v.Dir.File {
		return errdefs.Invalidf("image %s boots itself, so the file %s of volume %s cannot be mounted in it; share the folder of the file", r.Spec.Image, v.Dir.Path, v.Name)
	}
	for _, m := range r.Spec.Mounts {
		if m.Volume == v.Name && m.SubPath != "" {
			return errdefs.Invalidf("image %s boots itself, so the part %s of volume %s cannot be mounted alone; share that folder itself", r.Spec.Image, m.SubPath, v.Name)
		}
	}
	return nil
}

// selfContained refuses to save a VM with a TPM: no snapshot has the state of a TPM, so the copy would have no keys. It refuses to save a VM
// that shares folders of the node or mounts those of servers: its memory fits the files as they are now, and those change. A server also takes back the locks of a guest that does not answer, and would take a clone for its source.
func selfContained(r vm.Record) error {
	if r.Spec.HasTPM() && r.ImageType != vm.ImageOCI {
		return errdefs.Preconditionf("it has a TPM, whose state is in no snapshot, so it cannot be saved, cloned or hibernated; stop it instead")
	}
	if err := notInSnapshots(r); err != nil {
		return err
	}
	if r.Spec.HugePages() > 0 && r.ImageType != vm.ImageOCI && r.State != vm.StateStopped {
		return errdefs.Preconditionf("its memory is huge pages, in which no saved state can be resumed, so it cannot be saved, cloned or hibernated; stop it instead")
	}
	if v := r.Spec.NFSVolumes(); len(v) > 0 {
		return errdefs.Preconditionf("it mounts %s of an NFS server (volume %s), which ends the sessions of a guest that does not run, so it cannot be saved, cloned or hibernated; stop it instead", v[0].NFS.Source(), v[0].Name)
	}
	if dirs := r.Spec.Dirs(); len(dirs) > 0 {
		return errdefs.Preconditionf("it shares the folder %s of the node (volume %s), whose files the node may change at any time, so it cannot be saved, cloned or hibernated; stop it instead", dirs[0].Dir.Path, dirs[0].Name)
	}
	return nil
}

// notInSnapshots refuses a VM of which no snapshot has all that it needs to start.
func notInSnapshots(r vm.Record) error {
	if shared := r.Spec.SharedVolumes(); len(shared) > 0 {
		return errdefs.Preconditionf("other VMs may write to its volume %s, so its saved memory would not fit the volume any more, and it cannot be saved, cloned or hibernated; stop it instead", shared[0].Name)
	}
	if r.ImageType == vm.ImageOCI {
		return nil
	}
	if k := r.Spec.Kernel(); k != nil {
		return errdefs.Preconditionf("it boots the kernel %s of an image, which is in no snapshot, so it cannot be saved, cloned or hibernated; stop it instead", k.Path)
	}
	if h := r.Spec.Hardware; h != nil && h.VSOCK {
		return errdefs.Preconditionf("it has a virtio socket (VSOCK), whose connections and address are of its node, so it cannot be saved, cloned or hibernated; stop it instead")
	}
	if disks := r.Spec.HostDisks(); len(disks) > 0 {
		return errdefs.Preconditionf("its disk %s is a file of the node (volume %s), which is in no snapshot, so it cannot be saved, cloned or hibernated; stop it instead", disks[0].HostDisk.Path, disks[0].Name)
	}
	return nil
}

// errNoSandbox says that a sandbox cannot come from a snapshot by an ordinary call.
func errNoSandbox() error {
	return errdefs.Unsupportedf("it is of a sandbox, which only the runtime of a kubelet can resume (RestorePod)")
}

// savableSandbox refuses to save a sandbox of which a snapshot would lack something.
func savableSandbox(r vm.Record) error {
	if !r.Spec.Sandbox {
		return nil
	}
	if r.State != vm.StateRunning {
		return errdefs.Preconditionf("it is a sandbox that does not run (%s), so there is nothing to save", r.State)
	}
	if r.BootContainer != "" {
		return errdefs.Unsupportedf("its container %s boots itself, and such a sandbox cannot be saved", r.BootContainer)
	}
	for _, e := range r.Ephemeral {
		for _, v := range e.Volumes {
			if v.ImageDigest == "" && len(v.Layers) > 0 { // also of one that has ended, as long as the guest has the device
				return errdefs.Unsupportedf("its container %s has volume %s, which is a device of the node, and such a sandbox cannot be saved", e.Record.Name, v.Volume)
			}
		}
	}
	return nil
}
