package nodeapi

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

// PeerScheme begins the name of a snapshot on another node: cocoon://HOST:PORT/NAME.
const PeerScheme = "cocoon://"

// Peer is the part of another node's API that fetches snapshots from it.
type Peer interface {
	GetSnapshot(ctx context.Context, ref string) (snapshot.Snapshot, error)
	ExportSnapshot(ctx context.Context, ref string, w io.Writer) error
	Close() error
}

// Cloner creates VMs from snapshots.
type Cloner interface {
	Clone(ctx context.Context, s vm.CloneSpec) (vm.Record, error)
}

// ImageGetter looks for an image in the store.
type ImageGetter interface {
	Get(ctx context.Context, ref string) (image.Image, error)
}

// Catalog implements what the API does with snapshots beyond one call of engine, store or remote: it combines them.
// Its methods are those of nodeclient.Client, so that a front end in the same process can use it like a remote one
// uses the client. It returns Unsupported for what it lacks (nil).
type Catalog struct {
	Cloner Cloner
	Images ImageGetter
	Puller image.Puller
	Store  snapshot.Store
	Remote snapshot.Remote
	Dial   func(addr string) (Peer, error) // nil: this node has no peers
}

// GetSnapshot resolves a name, an id or a unique prefix of one.
func (s *Catalog) GetSnapshot(ctx context.Context, ref string) (snapshot.Snapshot, error) {
	return s.Store.Get(ctx, ref)
}

// ListSnapshots returns every snapshot, sorted by name.
func (s *Catalog) ListSnapshots(ctx context.Context) ([]snapshot.Snapshot, error) {
	return s.Store.List(ctx)
}

// PublishSnapshot replaces the namespaces that may clone from a snapshot: vm.Everyone for all, an empty list for its
// owner alone. Only the operator may call it.
func (s *Catalog) PublishSnapshot(ctx context.Context, ref string, namespaces []string) (snapshot.Snapshot, error) {
	if err := operatorOnly(ctx, "publish a snapshot"); err != nil {
		return snapshot.Snapshot{}, err
	}
	for _, ns := range namespaces {
		if ns != vm.Everyone && !namespaceRE.MatchString(ns) {
			return snapshot.Snapshot{}, errdefs.Invalidf("publish snapshot %s: %q cannot be the name of a namespace", ref, ns)
		}
	}
	snap, err := s.Store.Get(ctx, ref)
	switch {
	case err != nil:
		return snap, err
	case !snap.Owner.Operator() && len(namespaces) > 0:
		return snap, errdefs.Preconditionf("snapshot %s is of namespace %s, whose memory it holds; only the operator's own are published", snap.Name, snap.Owner.Namespace)
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
func (s *Catalog) ExportSnapshot(ctx context.Context, ref string, w io.Writer) error {
	h, err := s.Store.Hold(ctx, ref)
	if err != nil {
		return err
	}
	defer h.Release()
	return s.Store.Export(ctx, h, w)
}

// ExportSnapshotDir copies a snapshot into a folder.
func (s *Catalog) ExportSnapshotDir(ctx context.Context, ref, dir string) error {
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
func (s *Catalog) ImportSnapshot(ctx context.Context, name, description string, r io.Reader, progress func(bytes int64)) (snapshot.Snapshot, error) {
	return s.Store.Import(ctx, name, description, r, progress)
}

// ImportSnapshotDir registers a folder that ExportSnapshotDir made.
func (s *Catalog) ImportSnapshotDir(ctx context.Context, name, description, dir string) (snapshot.Snapshot, error) {
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
	return absolute(op, dir)
}

// absolute refuses a path that would depend on where cocoond was started.
func absolute(op, dir string) error {
	if !strings.HasPrefix(dir, "/") {
		return errdefs.Invalidf("%s of a snapshot: %q is no absolute path", op, dir)
	}
	return nil
}

// PushSnapshot sends a snapshot to a registry and records the digest that it has there.
func (s *Catalog) PushSnapshot(ctx context.Context, ref, to string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
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
func (s *Catalog) PullSnapshot(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	if strings.HasPrefix(from, PeerScheme) {
		return s.pullFromPeer(ctx, from, name, heard(progress))
	}
	remote, err := s.remote()
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	return remote.Pull(ctx, from, name, auth, heard(progress))
}

// TagDigest asks a registry for the digest of the manifest of ref.
func (s *Catalog) TagDigest(ctx context.Context, ref string, auth snapshot.Auth) (string, error) {
	remote, err := s.remote()
	if err != nil {
		return "", err
	}
	return remote.Digest(ctx, ref, auth)
}

// DeleteTag removes a tag, or a manifest when ref has a digest, from a registry.
func (s *Catalog) DeleteTag(ctx context.Context, ref string, auth snapshot.Auth) error {
	remote, err := s.remote()
	if err != nil {
		return err
	}
	return remote.Delete(ctx, ref, auth)
}

// CheckRegistry asks whether the registry of ref answers and accepts the credentials.
func (s *Catalog) CheckRegistry(ctx context.Context, ref string, auth snapshot.Auth) error {
	remote, err := s.remote()
	if err != nil {
		return err
	}
	return remote.Check(ctx, ref, auth)
}

func (s *Catalog) remote() (snapshot.Remote, error) {
	if s.Remote == nil {
		return nil, errdefs.Unsupportedf("this cocoond talks to no registries of snapshots")
	}
	return s.Remote, nil
}

// CloneWithImage makes sure that the image of the snapshot is on this node, by its digest, and clones.
func (s *Catalog) CloneWithImage(ctx context.Context, spec vm.CloneSpec, auth []image.RegistryAuth) (vm.Record, error) {
	snap, err := s.snapshotOf(ctx, spec)
	if err != nil {
		return vm.Record{}, err
	}
	if snap.ID == "" {
		return s.Cloner.Clone(ctx, spec)
	}
	if err := s.fetchImages(ctx, snap, auth); err != nil {
		return vm.Record{}, err
	}
	return s.Cloner.Clone(ctx, spec)
}

func (s *Catalog) snapshotOf(ctx context.Context, spec vm.CloneSpec) (snapshot.Snapshot, error) {
	if spec.FromDir == "" {
		return s.Store.Get(ctx, spec.Snapshot)
	}
	if !vm.Behalf(ctx).Operator() { // the engine knows the folders that are open to non-operators, and fetches no image for them
		return snapshot.Snapshot{}, nil
	}
	if err := absolute("clone", spec.FromDir); err != nil {
		return snapshot.Snapshot{}, err
	}
	h, err := s.Store.HoldDir(ctx, spec.FromDir)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	defer h.Release()
	return h.Snapshot(), nil
}

// fetchImages pulls the images of snap.
func (s *Catalog) fetchImages(ctx context.Context, snap snapshot.Snapshot, auth []image.RegistryAuth) error {
	for _, want := range snap.Images() {
		if err := s.fetchImage(ctx, snap, want, auth); err != nil {
			return err
		}
	}
	return nil
}

// fetchImage pulls an image of snap unless exactly that content is here: by the digest that its origin knows, if
// there is one. In every case, what is pulled must be the wanted image.
//
// Depending on an image gives no right to it: a snapshot from a registry can name any digest. A snapshot that the
// operator shares does give the right.
func (s *Catalog) fetchImage(ctx context.Context, x snapshot.Snapshot, want snapshot.Image, auth []image.RegistryAuth) error {
	if x.Owner.Operator() {
		ctx = vm.OnBehalf(ctx, x.Owner)
	}
	snap := x.Name
	if _, err := s.Images.Get(ctx, want.Digest); !errdefs.IsNotFound(err) {
		return err
	}
	if want.Name == "" || strings.HasPrefix(want.Name, "sha256:") {
		return errdefs.NotFoundf("snapshot %s needs the image %s, which is not here and has no name to pull it by; import it", snap, want.Digest)
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
	if i := strings.LastIndexByte(name, ':'); i > strings.LastIndexByte(name, '/') {
		name = name[:i]
	}
	return name
}

// heard returns a progress function that can always be called; progress may be nil.
func heard(progress func(snapshot.Progress)) func(snapshot.Progress) {
	if progress == nil {
		return func(snapshot.Progress) {}
	}
	return progress
}
