package nodeapi_test

import (
	"context"
	"testing"

	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestBehalfCrossesTheWire checks that calls and streams arrive on behalf of the owner for whom the client made them.
func TestBehalfCrossesTheWire(t *testing.T) {
	sh := &told{memory: newMemory("warm")}
	c := serveCatalog(t, &scripted{}, sh.memory, func(s *catalog.Snapshots) { s.Store = sh })
	prod := vm.Owner{Namespace: "prod", PodUID: "p", SetUID: "s"}
	for _, who := range []vm.Owner{{}, prod} {
		ctx := vm.OnBehalf(t.Context(), who)
		if _, err := c.GetSnapshot(ctx, "warm"); err != nil || sh.who != who {
			t.Errorf("a call of %+v: %v, %s", who, err, diff.Of(who, sh.who))
		}
		sh.who = vm.Owner{Namespace: "nobody"}
		if _, err := c.ListSnapshots(ctx); err != nil || sh.who != who {
			t.Errorf("a stream of %+v: %v, %s", who, err, diff.Of(who, sh.who))
		}
	}
}

// told is a memory that records on whose behalf it was last called.
type told struct {
	*memory
	who vm.Owner
}

func (s *told) Get(ctx context.Context, ref string) (snapshot.Snapshot, error) {
	s.who = vm.Behalf(ctx)
	return s.memory.Get(ctx, ref)
}

func (s *told) List(ctx context.Context) ([]snapshot.Snapshot, error) {
	s.who = vm.Behalf(ctx)
	return s.memory.List(ctx)
}
