package cocoond

import (
	"bytes"
	"path/filepath"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/local"
)

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
		if _, err := store.Put(t.Context(), key, disk(n), local.PutOptions{Origin: local.Origin{URL: "http://x.example/" + key}}); err != nil {
			t.Fatal(err)
		}
	}
	used, err := store.Get(t.Context(), "used")
	if err != nil {
		t.Fatal(err)
	}
	got, err := collectPulled(t.Context(), store, image.GCLimits{MaxAge: time.Nanosecond}, func(id string) bool { return id == used.ID })
	if err != nil || len(got.Images) != 1 || got.Images[0].Name != "unused" {
		t.Errorf("%+v, %v", got, err)
	}
	if left, err := store.List(t.Context()); err != nil || len(left) != 2 {
		t.Errorf("%+v, %v", left, err)
	}
}
