package snapshottest

import (
	"bytes"
	"context"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// as returns a context of a request on behalf of a namespace; "" is the operator.
func as(t *testing.T, namespace string) context.Context {
	t.Helper()
	return vm.OnBehalf(t.Context(), vm.Owner{Namespace: namespace, PodUID: "uid-of-" + namespace})
}

// saveAs saves a snapshot on behalf of a namespace.
func saveAs(t *testing.T, s snapshot.Store, namespace, name string) snapshot.Snapshot {
	t.Helper()
	d, x, err := Fill(as(t, namespace), s, NewGuest(t), name)
	if err != nil {
		t.Fatal(err)
	}
	if x, err = d.Commit(as(t, namespace), x); err != nil {
		t.Fatal(err)
	}
	if x.Owner.Namespace != namespace {
		t.Errorf("saved on behalf of %q, it belongs to %+v", namespace, x.Owner)
	}
	return x
}

// owners checks that no owner can find, use or change the snapshots of another owner, whatever name they use.
func owners(t *testing.T, s snapshot.Store) {
	prod, dev, golden := saveAs(t, s, "prod", "db"), saveAs(t, s, "dev", "db"), saveAs(t, s, "", "golden")
	if _, err := s.Create(as(t, "prod"), "db"); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a second snapshot of prod called db: %v", err)
	}
	for _, ref := range []string{dev.ID, dev.ID[:12], "dev/db", golden.ID, "golden"} {
		ctx := as(t, "prod")
		for what, try := range map[string]func() error{
			"get":    func() error { _, err := s.Get(ctx, ref); return err },
			"hold":   func() error { _, err := s.Hold(ctx, ref); return err },
			"remove": func() error { return s.Remove(ctx, ref) },
			"update": func() error {
				_, err := s.Update(ctx, ref, func(x *snapshot.Snapshot) { x.Published = []string{"prod"} })
				return err
			},
		} {
			class(t, what+" "+ref+" on behalf of prod", try(), errdefs.NotFound)
		}
	}
	for who, want := range map[string]string{"prod": prod.ID, "dev": dev.ID} {
		if x, err := s.Get(as(t, who), "db"); err != nil || x.ID != want {
			t.Errorf("db of %s is %s, %v", who, x.ID, err)
		}
		if all, err := s.List(as(t, who)); err != nil || len(all) != 1 || all[0].ID != want {
			t.Errorf("%s has %+v, %v", who, all, err)
		}
	}
	if all, err := s.List(t.Context()); err != nil || len(all) != 3 {
		t.Errorf("the operator has %d snapshots, %v", len(all), err)
	}
	_, err := s.Get(t.Context(), "db")
	class(t, "db, of which there are two", err, errdefs.InvalidArgument)

	if _, err := s.Update(t.Context(), "golden", func(x *snapshot.Snapshot) { x.Published = []string{"prod"} }); err != nil {
		t.Fatal(err)
	}
	h, err := s.Hold(as(t, "prod"), "golden")
	if err != nil {
		t.Fatalf("a published snapshot: %v", err)
	}
	h.Release()
	class(t, "removal of a published snapshot", s.Remove(as(t, "prod"), "golden"), errdefs.FailedPrecondition)
	_, err = s.Hold(as(t, "dev"), "golden")
	class(t, "what is published to others", err, errdefs.NotFound)

	travelsWithOwner(t, s, prod, golden)
	if err := s.Remove(as(t, "prod"), "db"); err != nil {
		t.Error(err)
	}
	if _, err := s.Get(as(t, "dev"), "db"); err != nil {
		t.Errorf("the snapshot of dev went with that of prod: %v", err)
	}
}

// travelsWithOwner checks the owner of a snapshot that comes from elsewhere.
func travelsWithOwner(t *testing.T, s snapshot.Store, prod, golden snapshot.Snapshot) {
	t.Helper()
	export := func(id string) *bytes.Reader {
		h, err := s.Hold(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Release()
		var out bytes.Buffer
		if err := s.Export(t.Context(), h, &out); err != nil {
			t.Fatal(err)
		}
		return bytes.NewReader(out.Bytes())
	}
	none := func(int64) {}
	_, err := s.Import(as(t, "dev"), "stolen", "", export(prod.ID), none)
	class(t, "import of prod's on behalf of dev", err, errdefs.NotFound)
	for who, want := range map[string]string{"prod": "prod", "": "prod"} {
		x, err := s.Import(as(t, who), "copy-"+who+"-", "", export(prod.ID), none)
		if err != nil || x.Owner.Namespace != want {
			t.Errorf("imported on behalf of %q it belongs to %+v, %v", who, x.Owner, err)
		}
	}
	x, err := s.Import(as(t, "dev"), "mine", "", export(golden.ID), none)
	if err != nil || x.Owner.Namespace != "dev" || len(x.Published) > 0 {
		t.Errorf("the operator's, imported on behalf of dev, belongs to %+v and is published to %q, %v", x.Owner, x.Published, err)
	}
}
