//go:build vm

package firecracker

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/filling"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/testkit/jailtest"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
)

// slow is memory that comes as slowly as a test wants.
type slow struct {
	*filling.Writer
	path, socket string
	from, to     *os.File
	missing      sparse.Pages
	size         int64
}

// chunk is how much comes at once.
const chunk = 512 << 10

func newSlow(t *testing.T, saved string) *slow {
	t.Helper()
	dir := t.TempDir()
	s := &slow{path: filepath.Join(dir, "memory"), socket: filepath.Join(dir, "feed")}
	var err error
	if s.from, err = os.Open(saved); err != nil {
		t.Fatal(err)
	}
	st, err := s.from.Stat()
	if err != nil {
		t.Fatal(err)
	}
	s.size = st.Size()
	data, err := sparse.Extents(s.from, s.size)
	if err != nil {
		t.Fatal(err)
	}
	s.missing = sparse.NewPages(s.size)
	s.missing.Add(data)
	if s.to, err = os.Create(s.path); err == nil {
		err = s.to.Truncate(s.size)
	}
	if err != nil {
		t.Fatal(err)
	}
	s.Writer = filling.NewWriter(s.size, data)
	l, err := net.Listen("unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = s.Serve(t.Context(), l) }()
	t.Cleanup(func() { _, _ = s.from.Close(), s.to.Close() })
	return s
}

// put brings what is missing of a chunk.
func (s *slow) put(t *testing.T, at int64) {
	at -= at % chunk
	buf := make([]byte, min(chunk, s.size-at))
	if _, err := s.from.ReadAt(buf, at); err != nil {
		t.Error(err)
		return
	}
	if err := sparse.WriteAt(s.to, buf, at); err != nil {
		t.Error(err)
		return
	}
	for n := at / sparse.Block; n < (at+int64(len(buf)))/sparse.Block; n++ {
		s.missing.Clear(n)
	}
	s.Put(sparse.Extent{Offset: at, Length: int64(len(buf))})
}

// serve brings only what is asked for until stop is called.
func (s *slow) serve(t *testing.T) (stop func()) {
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			for at, ok := s.Wanted(); ok; at, ok = s.Wanted() {
				s.put(t, at)
			}
			select {
			case <-s.Wants():
			case <-end:
				return
			}
		}
	}()
	return func() { close(end); <-ended }
}

func lateOf(t *testing.T, a testguest.Guest, p hypervisor.Plan, s hypervisor.SavePlan) (hypervisor.Plan, *slow) {
	t.Helper()
	q, slow := from(t, a, p, s), newSlow(t, s.Memory)
	q.Incoming.Memory, q.Incoming.Feed = slow.path, slow.socket
	return q, slow
}

func pagerPID(t *testing.T, i hypervisor.Instance) int {
	t.Helper()
	h, err := decodeHandle(i.Handle())
	if err != nil || h.Pager == nil {
		t.Fatal(h, err)
	}
	return h.Pager.PID
}

func noPager(t *testing.T, pid int) {
	t.Helper()
	testguest.Await(t, "the pager has ended", func() bool {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		return err != nil || strings.Contains(string(stat), ") Z ") // this process may be its parent
	})
}

// TestLate: guests run before their memory is there. They answer, keep what they have, and go on without their pager; one whose memory never comes ends, and so does
// one whose pager is killed.
func TestLate(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	if why := d.LoadsLate(); why != "" {
		t.Skip(why)
	}
	p := a.Plan(t)
	i := start(t, d, p)
	testguest.Logged(t, i, "GUEST-READY")
	testguest.Say(t, i, "sh mkdir /k; mount -t tmpfs k /k; dd if=/dev/urandom of=/k/data bs=1M count=8; md5sum </k/data >/k/sum; echo KEPT")
	testguest.Logged(t, i, "KEPT")
	s := saved(t)
	s.Hold = true
	result := doSave(t, i, s)
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	left := func(t *testing.T, q hypervisor.Plan) {
		t.Helper()
		if left := jailtest.Left(t, d.jail, q); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	}

	t.Run("answers early", func(t *testing.T) {
		q, slow := lateOf(t, a, p, s)
		total := slow.missing.Count() * sparse.Block
		stop := slow.serve(t)
		i := start(t, d, q)
		testguest.Say(t, i, "sh echo I am $((40 + 2))")
		testguest.Logged(t, i, "I am 42 .")
		stop()
		rest := slow.missing.Count() * sparse.Block
		t.Logf("the guest has answered when %d KiB of %d KiB were there", (total-rest)>>10, total>>10)
		if rest < total/4 {
			t.Errorf("the guest has answered when all but %d of %d bytes were there; %d were saved", rest, total, result.Memory)
		}

		_ = i.Close() // another daemon goes on
		i, err := testDriver(t).Adopt(t.Context(), i.Handle())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = i.Kill(t.Context()) })
		// A save waits for all of the memory, and the guest does not stand still meanwhile.
		again, done := saved(t), make(chan error, 1)
		go func() {
			snapshotter, _ := hypervisor.As[hypervisor.Snapshotter](i)
			_, err := snapshotter.Save(t.Context(), again)
			done <- err
		}()
		stop = slow.serve(t)
		for n := range 3 {
			testguest.Say(t, i, "sh echo I am still "+strconv.Itoa(n))
			testguest.Logged(t, i, "I am still "+strconv.Itoa(n)+" .")
		}
		stop()
		select {
		case err := <-done:
			t.Fatalf("saved before its memory was there: %v", err)
		default:
		}
		for at := int64(0); at < slow.size; at += chunk {
			slow.put(t, at)
		}
		slow.Alone(t.Context())
		noPager(t, pagerPID(t, i))
		if err := <-done; err != nil { // it is a VM like any other
			t.Fatal(err)
		}
		testguest.Say(t, i, "sh md5sum </k/data | cmp - /k/sum && echo SAME")
		testguest.Logged(t, i, "SAME .")
		testguest.Say(t, i, "poweroff")
		if e, err := i.Wait(t.Context()); err != nil || !e.GuestShutdown {
			t.Errorf("%+v, %v", e, err)
		}
		left(t, q)
		i = start(t, d, from(t, a, q, again))
		testguest.Say(t, i, "sh md5sum </k/data | cmp - /k/sum && echo SAME AGAIN")
		testguest.Logged(t, i, "SAME AGAIN .")
	})

	ends := func(t *testing.T, i hypervisor.Instance, q hypervisor.Plan, cause string) {
		t.Helper()
		e, err := i.Wait(t.Context())
		if err != nil || e.GuestShutdown || e.GuestReset || !strings.Contains(e.Cause, cause) {
			t.Errorf("%+v, %v; want %q", e, err, cause)
		}
		if e, err := d.LastExit(t.Context(), i.Handle()); err != nil || !strings.Contains(e.Cause, cause) {
			t.Errorf("last exit: %+v, %v; want %q", e, err, cause)
		}
		left(t, q)
	}
	t.Run("never comes", func(t *testing.T) {
		q, slow := lateOf(t, a, p, s)
		stop := slow.serve(t)
		i := start(t, d, q)
		stop()
		slow.Fail(errors.New("the registry has another chunk"))
		ends(t, i, q, "its memory could not be loaded: the registry has another chunk")
	})
	t.Run("never comes for the launch", func(t *testing.T) {
		q, slow := lateOf(t, a, p, s)
		slow.Fail(errors.New("no such chunk"))
		if i, err := d.Launch(t.Context(), q); err == nil || !strings.Contains(err.Error(), "no such chunk") {
			t.Errorf("%v, %v", i, err)
		}
		left(t, q)
	})
	t.Run("pager killed", func(t *testing.T) {
		q, slow := lateOf(t, a, p, s)
		defer slow.serve(t)()
		i := start(t, d, q)
		if err := unix.Kill(pagerPID(t, i), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		ends(t, i, q, "its memory could not be loaded")
	})
	t.Run("pager killed when nobody looks", func(t *testing.T) {
		q, slow := lateOf(t, a, p, s)
		defer slow.serve(t)()
		i := start(t, d, q)
		_ = i.Close()
		pid := pagerPID(t, i)
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		noPager(t, pid)
		i, err := testDriver(t).Adopt(t.Context(), i.Handle())
		if err != nil {
			t.Fatal(err)
		}
		ends(t, i, q, "its memory could not be loaded")
	})
	t.Run("vm killed", func(t *testing.T) {
		q, slow := lateOf(t, a, p, s)
		defer slow.serve(t)()
		i := start(t, d, q)
		if err := i.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		slow.Alone(t.Context())
		left(t, q)
	})
	t.Run("reaped", func(t *testing.T) {
		q, slow := lateOf(t, a, p, s)
		defer slow.serve(t)()
		i := start(t, d, q)
		_ = i.Close()
		if err := testDriver(t).Reap(t.Context(), q.ID, q.Dir); err != nil {
			t.Fatal(err)
		}
		slow.Alone(t.Context())
		left(t, q)
	})
}
