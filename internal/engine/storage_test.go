package engine_test

import (
	"testing"

	"cocoonstack.io/cocoon/internal/vm"
)

// TestDiskImagesLargerThanTheDefault: the default size must not refuse an image, but a requested size may.
func TestDiskImagesLargerThanTheDefault(t *testing.T) {
	r := newRig(t)
	for name, c := range map[string]struct {
		image       string
		asked, want int64
	}{
		"large":      {"cloud", 0, 20 << 30},
		"larger":     {"cloud", 30 << 30, 30 << 30},
		"as-asked":   {"cloud", 10 << 30, 10 << 30}, // the store refuses it
		"container":  {"demo", 0, vm.DefaultStorage},
		"small-disk": {"disk", 0, vm.DefaultStorage},
	} {
		rec := r.must(r.Create(t.Context(), vm.Spec{Name: name, Image: c.image, Storage: c.asked}))
		if rec.Spec.Storage != c.want {
			t.Errorf("%s: %d bytes of storage, want %d", name, rec.Spec.Storage, c.want)
		}
	}
}
