// Package volumetest is the contract of volume.Store as a test suite that runs against any implementation.
//
// It starts no VM: it writes to the disk of an attached volume itself. Tests of abilities that a store does not have are skipped. A
// store that is no volume.Maker is a Provider, so that the tests have volumes.
package volumetest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// MiB is the unit of sizes in the suite, bytes.
const MiB = 1 << 20

// Run checks a store. open makes an empty store. reopen ends the process that has a store, as far as the store can tell, and returns
// the store as the next process finds it; nil: the store keeps nothing.
func Run(t *testing.T, open func(t *testing.T) volume.Store, reopen func(t *testing.T, s volume.Store) volume.Store) {
	for name, test := range map[string]func(t *testing.T, s volume.Store){
		"Life":          life,
		"Names":         names,
		"Labels":        labels,
		"Owners":        owners,
		"Sizes":         sizes,
		"Update":        updates,
		"Attach":        attaches,
		"AttachRace":    attachRace,
		"AttachShared":  attachShared,
		"Resize":        resizes,
		"Usage":         usage,
		"Canceled":      canceled,
		"Concurrent":    concurrent,
		"Snapshot":      snapshots,
		"SnapshotNames": snapshotNames,
		"Restore":       restores,
		"Clone":         clones,
		"Live":          live,
		"Carry":         carries,
		"ImportFails":   importFails,
		"ExportRefused": exportRefused,
		"ExportRace":    exportRace,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
	if reopen != nil {
		t.Run("Reopen", func(t *testing.T) {
			s := open(t)
			reopened(t, s, func() volume.Store { s = reopen(t, s); return s })
		})
	}
}

// ability returns an ability of s, or skips the test.
func ability[T any](t *testing.T, s volume.Store) T {
	t.Helper()
	a, ok := volume.As[T](s)
	if !ok {
		t.Skipf("%T has not the ability %v", s, reflect.TypeFor[T]())
	}
	return a
}

// Provider is a store with the volumes of its configuration, in a test.
type Provider interface {
	// Provide adds a volume to the configuration: its name, its size in bytes, its labels, and as its owner the one of the request.
	Provide(ctx context.Context, s volume.Spec) (volume.Volume, error)
}

// provide makes a volume, or adds one to the configuration of the store.
func provide(ctx context.Context, t *testing.T, s volume.Store, spec volume.Spec) (volume.Volume, error) {
	t.Helper()
	if m, ok := volume.As[volume.Maker](s); ok {
		return m.Create(ctx, spec)
	}
	p, ok := volume.As[Provider](s)
	if !ok {
		t.Fatalf("%T neither makes volumes nor is given any", s)
	}
	return p.Provide(ctx, spec)
}

func class(t *testing.T, what string, err error, want errdefs.Class) {
	t.Helper()
	if !errdefs.Is(err, want) {
		t.Errorf("%s: got %v (%v), want %v", what, err, errdefs.ClassOf(err), want)
	}
}

// as returns a context of a request on behalf of a namespace; "" is the operator.
func as(t *testing.T, namespace string) context.Context {
	t.Helper()
	return vm.OnBehalf(t.Context(), vm.Owner{Namespace: namespace, PodUID: "uid-of-" + namespace})
}

// create makes a volume of n MiB.
func create(t *testing.T, s volume.Store, name string, n int64) volume.Volume {
	t.Helper()
	v, err := provide(t.Context(), t, s, volume.Spec{Name: name, Size: n * MiB, Labels: map[string]string{"k": "v"}})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// write writes text to the disk of a volume, as a VM does.
func write(t *testing.T, s volume.Store, ref string, off int64, text string) {
	t.Helper()
	user := vm.NewID()
	_, disk, err := s.Attach(t.Context(), ref, user, volume.Mode{})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(writeAt(disk.Path, []byte(text), off), s.Detach(t.Context(), ref, user)); err != nil {
		t.Fatal(err)
	}
}

func writeAt(path string, data []byte, off int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, off)
	return errors.Join(err, f.Sync(), f.Close())
}

// read returns what a VM reads of a volume.
func read(t *testing.T, s volume.Store, ref string) []byte {
	t.Helper()
	user := vm.NewID()
	v, disk, err := s.Attach(t.Context(), ref, user, volume.Mode{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(disk.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	data, err := io.ReadAll(f)
	if err := errors.Join(err, s.Detach(t.Context(), ref, user)); err != nil {
		t.Fatal(err)
	}
	if int64(len(data)) != v.Size {
		t.Errorf("volume %s has %d bytes, its disk %d", v.Name, v.Size, len(data))
	}
	return data
}

// holds checks that a volume has n MiB of zeros, except for texts at offsets.
func holds(t *testing.T, s volume.Store, ref string, n int64, want map[int64]string) {
	t.Helper()
	whole := make([]byte, n*MiB)
	for off, text := range want {
		copy(whole[off:], text)
	}
	if !bytes.Equal(read(t, s, ref), whole) {
		t.Errorf("volume %s: other content than %d MiB with %v", ref, n, want)
	}
}

func life(t *testing.T, s volume.Store) {
	v := create(t, s, "one", 2)
	if !v.ID.Valid() || v.Name != "one" || v.CreatedAt.IsZero() || v.Size != 2*MiB || v.Kind == "" || v.From != "" || len(v.Attachments) != 0 || v.Labels["k"] != "v" {
		t.Errorf("created as %+v", v)
	}
	for _, ref := range []string{"one", string(v.ID), string(v.ID[:3])} {
		if got, err := s.Get(t.Context(), ref); err != nil || !reflect.DeepEqual(got, v) {
			t.Errorf("%s is %+v, %v; want %+v", ref, got, err, v)
		}
	}
	_, err := s.Get(t.Context(), "on")
	class(t, "a prefix of the name", err, errdefs.NotFound)
	_, err = s.Get(t.Context(), string(v.ID[:2]))
	class(t, "two characters", err, errdefs.NotFound)
	holds(t, s, "one", 2, nil)
	create(t, s, "a", 1)
	all, err := s.List(t.Context())
	if err != nil || len(all) != 2 || all[0].Name != "a" || all[1].Name != "one" {
		t.Fatalf("list is %+v, %v", all, err)
	}
	all[0].Labels["k"] = "changed"
	if got, _ := s.Get(t.Context(), "a"); got.Labels["k"] != "v" {
		t.Error("what was returned is the store's own")
	}
	write(t, s, "one", 5000, "text")
	holds(t, s, "one", 2, map[int64]string{5000: "text"})
	m, ok := volume.As[volume.Maker](s)
	if !ok {
		return
	}
	if err := m.Delete(t.Context(), "one"); err != nil {
		t.Error(err)
	}
	_, err = s.Get(t.Context(), "one")
	class(t, "deleted", err, errdefs.NotFound)
	class(t, "deleted twice", m.Delete(t.Context(), string(v.ID)), errdefs.NotFound)
	_, _, err = s.Attach(t.Context(), "one", vm.NewID(), volume.Mode{})
	class(t, "attached after it was deleted", err, errdefs.NotFound)
	class(t, "detached after it was deleted", s.Detach(t.Context(), "one", vm.NewID()), errdefs.NotFound)
	create(t, s, "one", 1)
	holds(t, s, "one", 1, nil)
}

func names(t *testing.T, s volume.Store) {
	m := ability[volume.Maker](t, s)
	for _, bad := range []string{"a/b", "..", ".hidden", "-x", "a b", "a\x00", strings.Repeat("x", 64), "é"} {
		_, err := m.Create(t.Context(), volume.Spec{Name: bad, Size: MiB})
		class(t, "name "+bad, err, errdefs.InvalidArgument)
	}
	for _, good := range []string{"a", "A.b_c-d", strings.Repeat("x", 63), "7"} {
		if v := create(t, s, good, 1); v.Name != good {
			t.Errorf("%q is called %q", good, v.Name)
		}
		_, err := m.Create(t.Context(), volume.Spec{Name: good, Size: MiB})
		class(t, "a taken name", err, errdefs.AlreadyExists)
		if err == nil || !strings.Contains(err.Error(), good) {
			t.Errorf("the error does not name %s: %v", good, err)
		}
	}
	one, two := create(t, s, "", 1), create(t, s, "", 1)
	if one.Name == two.Name || vm.ValidateName(one.Name) != nil {
		t.Errorf("names are %q and %q", one.Name, two.Name)
	}
	if got, err := s.Get(t.Context(), one.Name); err != nil || got.ID != one.ID {
		t.Errorf("%s is %+v, %v", one.Name, got, err)
	}
}

func labels(t *testing.T, s volume.Store) {
	m := ability[volume.Maker](t, s)
	for what, bad := range map[string]map[string]string{
		"no key": {"": "x"}, "no text": {"a": "\xff"}, "many": {"a": strings.Repeat("x", volume.MaxLabels)},
	} {
		_, err := m.Create(t.Context(), volume.Spec{Name: "a", Size: MiB, Labels: bad})
		class(t, what, err, errdefs.InvalidArgument)
	}
	given := map[string]string{"a": strings.Repeat("\x01", volume.MaxLabels-1)}
	if _, err := m.Create(t.Context(), volume.Spec{Name: "a", Size: MiB, Labels: given}); err != nil {
		t.Fatal(err)
	}
	given["a"] = "changed"
	if got, err := s.Get(t.Context(), "a"); err != nil || len(got.Labels["a"]) != volume.MaxLabels-1 {
		t.Errorf("%d bytes, %v", len(got.Labels["a"]), err)
	}
}

func sizes(t *testing.T, s volume.Store) {
	m := ability[volume.Maker](t, s)
	for _, bad := range []int64{-1, 0, 1, volume.MinSize - 1, volume.MaxSize + 1, 1 << 62} {
		_, err := m.Create(t.Context(), volume.Spec{Name: "a", Size: bad})
		class(t, "size", err, errdefs.InvalidArgument)
	}
	v, err := m.Create(t.Context(), volume.Spec{Name: "odd", Size: MiB + 1})
	if err != nil || v.Size != MiB+volume.Block {
		t.Errorf("a size that is no multiple of a block: %+v, %v", v, err)
	}
	if n := len(read(t, s, "odd")); n != MiB+volume.Block {
		t.Errorf("its disk has %d bytes", n)
	}
}

func updates(t *testing.T, s volume.Store) {
	create(t, s, "one", 1)
	create(t, s, "two", 1)
	user := vm.NewID()
	v, _, err := s.Attach(t.Context(), "one", user, volume.Mode{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.Update(t.Context(), "one", func(x *volume.Volume) {
		x.ID, x.Owner, x.Kind, x.Size, x.From, x.Attachments = "x", vm.Owner{Namespace: "x"}, "x", 7, "x", nil
		x.Labels["l"] = "w"
	})
	v.Labels["l"] = "w"
	if err != nil || !reflect.DeepEqual(got, v) {
		t.Errorf("updated to %+v, %v; want %+v", got, err, v)
	}
	_, err = s.Update(t.Context(), "one", func(x *volume.Volume) { x.Labels = map[string]string{"": ""} })
	class(t, "an invalid label", err, errdefs.InvalidArgument)
	_, err = s.Update(t.Context(), "none", func(*volume.Volume) { t.Error("called for no volume") })
	class(t, "no such volume", err, errdefs.NotFound)
	if _, ok := volume.As[volume.Maker](s); !ok {
		_, err := s.Update(t.Context(), "one", func(x *volume.Volume) { x.Name = "three" })
		class(t, "another name than the configuration's", err, errdefs.FailedPrecondition)
		if got, err := s.Get(t.Context(), "one"); err != nil || got.ID != v.ID {
			t.Errorf("after that it is %+v, %v", got, err)
		}
		return
	}
	_, err = s.Update(t.Context(), "one", func(x *volume.Volume) { x.Name = "two" })
	class(t, "a taken name", err, errdefs.AlreadyExists)
	for _, bad := range []string{"", "a/b"} {
		_, err = s.Update(t.Context(), "one", func(x *volume.Volume) { x.Name = bad })
		class(t, "name "+bad, err, errdefs.InvalidArgument)
	}
	if got, err := s.Update(t.Context(), "one", func(x *volume.Volume) { x.Name = "three" }); err != nil || got.Name != "three" || got.ID != v.ID {
		t.Errorf("renamed to %+v, %v", got, err)
	}
	_, err = s.Get(t.Context(), "one")
	class(t, "the old name", err, errdefs.NotFound)
	create(t, s, "one", 1)
	if err := s.Detach(t.Context(), "three", user); err != nil {
		t.Error(err)
	}
}

func usage(t *testing.T, s volume.Store) {
	v := create(t, s, "a", 8)
	other, err := provide(as(t, "dev"), t, s, volume.Spec{Name: "a", Size: MiB})
	if err != nil {
		t.Fatal(err)
	}
	write(t, s, string(v.ID), 4*MiB, strings.Repeat("x", 2*MiB))
	all, err := s.Usage(t.Context())
	if u := all[v.ID]; err != nil || len(all) != 2 || u.Size != 8*MiB || u.Allocated < 2*MiB || u.Allocated > 16*MiB {
		t.Errorf("usage is %+v, %v", all, err)
	}
	if all, err := s.Usage(as(t, "dev")); err != nil || len(all) != 1 || all[other.ID].Size != MiB {
		t.Errorf("usage of dev is %+v, %v", all, err)
	}
}

func canceled(t *testing.T, s volume.Store) {
	create(t, s, "a", 1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	tries := map[string]func() error{
		"get":    func() error { _, err := s.Get(ctx, "a"); return err },
		"list":   func() error { _, err := s.List(ctx); return err },
		"resize": func() error { _, err := s.Resize(ctx, "a", 2*MiB); return err },
		"attach": func() error { _, _, err := s.Attach(ctx, "a", vm.NewID(), volume.Mode{ReadOnly: true}); return err },
	}
	if m, ok := volume.As[volume.Maker](s); ok {
		tries["create"] = func() error { _, err := m.Create(ctx, volume.Spec{Name: "b", Size: MiB}); return err }
		tries["delete"] = func() error { return m.Delete(ctx, "a") }
	}
	for what, try := range tries {
		class(t, what, try(), errdefs.Canceled)
	}
	if all, err := s.List(t.Context()); err != nil || len(all) != 1 || all[0].Size != MiB || len(all[0].Attachments) > 0 {
		t.Errorf("there is %+v, %v", all, err)
	}
}

// concurrent uses one store from many goroutines.
func concurrent(t *testing.T, s volume.Store) {
	m := ability[volume.Maker](t, s)
	const workers = 8
	won := make(chan string, workers)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			v, err := m.Create(t.Context(), volume.Spec{Name: "same", Size: MiB})
			if err == nil {
				won <- string(v.ID)
			} else if !errdefs.IsAlreadyExists(err) {
				t.Error(err)
			}
			own, err := m.Create(t.Context(), volume.Spec{Size: MiB})
			if err != nil {
				t.Error(err)
				return
			}
			_, err = s.Update(t.Context(), "same", func(x *volume.Volume) {
				if x.Labels == nil {
					x.Labels = map[string]string{}
				}
				x.Labels[string(own.ID)] = ""
			})
			if err != nil && !errdefs.IsNotFound(err) {
				t.Error(err)
			}
			_, err = s.List(t.Context())
			_, err2 := s.Usage(t.Context())
			if err := errors.Join(err, err2, m.Delete(t.Context(), own.Name)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	close(won)
	if len(won) != 1 {
		t.Errorf("%d callers created a volume of the same name", len(won))
	}
	if all, err := s.List(t.Context()); err != nil || len(all) != 1 || all[0].Name != "same" {
		t.Errorf("there is %+v, %v", all, err)
	}
}
