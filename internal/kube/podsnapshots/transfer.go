package podsnapshots

import (
	"context"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
)

// push sends the snapshot with that ID or name to the registry, and then verifies that the registry has it.
func (s *States) push(ctx context.Context, snap, ref string) error {
	began := time.Now()
	sent, err := s.own.push(ctx, snap, ref)
	if err == nil {
		err = s.has(ctx, ref, sent.Digest)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.store.metrics.Pushed(time.Since(began), err)
	return err
}

// has fails unless ref in the registry has that digest.
func (s *States) has(ctx context.Context, ref, digest string) error {
	got, err := s.own.digest(ctx, ref)
	switch {
	case err != nil:
		return err
	case digest == "" || got != digest:
		return errdefs.DataLossf("the registry reports digest %[2]q for %[1]s, but %[3]s was pushed; push it again", ref, got, digest)
	}
	return nil
}

// pull fetches a snapshot under a local name, and counts that.
func (s *States) pull(ctx context.Context, from, name string, by puller) (snapshot.Snapshot, error) {
	began := time.Now()
	got, err := by(ctx, from, name)
	if ctx.Err() != nil {
		return got, ctx.Err()
	}
	s.store.metrics.Pulled(time.Since(began), err)
	return got, err
}

// puller is own.pull or own.pullEarly. Only what can be pulled again may be pulled early: the snapshot is lost if cocoond ends before
// all of it is here.
type puller func(ctx context.Context, from, name string) (snapshot.Snapshot, error)

// fetch pulls a snapshot and tells the owner.
func (s *States) fetch(ctx context.Context, from, name string, by puller) (snapshot.Snapshot, error) {
	pulled := s.owner.Pulling(from)
	got, err := s.pull(ctx, from, name, by)
	if err != nil {
		return got, errdefs.New(errdefs.ClassOf(err), "pull snapshot %s: %w", from, err)
	}
	pulled(got)
	return got, nil
}

// dropTag removes a tag of the VM from the registry. If that fails, it logs complaint.
func (s *States) dropTag(ctx context.Context, tag, complaint string) {
	ref := s.ref(s.owner.VM, tag)
	if err := s.own.deleteTag(ctx, ref); err != nil && ctx.Err() == nil {
		s.owner.Log.Warn(complaint, "op", ref, "err", err) //nolint:sloglint // one of a few constants
	}
}

// find returns the newest snapshot on this node that has one of the names. Errors: NotFound.
func (s *States) find(ctx context.Context, names ...string) (snapshot.Snapshot, error) {
	var best snapshot.Snapshot
	for _, name := range names {
		got, err := s.own.get(ctx, name)
		switch {
		case errdefs.IsNotFound(err):
		case err != nil:
			return got, err
		case got.Name != name: // not a name but the beginning of an id
		case best.ID == "" || got.CreatedAt.After(best.CreatedAt):
			best = got
		}
	}
	if best.ID == "" {
		return best, errdefs.NotFoundf("no snapshot on this node is called %s", strings.Join(names, " or "))
	}
	return best, nil
}

// findFit returns the snapshot of that name on this node. ok is false if there is none. It removes a snapshot of that name
// that does not fit.
func (s *States) findFit(ctx context.Context, name string, fits func(snapshot.Snapshot) bool) (have snapshot.Snapshot, ok bool, err error) {
	have, err = s.find(ctx, name)
	switch {
	case errdefs.IsNotFound(err):
		return have, false, nil
	case err != nil || fits(have):
		return have, err == nil, err
	}
	return have, false, s.remove(ctx, have.ID)
}

// remove removes a snapshot of this node. It is no error if the snapshot does not exist.
func (s *States) remove(ctx context.Context, ref string) error {
	if err := s.own.remove(ctx, ref); !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}

// discard removes a snapshot of this node that is no longer needed. It waits a while for an operation that reads the snapshot
// now, such as the pull of a snapshot with the same content. A failure is only logged.
func (s *States) discard(ctx context.Context, ref string) {
	var err error
	_ = wait.ExponentialBackoffWithContext(ctx, whileInUse, func(ctx context.Context) (bool, error) {
		err = s.remove(ctx, ref)
		return !errdefs.IsFailedPrecondition(err), nil
	})
	if err != nil && ctx.Err() == nil {
		s.owner.Log.Warn("snapshot not removed", "snapshot", ref, "err", err)
	}
}

// whileInUse is the back-off of discard: 8 seconds in all.
var whileInUse = wait.Backoff{Duration: 20 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 14}
