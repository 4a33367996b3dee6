package volumetest

import (
	"errors"
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
	_, _, err := s.Attach(t.Context(), "a", "x", false)
	class(t, "no id of a VM", err, errdefs.InvalidArgument)

	got, disk, err := s.Attach(t.Context(), "a", one, false)
	if err != nil || len(got.Attachments) != 1 || got.Attachments[0].VM != one || got.Attachments[0].ReadOnly || got.Attachments[0].Since.IsZero() {
		t.Fatalf("attached as %+v, %v", got, err)
	}
	if disk.Path == "" || disk.Format != vm.DiskRaw || disk.ReadOnly {
		t.Errorf("its disk is %+v", disk)
	}
	again, disk2, err := s.Attach(t.Context(), "a", one, false)
	if err != nil || len(again.Attachments) != 1 || !again.Attachments[0].Since.Equal(got.Attachments[0].Since) || disk2.Path != disk.Path {
		t.Errorf("attached again as %+v, %v", again, err)
	}
	m, makes := volume.As[volume.Maker](s)
	tries := map[string]func() error{
		"a second writer":          func() error { _, _, err := s.Attach(t.Context(), "a", two, false); return err },
		"a reader beside it":       func() error { _, _, err := s.Attach(t.Context(), "a", two, true); return err },
		"the same VM to only read": func() error { _, _, err := s.Attach(t.Context(), "a", one, true); return err },
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
		if _, disk, err := s.Attach(t.Context(), "a", user, true); err != nil || !disk.ReadOnly {
			t.Errorf("attached to read as %+v, %v", disk, err)
		}
	}
	_, _, err = s.Attach(t.Context(), "a", three, false)
	class(t, "a writer beside readers", err, errdefs.FailedPrecondition)
	if makes {
		class(t, "deletion while read", m.Delete(t.Context(), "a"), errdefs.FailedPrecondition)
	}
	if err := s.Detach(t.Context(), string(v.ID), one); err != nil {
		t.Error(err)
	}
	_, _, err = s.Attach(t.Context(), "a", three, false)
	class(t, "a writer beside a reader", err, errdefs.FailedPrecondition)
	if err := s.Detach(t.Context(), "a", two); err != nil {
		t.Error(err)
	}
	if _, _, err := s.Attach(t.Context(), "a", three, false); err != nil {
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
				_, _, err := s.Attach(t.Context(), "a", user, readOnly)
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
	if _, _, err := s.Attach(t.Context(), "a", user, false); err != nil {
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
