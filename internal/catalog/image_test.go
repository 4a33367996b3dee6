package catalog_test

import (
	"bytes"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
	"cocoonstack.io/cocoon/internal/vm"
)

// The image store belongs to the operator: others may name images, but not list, copy, replace or remove them.
func TestImagesAreTheOperatorsToKeep(t *testing.T) {
	var c catalog.Images
	prod := vm.OnBehalf(t.Context(), vm.Owner{Namespace: "prod"})
	for what, err := range map[string]error{
		"list":    second(c.List(prod)),
		"remove":  c.Remove(prod, "demo"),
		"import":  second(c.Import(prod, "demo", strings.NewReader("x"), nil)),
		"export":  c.Export(prod, "demo", io.Discard),
		"collect": second(c.Collect(prod, image.GCLimits{})),
		"push":    second(c.Push(prod, image.PushRequest{Ref: "demo"}, nil)),
		"map":     second(c.SyncMappings(prod, "x", nil)),
	} {
		if !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestCollectionsByThemselvesSpareImports(t *testing.T) {
	store, err := local.New(local.Config{Dir: filepath.Join(t.TempDir(), "images")})
	if err != nil {
		t.Fatal(err)
	}
	disk := func(n byte) *bytes.Reader {
		b := make([]byte, 1<<16)
		b[0], b[510], b[511] = n, 0x55, 0xaa
		return bytes.NewReader(b)
	}
	if _, err := store.Import(t.Context(), "mine", disk(1), nil); err != nil {
		t.Fatal(err)
	}
	for key, n := range map[string]byte{"used": 2, "unused": 3} {
		if _, err := store.Put(t.Context(), key, disk(n), image.Fetched{Origin: image.Origin{URL: "http://x.example/" + key}}); err != nil {
			t.Fatal(err)
		}
	}
	used, err := store.Get(t.Context(), "used")
	if err != nil {
		t.Fatal(err)
	}
	images := catalog.Images{Store: store, InUse: func(id string) bool { return id == used.ID }}
	got, err := images.CollectPulled(t.Context(), image.GCLimits{MaxAge: time.Nanosecond})
	if err != nil || len(got.Images) != 1 || got.Images[0].Name != "unused" {
		t.Errorf("%+v, %v", got, err)
	}
	if left, err := store.List(t.Context()); err != nil || len(left) != 2 {
		t.Errorf("%+v, %v", left, err)
	}
}
