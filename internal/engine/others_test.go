package engine_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// What else has volumes and interfaces of the node keeps them at a start of the engine, also if it cannot be asked who that is. What nobody
// has is as before.
func TestOthersKeepWhatTheyHave(t *testing.T) {
	container, holder, lost := vm.NewID(), vm.NewID(), vm.NewID() // of these, only the first has an interface
	failing := errors.New("no answer")
	for name, c := range map[string]struct {
		others   func(context.Context, vm.ID) (bool, error)
		attached []vm.ID
		strays   []vm.ID
	}{
		"known":     {func(_ context.Context, id vm.ID) (bool, error) { return id != lost, nil }, []vm.ID{container, holder}, nil},
		"uncertain": {func(context.Context, vm.ID) (bool, error) { return false, failing }, []vm.ID{container, holder, lost}, []vm.ID{container}},
		"none":      {nil, []vm.ID{container}, []vm.ID{container}}, // that it has an interface keeps its volume
	} {
		t.Run(name, func(t *testing.T) {
			r, ctx := newRig(t, func(r *rig) { r.cfg.Others = c.others }), t.Context()
			for _, id := range []vm.ID{container, holder, lost} {
				if _, err := r.world.Volumes().Create(ctx, volume.Spec{Name: "v" + string(id[20:]), Size: 1 << 20}); err != nil {
					t.Fatal(err)
				}
				if _, _, err := r.world.Volumes().Attach(ctx, "v"+string(id[20:]), id, volume.Mode{}); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := r.world.Network().Attach(ctx, container, "c", 0, vm.NICSpec{}); err != nil {
				t.Fatal(err)
			}
			r.stop()
			r.start()
			var attached, strays []vm.ID
			all, err := r.Volumes().List(ctx)
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range all {
				for _, a := range v.Attachments {
					attached = append(attached, a.VM)
				}
			}
			aside, err := r.Strays(ctx)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range aside {
				strays = append(strays, s.ID)
			}
			slices.Sort(attached)
			slices.Sort(strays)
			if !slices.Equal(attached, sorted(c.attached)) || !slices.Equal(strays, sorted(c.strays)) {
				t.Errorf("attached to %v, strays %v; want %v, %v", attached, strays, c.attached, c.strays)
			}
		})
	}
}

func sorted(ids []vm.ID) []vm.ID { return slices.Sorted(slices.Values(ids)) }
