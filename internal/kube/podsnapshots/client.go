package podsnapshots

import (
	"context"
	"strings"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// Snapshots saves VMs, creates VMs that resume from a saved state, and transfers snapshots to and from registries. The
// engine with its node's catalog is one implementation, the node API client is another. Registry refs are
// [http[s]://]HOST[:PORT]/REPOSITORY:TAG. Only the wiring and the Store use it directly; all other code uses own.
type Snapshots interface {
	inventory
	states
	transfers
}

type inventory interface {
	// ListSnapshots returns all snapshots of the node.
	ListSnapshots(ctx context.Context) ([]snapshot.Snapshot, error)
	GetSnapshot(ctx context.Context, ref string) (snapshot.Snapshot, error)
	RemoveSnapshot(ctx context.Context, ref string) error
}

type states interface {
	// SaveSnapshot saves a running VM, which keeps running, or the disks of a stopped VM.
	SaveSnapshot(ctx context.Context, ref string, s vm.SaveSpec) (snapshot.Snapshot, error)
	// CloneWithImage creates a VM that resumes from a snapshot. If the snapshot's image is not on this node, it is fetched
	// by its digest.
	CloneWithImage(ctx context.Context, s vm.CloneSpec, auth []image.RegistryAuth) (vm.Record, error)
	// Hibernate saves a running VM in a snapshot of that name, and ends the VM's process when the snapshot is durable.
	Hibernate(ctx context.Context, ref, name string) (vm.Record, error)
	// Wake resumes the VM from the state that Hibernate saved.
	Wake(ctx context.Context, ref string) (vm.Record, error)
}

type transfers interface {
	// PushSnapshot sends a snapshot to a registry. It records the digest of the manifest in the local snapshot.
	PushSnapshot(ctx context.Context, ref, to string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error)
	// PullSnapshot fetches a snapshot from a registry or, with cocoon://HOST:PORT/NAME, from another node.
	PullSnapshot(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error)
	// PullSnapshotEarly pulls as PullSnapshot does. It returns before the memory is here if VMs can resume from the snapshot before
	// that; Snapshot.Arriving is true then. If the rest never comes, there is no snapshot, and those VMs end.
	PullSnapshotEarly(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error)
	// TagDigest asks a registry for the digest of ref's manifest. Errors: NotFound.
	TagDigest(ctx context.Context, ref string, auth snapshot.Auth) (string, error)
	// DeleteTag removes a tag. It is no error if the tag does not exist.
	DeleteTag(ctx context.Context, ref string, auth snapshot.Auth) error
	// CheckRegistry checks whether the registry of ref answers and accepts the credentials.
	CheckRegistry(ctx context.Context, ref string, auth snapshot.Auth) error
}

// own calls Snapshots on behalf of an owner, with the credentials for the registry. It does not embed Snapshots, so that no
// method can be called without an owner.
type own struct {
	all   Snapshots
	auth  snapshot.Auth
	owner vm.Owner
}

func (o own) get(ctx context.Context, ref string) (snapshot.Snapshot, error) {
	return o.all.GetSnapshot(vm.OnBehalf(ctx, o.owner), ref)
}

func (o own) remove(ctx context.Context, ref string) error {
	return o.all.RemoveSnapshot(vm.OnBehalf(ctx, o.owner), ref)
}

func (o own) save(ctx context.Context, id vm.ID, s vm.SaveSpec) (snapshot.Snapshot, error) {
	return o.all.SaveSnapshot(vm.OnBehalf(ctx, o.owner), string(id), s)
}

func (o own) clone(ctx context.Context, s vm.CloneSpec, auth []image.RegistryAuth) (vm.Record, error) {
	return o.all.CloneWithImage(vm.OnBehalf(ctx, o.owner), s, auth)
}

func (o own) hibernate(ctx context.Context, id vm.ID, name string) (vm.Record, error) {
	return o.all.Hibernate(vm.OnBehalf(ctx, o.owner), string(id), name)
}

func (o own) wake(ctx context.Context, id vm.ID) (vm.Record, error) {
	return o.all.Wake(vm.OnBehalf(ctx, o.owner), string(id))
}

func (o own) push(ctx context.Context, ref, to string) (snapshot.Snapshot, error) {
	return o.all.PushSnapshot(vm.OnBehalf(ctx, o.owner), ref, to, o.auth, nil)
}

func (o own) pull(ctx context.Context, from, name string) (snapshot.Snapshot, error) {
	auth := o.auth
	if strings.HasPrefix(from, snapshot.PeerScheme) {
		auth = snapshot.Auth{} // never send the registry's credentials to other nodes
	}
	return o.all.PullSnapshot(vm.OnBehalf(ctx, o.owner), from, name, auth, nil)
}

// pullEarly pulls from the registry.
func (o own) pullEarly(ctx context.Context, from, name string) (snapshot.Snapshot, error) {
	return o.all.PullSnapshotEarly(vm.OnBehalf(ctx, o.owner), from, name, o.auth, nil)
}

func (o own) digest(ctx context.Context, ref string) (string, error) {
	return o.all.TagDigest(vm.OnBehalf(ctx, o.owner), ref, o.auth)
}

func (o own) deleteTag(ctx context.Context, ref string) error {
	return o.all.DeleteTag(vm.OnBehalf(ctx, o.owner), ref, o.auth)
}

func (o own) check(ctx context.Context, ref string) error {
	return o.all.CheckRegistry(vm.OnBehalf(ctx, o.owner), ref, o.auth)
}
