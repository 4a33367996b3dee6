package engine_test

import (
	"fmt"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// A VM whose disks nobody can merge is not saved until it cannot start any more.
func TestSavesEndBeforeTheLayersAreTooMany(t *testing.T) {
	r := newRig(t)
	r.must(r.Create(t.Context(), spec("web")))
	const enough = 100
	for i := range enough {
		_, err := r.SaveSnapshot(t.Context(), "web", vm.SaveSpec{Name: fmt.Sprintf("s%d", i)})
		if err == nil {
			continue
		}
		wantClass(t, "save of a disk of many layers", err, errdefs.FailedPrecondition)
		r.must(r.Start(t.Context(), "web"))
		return
	}
	t.Errorf("%d layers were put on a disk", enough)
}
