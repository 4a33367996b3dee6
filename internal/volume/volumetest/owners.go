package volumetest

import (
	"io"
	"reflect"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

func createAs(t *testing.T, s volume.Store, namespace, name string) volume.Volume {
	t.Helper()
	v, err := provide(as(t, namespace), t, s, volume.Spec{Name: name, Size: MiB})
	if err != nil {
		t.Fatal(err)
	}
	if v.Owner != vm.Behalf(as(t, namespace)) {
		t.Errorf("created on behalf of %q, it belongs to %+v", namespace, v.Owner)
	}
	return v
}

// owners checks that no owner can find, use or change what belongs to another owner, whatever name they use.
func owners(t *testing.T, s volume.Store) {
	prod, dev, golden := createAs(t, s, "prod", "db"), createAs(t, s, "dev", "db"), createAs(t, s, "", "golden")
	_, err := provide(as(t, "prod"), t, s, volume.Spec{Name: "db", Size: MiB})
	class(t, "a second volume of prod called db", err, errdefs.AlreadyExists)
	m, makes := volume.As[volume.Maker](s)
	ctx := as(t, "prod")
	for _, ref := range []string{string(dev.ID), string(dev.ID[:12]), "dev/db", string(golden.ID), "golden"} {
		for what, try := range map[string]func() error{
			"get":    func() error { _, err := s.Get(ctx, ref); return err },
			"update": func() error { _, err := s.Update(ctx, ref, func(*volume.Volume) { t.Error("called") }); return err },
			"resize": func() error { _, err := s.Resize(ctx, ref, 2*MiB); return err },
			"attach": func() error { _, _, err := s.Attach(ctx, ref, vm.NewID(), volume.Mode{ReadOnly: true}); return err },
			"detach": func() error { return s.Detach(ctx, ref, vm.NewID()) },
		} {
			class(t, what+" "+ref+" on behalf of prod", try(), errdefs.NotFound)
		}
		if makes {
			class(t, "delete "+ref+" on behalf of prod", m.Delete(ctx, ref), errdefs.NotFound)
		}
		if c, ok := volume.As[volume.Cloner](s); ok {
			_, err := c.Clone(ctx, ref, volume.Spec{})
			class(t, "clone "+ref, err, errdefs.NotFound)
		}
		if c, ok := volume.As[volume.Carrier](s); ok {
			class(t, "export "+ref, c.Export(ctx, ref, io.Discard), errdefs.NotFound)
		}
		if c, ok := volume.As[volume.Snapshotter](s); ok {
			_, err := c.Snapshot(ctx, ref, volume.Spec{})
			class(t, "snapshot of "+ref, err, errdefs.NotFound)
		}
	}
	for who, want := range map[string]vm.ID{"prod": prod.ID, "dev": dev.ID} {
		if v, err := s.Get(as(t, who), "db"); err != nil || v.ID != want {
			t.Errorf("db of %s is %s, %v", who, v.ID, err)
		}
		if all, err := s.List(as(t, who)); err != nil || len(all) != 1 || all[0].ID != want {
			t.Errorf("%s has %+v, %v", who, all, err)
		}
	}
	if all, err := s.List(t.Context()); err != nil || len(all) != 3 || all[0].ID != golden.ID || all[1].ID != dev.ID || all[2].ID != prod.ID {
		t.Errorf("the operator has %+v, %v", all, err)
	}
	_, err = s.Get(t.Context(), "db")
	class(t, "db, of which there are two", err, errdefs.InvalidArgument)
	if v, err := s.Get(t.Context(), "dev/db"); err != nil || v.ID != dev.ID {
		t.Errorf("dev/db is %+v, %v", v, err)
	}
	if c, ok := volume.As[volume.Cloner](s); ok {
		if v, err := c.Clone(t.Context(), "dev/db", volume.Spec{Name: "copy"}); err != nil || v.Owner != dev.Owner {
			t.Errorf("the operator's copy of dev/db is %+v, %v", v, err)
		}
	}
	snapshotOwners(t, s, prod, dev)
	if !makes {
		return
	}
	if err := m.Delete(as(t, "prod"), "db"); err != nil {
		t.Error(err)
	}
	if _, err := s.Get(as(t, "dev"), "db"); err != nil {
		t.Errorf("the volume of dev went with that of prod: %v", err)
	}
}

func snapshotOwners(t *testing.T, s volume.Store, prod, dev volume.Volume) {
	t.Helper()
	shots, ok := volume.As[volume.Snapshotter](s)
	if !ok {
		return
	}
	own, err := shots.Snapshot(as(t, "prod"), "db", volume.Spec{Name: "x"})
	if err != nil || own.Owner != prod.Owner {
		t.Fatalf("prod's is %+v, %v", own, err)
	}
	other, err := shots.Snapshot(t.Context(), string(dev.ID), volume.Spec{Name: "x"})
	if err != nil || other.Owner != dev.Owner {
		t.Fatalf("dev's, taken by the operator, is %+v, %v", other, err)
	}
	ctx := as(t, "prod")
	for _, ref := range []string{string(other.ID), "dev/x"} {
		for what, try := range map[string]func() error{
			"get":     func() error { _, err := shots.GetSnapshot(ctx, ref); return err },
			"copy":    func() error { _, err := shots.FromSnapshot(ctx, ref, volume.Spec{}); return err },
			"restore": func() error { _, err := shots.Restore(ctx, "db", ref); return err },
			"delete":  func() error { return shots.DeleteSnapshot(ctx, ref) },
		} {
			class(t, what+" snapshot "+ref+" on behalf of prod", try(), errdefs.NotFound)
		}
	}
	if all, err := shots.Snapshots(ctx); err != nil || len(all) != 1 || all[0].ID != own.ID {
		t.Errorf("prod has %+v, %v", all, err)
	}
	if v, err := shots.FromSnapshot(t.Context(), "dev/x", volume.Spec{Name: "from"}); err != nil || v.Owner != dev.Owner {
		t.Errorf("the operator's copy of dev/x is %+v, %v", v, err)
	}
}

// reopened checks that everything is found again by the next process.
func reopened(t *testing.T, s volume.Store, reopen func() volume.Store) {
	one, two := vm.NewID(), vm.NewID()
	create(t, s, "writes", 2)
	write(t, s, "writes", MiB, "text")
	v := createAs(t, s, "prod", "reads")
	if _, _, err := s.Attach(t.Context(), "writes", one, volume.Mode{}); err != nil {
		t.Fatal(err)
	}
	for _, user := range []vm.ID{one, two} {
		if _, _, err := s.Attach(t.Context(), string(v.ID), user, volume.Mode{ReadOnly: true}); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Detach(t.Context(), string(v.ID), one); err != nil {
		t.Fatal(err)
	}
	create(t, s, "named", 1)
	if _, err := s.Update(t.Context(), "named", func(x *volume.Volume) { x.Labels = map[string]string{"a": "\x01é"} }); err != nil {
		t.Fatal(err)
	}
	if m, ok := volume.As[volume.Maker](s); ok {
		create(t, s, "deleted", 1)
		if err := m.Delete(t.Context(), "deleted"); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Update(t.Context(), "named", func(x *volume.Volume) { x.Name = "renamed" }); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Resize(t.Context(), "renamed", 3*MiB); err != nil {
			t.Fatal(err)
		}
	}
	var before []volume.Snapshot
	count := 3
	shots, has := volume.As[volume.Snapshotter](s)
	if has {
		purpose := string(vm.NewID())
		x, err := shots.Snapshot(t.Context(), "writes", volume.Spec{Name: "x", Labels: map[string]string{"k": "v"}, For: purpose})
		if err != nil || x.For != purpose {
			t.Fatalf("taken as %+v, %v", x, err)
		}
		if v, err := shots.FromSnapshot(t.Context(), "x", volume.Spec{Name: "copy", For: purpose}); err != nil || v.For != purpose {
			t.Fatalf("made as %+v, %v", v, err)
		}
		_, err = shots.Snapshot(t.Context(), "writes", volume.Spec{For: "nothing"})
		class(t, "for what has no id", err, errdefs.InvalidArgument)
		before, _ = shots.Snapshots(t.Context())
		count++
	}
	want, err := s.List(t.Context())
	if err != nil || len(want) != count {
		t.Fatalf("there is %+v, %v", want, err)
	}

	s = reopen()
	got, err := s.List(t.Context())
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("found %+v, %v; want %+v", got, err, want)
	}
	if shots, has = volume.As[volume.Snapshotter](s); has {
		if after, err := shots.Snapshots(t.Context()); err != nil || !reflect.DeepEqual(after, before) {
			t.Errorf("found %+v, %v; want %+v", after, err, before)
		}
	}
	_, _, err = s.Attach(t.Context(), "writes", two, volume.Mode{})
	class(t, "attached to another VM", err, errdefs.FailedPrecondition)
	_, _, err = s.Attach(t.Context(), string(v.ID), one, volume.Mode{})
	class(t, "a writer beside a reader", err, errdefs.FailedPrecondition)
	m, makes := volume.As[volume.Maker](s)
	if makes {
		class(t, "attached", m.Delete(t.Context(), "writes"), errdefs.FailedPrecondition)
	}
	if _, _, err := s.Attach(t.Context(), "writes", one, volume.Mode{}); err != nil {
		t.Errorf("the VM that has it: %v", err)
	}
	if err := s.Detach(t.Context(), "writes", one); err != nil {
		t.Fatal(err)
	}
	holds(t, s, "writes", 2, map[int64]string{MiB: "text"})
	if makes {
		create(t, s, "deleted", 1)
	}
	s = reopen()
	if v, err := s.Get(t.Context(), "writes"); err != nil || len(v.Attachments) > 0 {
		t.Errorf("it is %+v, %v", v, err)
	}
}
