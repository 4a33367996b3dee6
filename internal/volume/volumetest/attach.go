package volumetest

import (
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

func attaches(t *testing.T, s volume.Store) {
	v := create(t, s, "a", 1)
	one, two, three := vm.NewID(), vm.NewID(), vm.NewID()
	_, _, err := s.Attach(t.Context(), "a", "x", volume.Mode{})
	class(t, "no id of a VM", err, errdefs.InvalidArgument)

	got, disk, err := s.Attach(t.Context(), "a", one, volume.Mode{})
	if err != nil || len(got.Attachments) != 1 || got.Attachments[0].VM != one || got.Attachments[0].ReadOnly || got.Attachments[0].Since.IsZero() {
		t.Fatalf("attached as %+v, %v", got, err)
	}
	if disk.Path == "" || disk.Format != vm.DiskRaw || disk.ReadOnly {
		t.Errorf("its disk is %+v", disk)
	}
	again, disk2, err := s.Attach(t.Context(), "a", one, volume.Mode{})
	if err != nil || len(again.Attachments) != 1 || !again.Attachments[0].Since.Equal(got.Attachments[0].Since) || disk2.Path != disk.Path {
		t.Errorf("attached again as %+v, %v", again, err)
	}
	m, makes := volume.As[volume.Maker](s)
	tries := map[string]func() error{
		"a second writer":          func() error { _, _, err := s.Attach(t.Context(), "a", two, volume.Mode{}); return err },
		"a reader beside it":       func() error { _, _, err := s.Attach(t.Context(), "a", two, volume.Mode{ReadOnly: true}); return err },
		"the same VM to only read": func() error { _, _, err := s.Attach(t.Context(), "a", one, volume.Mode{ReadOnly: true}); return err },
	}
	if makes {
		tries["deletion"] = func() error { return m.Delete(t.Context(), "a") }
	}
	for what, try := range tries {
		err := try()
		class(t, what, err, errdefs.FailedPrecondition)
		if err != nil && !strings.Contains(err.Error(), string(one)) {
			t.Errorf("%s: the error does not name the VM: %v", what, err)
		}
	}
	if err := s.Detach(t.Context(), "a", two); err != nil {
		t.Errorf("detached from a VM that does not have it: %v", err)
	}
	if got, err := s.Get(t.Context(), "a"); err != nil || len(got.Attachments) != 1 {
		t.Errorf("it is %+v, %v", got, err)
	}
	if err := errors.Join(s.Detach(t.Context(), "a", one), s.Detach(t.Context(), "a", one)); err != nil {
		t.Error(err)
	}

	for _, user := range []vm.ID{one, two} {
		if _, disk, err := s.Attach(t.Context(), "a", user, volume.Mode{ReadOnly: true}); err != nil || !disk.ReadOnly {
			t.Errorf("attached to read as %+v, %v", disk, err)
		}
	}
	_, _, err = s.Attach(t.Context(), "a", three, volume.Mode{})
	class(t, "a writer beside readers", err, errdefs.FailedPrecondition)
	if makes {
		class(t, "deletion while read", m.Delete(t.Context(), "a"), errdefs.FailedPrecondition)
	}
	if err := s.Detach(t.Context(), string(v.ID), one); err != nil {
		t.Error(err)
	}
	_, _, err = s.Attach(t.Context(), "a", three, volume.Mode{})
	class(t, "a writer beside a reader", err, errdefs.FailedPrecondition)
	if err := s.Detach(t.Context(), "a", two); err != nil {
		t.Error(err)
	}
	if _, _, err := s.Attach(t.Context(), "a", three, volume.Mode{}); err != nil {
		t.Error(err)
	}
	if err := s.Detach(t.Context(), "a", three); err != nil {
		t.Error(err)
	}
	if makes {
		if err := m.Delete(t.Context(), "a"); err != nil {
			t.Error(err)
		}
	}
}

// attachRace lets many VMs ask at once. One gets the volume to write, or all of them to read.
func attachRace(t *testing.T, s volume.Store) {
	const callers = 8
	create(t, s, "a", 1)
	for _, readOnly := range []bool{false, true, false} {
		var mu sync.Mutex
		var won []vm.ID
		var wg sync.WaitGroup
		for range callers {
			wg.Go(func() {
				user := vm.NewID()
				_, _, err := s.Attach(t.Context(), "a", user, volume.Mode{ReadOnly: readOnly})
				switch {
				case err == nil:
					mu.Lock()
					defer mu.Unlock()
					won = append(won, user)
				case !errdefs.IsFailedPrecondition(err):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		want := map[bool]int{false: 1, true: callers}[readOnly]
		if len(won) != want {
			t.Errorf("read only %v: %d of %d callers got it", readOnly, len(won), callers)
		}
		got, err := s.Get(t.Context(), "a")
		if err != nil || len(got.Attachments) != len(won) {
			t.Errorf("it is %+v, %v", got, err)
		}
		for _, a := range got.Attachments {
			if !slices.Contains(won, a.VM) {
				t.Errorf("attached to %s, which was refused", a.VM)
			}
			wg.Go(func() {
				if err := s.Detach(t.Context(), "a", a.VM); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
}

// attachShared lets several VMs have one volume: each of them says so, and each gives it back for itself.
func attachShared(t *testing.T, s volume.Store) {
	create(t, s, "a", 1)
	shares := volume.Mode{Shared: true}
	one, two, three := vm.NewID(), vm.NewID(), vm.NewID()
	have := func(what string, want map[vm.ID]volume.Mode) {
		t.Helper()
		v, err := s.Get(t.Context(), "a")
		got := map[vm.ID]volume.Mode{}
		for _, a := range v.Attachments {
			got[a.VM] = a.Mode
		}
		if !maps.Equal(got, want) || err != nil {
			t.Errorf("%s: attached as %v, %v, want %v", what, got, err, want)
		}
	}
	refused := func(what string, as volume.Mode, to vm.ID, say string) {
		t.Helper()
		_, _, err := s.Attach(t.Context(), "a", to, as)
		class(t, what, err, errdefs.FailedPrecondition)
		if err != nil && !strings.Contains(err.Error(), say) {
			t.Errorf("%s: the error lacks %q: %v", what, say, err)
		}
	}
	var paths []string
	for _, user := range []vm.ID{one, two, one} { // the first asks twice
		_, d, err := s.Attach(t.Context(), "a", user, shares)
		if err != nil || !d.Shared || d.ReadOnly {
			t.Fatalf("%s shares it as %+v, %v", user, d, err)
		}
		paths = append(paths, d.Path)
	}
	if paths[0] == "" || paths[1] != paths[0] || paths[2] != paths[0] {
		t.Errorf("their disks are %q", paths)
	}
	if _, d, err := s.Attach(t.Context(), "a", three, volume.Mode{Shared: true, ReadOnly: true}); err != nil || !d.Shared || !d.ReadOnly {
		t.Errorf("one that only reads shares it as %+v, %v", d, err)
	}
	all := map[vm.ID]volume.Mode{one: shares, two: shares, three: {Shared: true, ReadOnly: true}}
	have("shared", all)
	refused("a writer that does not share", volume.Mode{}, vm.NewID(), "share it")
	refused("a reader that does not share", volume.Mode{ReadOnly: true}, vm.NewID(), "share it")
	refused("one of them alone", volume.Mode{}, one, "shared")
	have("after the refusals", all)
	copying := map[string]func() error{}
	if x, ok := volume.As[volume.Snapshotter](s); ok {
		copying["a snapshot"] = func() error { _, err := x.Snapshot(t.Context(), "a", volume.Spec{Live: true}); return err }
	}
	if c, ok := volume.As[volume.Cloner](s); ok {
		copying["a clone"] = func() error { _, err := c.Clone(t.Context(), "a", volume.Spec{Live: true}); return err }
	}
	if c, ok := volume.As[volume.Carrier](s); ok {
		copying["an export"] = func() error { return c.Export(t.Context(), "a", io.Discard) }
	}
	if m, ok := volume.As[volume.Maker](s); ok {
		copying["deletion"] = func() error { return m.Delete(t.Context(), "a") }
	}
	for what, try := range copying {
		class(t, what+" of what two may write to", try(), errdefs.FailedPrecondition)
	}
	if err := s.Detach(t.Context(), "a", one); err != nil {
		t.Error(err)
	}
	delete(all, one)
	have("after the first has given it back", all)
	if _, _, err := s.Attach(t.Context(), "a", one, shares); err != nil {
		t.Error(err)
	}
	for _, user := range []vm.ID{one, two, three} {
		if err := s.Detach(t.Context(), "a", user); err != nil {
			t.Error(err)
		}
	}
	have("after all have given it back", map[vm.ID]volume.Mode{})
	if _, d, err := s.Attach(t.Context(), "a", one, volume.Mode{}); err != nil || d.Shared {
		t.Errorf("alone it is %+v, %v", d, err)
	}
	refused("one that shares beside one that does not", shares, two, "share it")
	if err := s.Detach(t.Context(), "a", one); err != nil {
		t.Error(err)
	}
}

func resizes(t *testing.T, s volume.Store) {
	ability[volume.Maker](t, s)
	create(t, s, "a", 1)
	write(t, s, "a", MiB-4, "text")
	v, err := s.Resize(t.Context(), "a", 2*MiB+1)
	if err != nil || v.Size != 2*MiB+volume.Block {
		t.Errorf("grown to %+v, %v", v, err)
	}
	if v, err = s.Resize(t.Context(), "a", 3*MiB); err != nil || v.Size != 3*MiB {
		t.Errorf("grown to %+v, %v", v, err)
	}
	holds(t, s, "a", 3, map[int64]string{MiB - 4: "text"})
	if again, err := s.Resize(t.Context(), "a", 3*MiB-1); err != nil || again.Size != 3*MiB {
		t.Errorf("the same size: %+v, %v", again, err)
	}
	for _, bad := range []int64{2 * MiB, 0, -1, volume.MaxSize + 1} {
		_, err := s.Resize(t.Context(), "a", bad)
		class(t, "resize", err, errdefs.InvalidArgument)
	}
	_, err = s.Resize(t.Context(), "none", MiB)
	class(t, "no such volume", err, errdefs.NotFound)

	user := vm.NewID()
	if _, _, err := s.Attach(t.Context(), "a", user, volume.Mode{}); err != nil {
		t.Fatal(err)
	}
	if v, err := s.Resize(t.Context(), "a", 4*MiB); err != nil || v.Size != 4*MiB || len(v.Attachments) != 1 {
		t.Errorf("grown while attached: %+v, %v", v, err)
	}
	if err := s.Detach(t.Context(), "a", user); err != nil {
		t.Error(err)
	}
	holds(t, s, "a", 4, map[int64]string{MiB - 4: "text"})
	if got, err := s.Get(t.Context(), "a"); err != nil || got.Size != 4*MiB {
		t.Errorf("it is %+v, %v", got, err)
	}
}
