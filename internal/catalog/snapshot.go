// Package catalog is what a node boots and clones VMs from: it combines the stores of images and snapshots with
// registries and other nodes, and decides which images a clone needs, how the node obtains them, and who may change them.
//
// It stores and transfers nothing itself, and it does not run VMs: the contracts and the engine do that.
package catalog

import (
	"context"
	"io"
	"regexp"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

type cloner interface {
	Clone(ctx context.Context, s vm.CloneSpec) (vm.Record, error)
}

type imageGetter interface {
	Get(ctx context.Context, ref string) (image.Image, error)
}

type imagePuller interface {
	Pull(ctx context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error)
}

// Snapshots does what needs more than one of engine, store and remote, such as a clone that pulls its image. Its methods
// are those of nodeclient.Client, so that a door in the same process can use it like a remote one uses the client. It
// returns Unsupported for what it lacks (nil).
type Snapshots struct {
	Cloner cloner
	Images imageGetter
	Puller imagePuller
	Store  snapshot.Store
	Remote snapshot.Remote
	Dial   func(addr string) (Peer, error) // nil: this node has no peers
	// Spawn runs something that outlives a request; nil: everything is pulled whole.
	Spawn func(func(ctx context.Context))
}

// GetSnapshot resolves a name, an id or a unique prefix of one.
func (s *Snapshots) GetSnapshot(ctx context.Context, ref string) (snapshot.Snapshot, error) {
	return s.Store.Get(ctx, ref)
}

// ListSnapshots returns every snapshot, sorted by name.
func (s *Snapshots) ListSnapshots(ctx context.Context) ([]snapshot.Snapshot, error) {
	return s.Store.List(ctx)
}

// PublishSnapshot replaces the namespaces that may clone from a snapshot: vm.Everyone for all, an empty list for its
// owner alone. Only the operator may call it.
func (s *Snapshots) PublishSnapshot(ctx context.Context, ref string, namespaces []string) (snapshot.Snapshot, error) {
	if err := operatorOnly(ctx, "publish a snapshot"); err != nil {
		return snapshot.Snapshot{}, err
	}
	for _, ns := range namespaces {
		if ns != vm.Everyone && !namespaceRE.MatchString(ns) {
			return snapshot.Snapshot{}, errdefs.Invalidf("publish snapshot %s: %q is not a valid name of a namespace", ref, ns)
		}
	}
	snap, err := s.Store.Get(ctx, ref)
	switch {
	case err != nil:
		return snap, err
	case !snap.Owner.Operator() && len(namespaces) > 0:
		return snap, errdefs.Preconditionf("snapshot %s belongs to namespace %s and holds memory of its guests; only snapshots of the operator can be published", snap.Name, snap.Owner.Namespace)
	}
	slices.Sort(namespaces)
	return s.Store.Update(ctx, snap.ID, func(x *snapshot.Snapshot) { x.Published = slices.Compact(namespaces) })
}

// namespaceRE is what Kubernetes accepts as a namespace: a DNS label (RFC 1123).
var namespaceRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// operatorOnly refuses, for anybody but the operator, what touches the node itself, such as its folders.
func operatorOnly(ctx context.Context, what string) error {
	if who := vm.Behalf(ctx); !who.Operator() {
		return errdefs.Preconditionf("namespace %s may not %s; the operator of the node may", who.Namespace, what)
	}
	return nil
}

// ExportSnapshot writes a snapshot as a tar stream.
func (s *Snapshots) ExportSnapshot(ctx context.Context, ref string, w io.Writer) error {
	h, err := s.Store.Hold(ctx, ref)
	if err != nil {
		return err
	}
	defer h.Release()
	return s.Store.Export(ctx, h, w)
}

// ExportSnapshotDir copies a snapshot into a folder.
func (s *Snapshots) ExportSnapshotDir(ctx context.Context, ref, dir string) error {
	if err := folder(ctx, "export", dir); err != nil {
		return err
	}
	h, err := s.Store.Hold(ctx, ref)
	if err != nil {
		return err
	}
	defer h.Release()
	return s.Store.ExportDir(ctx, h, dir)
}

// ImportSnapshot stores what ExportSnapshot wrote.
func (s *Snapshots) ImportSnapshot(ctx context.Context, name, description string, r io.Reader, progress func(bytes int64)) (snapshot.Snapshot, error) {
	return s.Store.Import(ctx, name, description, r, progress)
}

// ImportSnapshotDir registers a folder that ExportSnapshotDir made.
func (s *Snapshots) ImportSnapshotDir(ctx context.Context, name, description, dir string) (snapshot.Snapshot, error) {
	if err := folder(ctx, "import", dir); err != nil {
		return snapshot.Snapshot{}, err
	}
	return s.Store.ImportDir(ctx, name, description, dir)
}

// folder refuses a path that is not absolute, and any folder of the node unless its operator names it.
func folder(ctx context.Context, op, dir string) error {
	if err := operatorOnly(ctx, op+" a folder of the node"); err != nil {
		return err
	}
	if !strings.HasPrefix(dir, "/") { // it would depend on where cocoond was started
		return errdefs.Invalidf("%s of a snapshot: %q is not an absolute path", op, dir)
	}
	return nil
}

// PushSnapshot sends a snapshot to a registry and records the digest that it has there.
func (s *Snapshots) PushSnapshot(ctx context.Context, ref, to string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	remote, err := s.remote()
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	h, err := s.Store.Hold(ctx, ref)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	defer h.Release()
	digest, err := remote.Push(ctx, h, to, auth, heard(progress))
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	return s.Store.Update(ctx, h.Snapshot().ID, func(s *snapshot.Snapshot) { s.Digest = digest })
}

// PullSnapshot fetches a snapshot from a registry, or from a peer.
func (s *Snapshots) PullSnapshot(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	if strings.HasPrefix(from, snapshot.PeerScheme) {
		return s.pullFromPeer(ctx, from, name, heard(progress))
	}
	remote, err := s.remote()
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	return remote.Pull(ctx, from, name, auth, heard(progress))
}

// PullSnapshotEarly pulls as PullSnapshot does, and returns before the memory is here if the memory can come later.
func (s *Snapshots) PullSnapshotEarly(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	if s.Spawn == nil || strings.HasPrefix(from, snapshot.PeerScheme) {
		return s.PullSnapshot(ctx, from, name, auth, progress)
	}
	remote, err := s.remote()
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	snap, arrive, err := remote.PullEarly(ctx, from, name, auth, heard(progress))
	if err == nil {
		s.Spawn(arrive)
	}
	return snap, err
}

// TagDigest asks a registry for the digest of the manifest of ref.
func (s *Snapshots) TagDigest(ctx context.Context, ref string, auth snapshot.Auth) (string, error) {
	remote, err := s.remote()
	if err != nil {
		return "", err
	}
	return remote.Digest(ctx, ref, auth)
}

// DeleteTag removes a tag, or a manifest when ref has a digest, from a registry.
func (s *Snapshots) DeleteTag(ctx context.Context, ref string, auth snapshot.Auth) error {
	remote, err := s.remote()
	if err != nil {
		return err
	}
	return remote.Delete(ctx, ref, auth)
}

// CheckRegistry asks whether the registry of ref answers and accepts the credentials.
func (s *Snapshots) CheckRegistry(ctx context.Context, ref string, auth snapshot.Auth) error {
	remote, err := s.remote()
	if err != nil {
		return err
	}
	return remote.Check(ctx, ref, auth)
}

func (s *Snapshots) remote() (snapshot.Remote, error) {
	if s.Remote == nil {
		return nil, errdefs.Unsupportedf("this cocoond talks to no registries of snapshots")
	}
	return s.Remote, nil
}

// heard returns a progress function that can always be called; progress may be nil.
func heard(progress func(snapshot.Progress)) func(snapshot.Progress) {
	if progress == nil {
		return func(snapshot.Progress) {}
	}
	return progress
}
