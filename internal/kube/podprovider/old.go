package podprovider

import (
	"context"
	"path"
	"strings"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
)

// This file handles snapshots that releases before owners left in the registry: at its root, by a name that VMs of two
// namespaces may have had.

// place is where the registry has a snapshot of a VM.
type place struct {
	ref, digest string
	old         bool // an earlier release stored it here; it is used only if it says that it belongs to the VM
}

// pinned returns the ref of the place's snapshot by digest, whatever its tag names by now.
func (p place) pinned() string { return p.ref[:strings.LastIndexByte(p.ref, ':')] + "@" + p.digest }

// where finds the tag of one of the tenant's VMs, also where an earlier release stored it. Errors: NotFound.
func (t tenant) where(ctx context.Context, vmName, tag string) (place, error) {
	at, err := t.ask(ctx, place{ref: t.ref(vmName, tag)})
	old := contract.OldRepository(t.owner.Namespace, vmName)
	if old == "" || !errdefs.IsNotFound(err) {
		return at, err
	}
	return t.ask(ctx, place{ref: t.p.at(old, tag), old: true})
}

// ask asks the registry which snapshot is at a place. Errors: NotFound.
func (t tenant) ask(ctx context.Context, at place) (place, error) {
	var err error
	at.digest, err = t.registry.TagDigest(ctx, at.ref, t.p.cfg.Registry.Auth)
	return at, err
}

// fetchOld fetches a snapshot from an old place under a local name, if it belongs to the tenant and to that pod ("" for
// any pod). Until that is known, the local copy belongs to the owner that it names, else to the operator, because any pod
// of a namespace may clone what belongs to the namespace.
func (w *worker) fetchOld(ctx context.Context, at place, name, pod string, ref contract.SnapshotRef) (snapshot.Snapshot, error) {
	if w.foreign.Digest == at.digest {
		return snapshot.Snapshot{}, w.why
	}
	give := w.p.turns.take(ctx, "old "+at.digest)
	if give == nil {
		return snapshot.Snapshot{}, ctx.Err()
	}
	defer give()
	node := tenant{p: w.p, snaps: w.p.node.snapshots, registry: w.p.node.snapshots}
	unclaimed := "unclaimed-" + strings.ReplaceAll(at.digest, ":", "-")
	if left, err := node.findSnapshot(ctx, unclaimed); err == nil { // left by a process that was killed
		node.discard(ctx, left.ID)
	}
	got, err := node.pullSnapshot(ctx, at.pinned(), unclaimed)
	if err != nil {
		return got, errdefs.New(errdefs.ClassOf(err), "pull snapshot %s: %w", at.ref, err)
	}
	defer node.discard(context.WithoutCancel(ctx), got.ID)
	if err := w.inherits(got, at, ref.Repo, pod, ref.Tag); err != nil {
		w.foreign, w.why = got, err
		w.foreign.Digest = at.digest
		return got, err
	}
	return w.fetchSnapshot(ctx, at.pinned(), name) // most of its data is already here
}

// inherits fails unless a snapshot from an old place belongs to the tenant and to that pod ("" for any pod). NotFound: it
// belongs to another. FailedPrecondition: it does not name its owner, and the operator must.
func (t tenant) inherits(snap snapshot.Snapshot, at place, vmName, pod, tag string) error {
	namespace, of := snap.Labels[contract.VMLabelPodNamespace], snap.Labels[contract.VMLabelPodName]
	switch {
	case !at.old || namespace == t.owner.Namespace && (pod == "" || of == pod):
		return nil
	case namespace != "":
		return errdefs.NotFoundf("the registry's %s is not of %s", at.ref, path.Join(t.owner.Namespace, pod))
	case t.p.cfg.Registry.TrustOld:
		return nil
	}
	return errdefs.Preconditionf("%s was left by an earlier release and does not say whose it is: if it is of VM %s of namespace %s, the operator puts it in its place by"+
		" `cocoon snapshot pull --name moved %[1]s` and `cocoon snapshot push moved %[4]s`; VK_TRUST_OLD_SNAPSHOTS=true has the node take all such snapshots for what their names say",
		at.ref, vmName, t.owner.Namespace, t.ref(vmName, tag))
}

// sameState reports whether a and b are copies of the same state of the same VM, wherever each of them was.
func sameState(a, b snapshot.Snapshot) bool {
	return a.Source.VMID != "" && a.Source.VMID == b.Source.VMID && a.CreatedAt.Equal(b.CreatedAt)
}

// olds returns the digests that the state from which the VM woke may have where an earlier release stored it: the digest
// of the push from here, of the pull, or of the snapshot that waited there until the operator put a copy in its place.
func (w *worker) olds(pulled snapshot.Snapshot) []string {
	all := []string{w.slept, pulled.Digest}
	if sameState(pulled, w.foreign) {
		all = append(all, w.foreign.Digest)
	}
	return all
}

// dropOld deletes the tag where an earlier release stored it, if it has the digest of the tenant's snapshot. A failure
// does no harm: nobody uses a snapshot that does not name its owner.
func (t tenant) dropOld(ctx context.Context, vmName, tag, digest string) {
	repo := contract.OldRepository(t.owner.Namespace, vmName)
	if repo == "" || digest == "" {
		return
	}
	ref := t.p.at(repo, tag)
	got, err := t.registry.TagDigest(ctx, ref, t.p.cfg.Registry.Auth)
	if err == nil && got == digest {
		err = t.registry.DeleteTag(ctx, ref, t.p.cfg.Registry.Auth)
	}
	if err != nil && !errdefs.IsNotFound(err) && ctx.Err() == nil {
		t.p.Log.Warn("snapshot of an earlier release stays in the registry", "op", ref, "err", err)
	}
}
