package catalog

import (
	"context"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/ociname"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// CloneWithImage makes sure that the image of the snapshot is on this node, by its digest, and clones.
func (s *Snapshots) CloneWithImage(ctx context.Context, spec vm.CloneSpec, auth []image.RegistryAuth) (vm.Record, error) {
	if err := spec.Validate(); err != nil {
		return vm.Record{}, err
	}
	snap, err := s.snapshotOf(ctx, spec)
	if err != nil {
		return vm.Record{}, err
	}
	if snap.ID == "" {
		return s.Cloner.Clone(ctx, spec)
	}
	for _, want := range snap.Images() {
		if err := s.fetchImage(ctx, snap, want, auth); err != nil {
			return vm.Record{}, err
		}
	}
	return s.Cloner.Clone(ctx, spec)
}

// snapshotOf returns the snapshot that spec names; an empty one for a folder that a namespace names. The engine knows the
// folders that are open to namespaces, and no image is fetched for them.
func (s *Snapshots) snapshotOf(ctx context.Context, spec vm.CloneSpec) (snapshot.Snapshot, error) {
	if spec.FromDir == "" {
		return s.Store.Get(ctx, spec.Snapshot)
	}
	if !vm.Behalf(ctx).Operator() {
		return snapshot.Snapshot{}, nil
	}
	return s.SnapshotInDir(ctx, spec.FromDir)
}

// SnapshotInDir returns what a snapshot in a folder, which ExportSnapshotDir made, says about itself.
func (s *Snapshots) SnapshotInDir(ctx context.Context, dir string) (snapshot.Snapshot, error) {
	if err := folder(ctx, "read", dir); err != nil {
		return snapshot.Snapshot{}, err
	}
	h, err := s.Store.HoldDir(ctx, dir)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	defer h.Release()
	return h.Snapshot(), nil
}

// fetchImage pulls an image of snap unless the node has it. It pulls by the digest that the image's origin knows, if there
// is one. It refuses content that is not the wanted image.
//
// Depending on an image gives no right to it: a snapshot from a registry can name any digest. A snapshot that the
// operator shares does give the right.
func (s *Snapshots) fetchImage(ctx context.Context, x snapshot.Snapshot, want snapshot.Image, auth []image.RegistryAuth) error {
	if x.Owner.Operator() {
		ctx = vm.OnBehalf(ctx, x.Owner)
	}
	snap := x.Name
	if _, err := s.Images.Get(ctx, want.Digest); !errdefs.IsNotFound(err) {
		return err
	}
	if want.Name == "" || strings.HasPrefix(want.Name, "sha256:") {
		return errdefs.NotFoundf("snapshot %s needs the image %s, which is not here and has no name to pull; import it", snap, want.Digest)
	}
	name := want.Name
	switch {
	case want.Manifest != "":
		name = untagged(name) + "@" + want.Manifest
	case want.Type == vm.ImageDisk: // from a web address
		name = untagged(name) + "@" + want.Digest
	}
	img, err := s.Puller.Pull(ctx, image.PullRequest{Name: name, Policy: image.PullIfNotPresent, Auth: auth}, func(image.Progress) {})
	switch {
	case err != nil:
		return errdefs.New(errdefs.ClassOf(err), "fetch the image of snapshot %s: %w", snap, err)
	case img.ID != want.Digest:
		return errdefs.NotFoundf("snapshot %s needs the image %s, but %s is now %s; import the image it was made with", snap, want.Digest, name, img.ID)
	}
	return nil
}

// untagged returns a name without tag and digest; the port of a registry stays.
func untagged(name string) string {
	name, _, _ = strings.Cut(name, "@")
	name, _ = ociname.SplitTag(name)
	return name
}
