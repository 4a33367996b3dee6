package local_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/snapshot/snapshottest"
)

// offered returns a store with a snapshot that arrives.
func offered(t *testing.T, dir string) (*local.Store, snapshot.Draft, snapshot.Snapshot) {
	t.Helper()
	s, err := local.New(local.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	d, record := snapshottest.Begin(t, s, snapshottest.NewGuest(t), "late")
	if _, err := d.Offer(t.Context(), record); err == nil {
		t.Error("it is offered, and nobody writes its memory")
	}
	feed(t, d.Dir())
	got, err := d.Offer(t.Context(), record)
	if err != nil || !got.Arriving {
		t.Fatal(got, err)
	}
	return s, d, record
}

// feed makes the socket of a writer.
func feed(t *testing.T, dir string) {
	t.Helper()
	t.Chdir(dir) // its path may be too long
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: snapshot.FileFeed})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	_ = l.Close()
	t.Chdir("/")
}

func TestOffer(t *testing.T) {
	dir := t.TempDir()
	s, d, record := offered(t, dir)
	ctx := t.Context()
	if all, err := s.List(ctx); err != nil || len(all) != 1 || !all[0].Arriving || all[0].Name != "late" {
		t.Errorf("%+v, %v", all, err)
	}
	if _, err := s.Create(ctx, "late"); !errdefs.IsAlreadyExists(err) {
		t.Error(err)
	}
	if err := s.Remove(ctx, "late"); !errdefs.IsFailedPrecondition(err) {
		t.Error(err)
	}
	if _, err := s.Update(ctx, "late", func(s *snapshot.Snapshot) { s.Description = "x" }); !errdefs.IsFailedPrecondition(err) {
		t.Error(err)
	}
	brief, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := s.Hold(brief, "late"); !errdefs.Is(err, errdefs.Canceled) {
		t.Error(err)
	}
	other, _ := snapshottest.Begin(t, s, snapshottest.NewGuest(t), "other")
	if id, err := other.Base(ctx, d.ID()); id != "" || err != nil {
		t.Errorf("the base of another is %q, %v", id, err)
	}
	_ = other.Discard()

	early, err := s.HoldArriving(ctx, "late")
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(early.Feed()); err != nil || early.Feed() != filepath.Join(d.Dir(), snapshot.FileFeed) {
		t.Error(info, err)
	}
	if err := early.Verify(ctx); err != nil {
		t.Error(err)
	}
	committed := make(chan error, 1)
	go func() {
		_, err := d.Commit(ctx, record)
		committed <- err
	}()
	held := make(chan snapshot.Held, 1)
	go func() {
		h, err := s.Hold(ctx, "late")
		if err != nil {
			t.Error(err)
		}
		held <- h
	}()
	if _, err := os.Stat(filepath.Join(d.Dir(), snapshot.FileMeta)); err == nil {
		t.Error("it is whole before its memory is")
	}
	select {
	case err := <-committed:
		t.Fatalf("it is whole, and somebody uses what arrives: %v", err)
	case h := <-held:
		t.Fatalf("it is held as a whole: %v", h)
	default:
	}
	early.Release()
	if err := <-committed; err != nil {
		t.Fatal(err)
	}
	h := <-held
	defer h.Release()
	again, err := s.HoldArriving(ctx, "late")
	if err != nil || again.Feed() != "" || h.Feed() != "" || h.Snapshot().Arriving || h.Snapshot().Size == 0 {
		t.Fatal(again, err)
	}
	again.Release()
	if _, err := os.Lstat(filepath.Join(d.Dir(), snapshot.FileFeed)); !os.IsNotExist(err) {
		t.Error(err)
	}
	if f, err := h.Open(snapshot.FileMemory); err != nil {
		t.Error(err)
	} else {
		_ = f.Close()
	}
	if err := d.Discard(); err != nil { // it does nothing
		t.Error(err)
	}
	_ = s.Close()
	if s, err = local.New(local.Config{Dir: dir}); err != nil {
		t.Fatal(err)
	}
	if x, err := s.Get(ctx, "late"); err != nil || x.Arriving {
		t.Error(x, err)
	}
}

// TestOfferFails: what never comes whole is gone, also for those who wait for it.
func TestOfferFails(t *testing.T) {
	s, d, _ := offered(t, t.TempDir())
	early, err := s.HoldArriving(t.Context(), "late")
	if err != nil {
		t.Fatal(err)
	}
	waits := make(chan error, 1)
	go func() {
		_, err := s.Hold(t.Context(), "late")
		waits <- err
	}()
	if err := d.Discard(); err != nil {
		t.Fatal(err)
	}
	if err := <-waits; !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	early.Release()
	if all, err := s.List(t.Context()); err != nil || len(all) > 0 {
		t.Errorf("%+v, %v", all, err)
	}
	if _, err := os.Stat(d.Dir()); !os.IsNotExist(err) {
		t.Error(err)
	}
	if d, err = s.Create(t.Context(), "late"); err != nil {
		t.Error(err)
	}
	_ = d.Discard()
}

// TestOfferDies: the next process removes what had not arrived, and a socket that is left beside a whole snapshot.
func TestOfferDies(t *testing.T) {
	for _, whole := range []bool{false, true} {
		dir := t.TempDir()
		s, d, record := offered(t, dir)
		if whole {
			if _, err := d.Commit(t.Context(), record); err != nil {
				t.Fatal(err)
			}
			feed(t, d.Dir())
		}
		_ = s.Close()
		s, err := local.New(local.Config{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		if all, err := s.List(t.Context()); err != nil || (len(all) == 1) != whole {
			t.Errorf("%+v, %v", all, err)
		}
		if left, err := filepath.Glob(filepath.Join(dir, "*", snapshot.FileFeed)); err != nil || len(left) > 0 {
			t.Errorf("left: %q, %v", left, err)
		}
		if _, err := os.Stat(d.Dir()); (err == nil) != whole {
			t.Error(err)
		}
		_ = s.Close()
	}
}
