package engine_test

import (
	"fmt"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// A VM whose disks cannot be merged is no longer saved before it has too many layers to start.
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

// A crash may happen while a guest is paused for a moment, outside any operation that the journal knows.
func TestAGuestFoundPausedGoesOn(t *testing.T) {
	r := newRig(t)
	rec := r.must(r.Launch(t.Context(), spec("web")))
	r.await("web", "ready", ready)
	r.stop()
	inst, err := r.world.Driver().Adopt(t.Context(), hypervisor.Handle(rec.Handle))
	if err != nil {
		t.Fatal(err)
	}
	pauser, ok := hypervisor.As[hypervisor.Pauser](inst)
	if !ok {
		t.Fatal("the driver pauses no guest")
	}
	if err := pauser.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !r.world.Guest(rec.ID).Self().Paused {
		t.Fatal("it was not paused")
	}
	r.start()
	<-r.Recovered()
	if r.world.Guest(rec.ID).Self().Paused {
		t.Error("after the restart of the daemon it stands still")
	}
	if err := inst.Close(); err != nil {
		t.Error(err)
	}
}
