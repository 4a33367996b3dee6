package nodeapi_test

import (
	"context"
	"io"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodeapi"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestBehalfCrossesTheWire checks that calls and streams arrive on behalf of the owner for whom the client made them.
func TestBehalfCrossesTheWire(t *testing.T) {
	sh := &told{catalog: newCatalog("warm")}
	c := serveCatalog(t, &scripted{}, sh.catalog, func(s *nodeapi.Catalog) { s.Store = sh })
	prod := vm.Owner{Namespace: "prod", PodUID: "p", SetUID: "s"}
	for _, who := range []vm.Owner{{}, prod} {
		ctx := vm.OnBehalf(t.Context(), who)
		if _, err := c.GetSnapshot(ctx, "warm"); err != nil || sh.who != who {
			t.Errorf("a call of %+v arrived as %+v, %v", who, sh.who, err)
		}
		sh.who = vm.Owner{Namespace: "nobody"}
		if _, err := c.ListSnapshots(ctx); err != nil || sh.who != who {
			t.Errorf("a stream of %+v arrived as %+v, %v", who, sh.who, err)
		}
	}
}

// TestOnlyTheOperatorPublishes, and only the operator's own snapshots; folders of the node are the operator's, too.
func TestOnlyTheOperatorPublishes(t *testing.T) {
	sh := newCatalog("golden", "db")
	db := sh.all["db"]
	db.Owner = vm.Owner{Namespace: "prod"}
	sh.all["db"] = db
	c := serveCatalog(t, &scripted{}, sh, nil)
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

func second[T any](_ T, err error) error { return err }

// told is a catalog that records on whose behalf it was last called.
type told struct {
	*catalog
	who vm.Owner
}

func (s *told) Get(ctx context.Context, ref string) (snapshot.Snapshot, error) {
	s.who = vm.Behalf(ctx)
	return s.catalog.Get(ctx, ref)
}

func (s *told) List(ctx context.Context) ([]snapshot.Snapshot, error) {
	s.who = vm.Behalf(ctx)
	return s.catalog.List(ctx)
}

// strict is an origin whose images belong to the operator alone.
type strict struct{ *origin }

func (s strict) Get(ctx context.Context, ref string) (image.Image, error) {
	if !vm.Behalf(ctx).Operator() {
		return image.Image{}, errdefs.NotFoundf("no image %s", ref)
	}
	return s.origin.Get(ctx, ref)
}

// The image of a namespace's snapshot is requested with the pod's credentials, although it is here; a snapshot that
// the operator publishes includes the right to its image.
func TestASnapshotGivesNoRightToItsImage(t *testing.T) {
	for name, c := range map[string]struct {
		owner vm.Owner
		asked int
		ok    bool
	}{
		"of the namespace": {vm.Owner{Namespace: "prod"}, 1, false},
		"published":        {vm.Owner{}, 0, true},
	} {
		sh, o := newCatalog(), &origin{err: errdefs.Preconditionf("the registry refuses access")}
		sh.all["s"] = snapshot.Snapshot{ID: "id", Name: "s", Owner: c.owner, Published: []string{"prod"}, ImageDigest: "sha256:here", Image: "victim/app:1"}
		client := serveCatalog(t, &scripted{}, sh, func(s *nodeapi.Catalog) { s.Images, s.Puller = strict{o}, o })
		_, err := client.CloneWithImage(vm.OnBehalf(t.Context(), vm.Owner{Namespace: "prod"}), vm.CloneSpec{Snapshot: "s", Name: "copy"}, nil)
		if (err == nil) != c.ok || err != nil && !errdefs.IsFailedPrecondition(err) || len(o.asked) != c.asked {
			t.Errorf("%s: %v, asked %d times", name, err, len(o.asked))
		}
	}
}

// The image store belongs to the operator: others may name images, but not list, copy, replace or remove them.
func TestImagesAreTheOperatorsToKeep(t *testing.T) {
	c := serveCatalog(t, &scripted{}, newCatalog(), nil)
	prod := vm.OnBehalf(t.Context(), vm.Owner{Namespace: "prod"})
	for what, err := range map[string]error{
		"list":    second(c.ListImages(prod)),
		"remove":  c.RemoveImage(prod, "demo"),
		"import":  second(c.ImportImage(prod, "demo", strings.NewReader("x"), nil)),
		"export":  c.ExportImage(prod, "demo", io.Discard),
		"collect": second(c.CollectImages(prod, image.GCLimits{})),
		"map":     second(c.SyncMappings(prod, "x", nil)),
	} {
		if !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
