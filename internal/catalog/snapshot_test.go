package catalog_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// store is a snapshot store in memory, by name.
type store struct {
	snapshot.Store // panics for what is not written here

	held int
	all  map[string]snapshot.Snapshot
}

func newStore(names ...string) *store {
	s := &store{all: map[string]snapshot.Snapshot{}}
	for i, n := range names {
		s.all[n] = snapshot.Snapshot{ID: fmt.Sprintf("id%d", i), Name: n}
	}
	return s
}

func (s *store) Get(_ context.Context, ref string) (snapshot.Snapshot, error) {
	if snap, ok := s.all[ref]; ok {
		return snap, nil
	}
	return snapshot.Snapshot{}, vm.Snapshots.Missing(vm.Owner{}, ref)
}

func (s *store) HoldDir(ctx context.Context, dir string) (snapshot.Held, error) {
	snap, err := s.Get(ctx, filepath.Base(dir))
	if err != nil {
		return nil, err
	}
	s.held++
	return held{s: s, snap: snap}, nil
}

func (s *store) Update(_ context.Context, ref string, change func(*snapshot.Snapshot)) (snapshot.Snapshot, error) {
	for name, snap := range s.all {
		if snap.ID == ref {
			change(&snap)
			s.all[name] = snap
			return snap, nil
		}
	}
	return snapshot.Snapshot{}, errdefs.NotFoundf("no snapshot %s", ref)
}

type held struct {
	snapshot.Held
	s    *store
	snap snapshot.Snapshot
}

func (h held) Snapshot() snapshot.Snapshot { return h.snap }
func (h held) Release()                    { h.s.held-- }

func second[T any](_ T, err error) error { return err }

// TestOnlyTheOperatorPublishes, and only the operator's own snapshots; folders of the node are the operator's, too.
func TestOnlyTheOperatorPublishes(t *testing.T) {
	sh := newStore("golden", "db")
	db := sh.all["db"]
	db.Owner = vm.Owner{Namespace: "prod"}
	sh.all["db"] = db
	c := &catalog.Snapshots{Store: sh}
	prod := vm.OnBehalf(t.Context(), vm.Owner{Namespace: "prod"})
	for what, err := range map[string]error{
		"publish":     second(c.PublishSnapshot(prod, "golden", []string{"prod"})),
		"export":      c.ExportSnapshotDir(prod, "golden", t.TempDir()),
		"import":      second(c.ImportSnapshotDir(prod, "x", "", t.TempDir())),
		"of a tenant": second(c.PublishSnapshot(t.Context(), "db", []string{"dev"})),
	} {
		if !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, bad := range []string{"", "a b", "Prod", "-x", "a,b"} {
		if _, err := c.PublishSnapshot(t.Context(), "golden", []string{bad}); !errdefs.IsInvalid(err) {
			t.Errorf("published to %q: %v", bad, err)
		}
	}
	for _, want := range [][]string{{"dev", "prod"}, {vm.Everyone}, nil} {
		got, err := c.PublishSnapshot(t.Context(), "golden", append(slices.Clone(want), want...))
		if err != nil || !slices.Equal(got.Published, want) {
			t.Errorf("published to %q it is published to %q, %v", want, got.Published, err)
		}
	}
}
