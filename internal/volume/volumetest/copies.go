package volumetest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

func snapshots(t *testing.T, s volume.Store) {
	shots := ability[volume.Snapshotter](t, s)
	v := create(t, s, "db", 2)
	write(t, s, "db", 0, "old")
	snap, err := shots.Snapshot(t.Context(), "db", volume.Spec{Name: "x", Labels: map[string]string{"k": "v"}})
	if err != nil {
		t.Fatal(err)
	}
	if !snap.ID.Valid() || snap.ID == v.ID || snap.Name != "x" || snap.Kind != v.Kind || snap.Volume != v.ID || snap.Source != "db" || snap.Size != v.Size || snap.CreatedAt.IsZero() || snap.Labels["k"] != "v" {
		t.Errorf("taken as %+v", snap)
	}
	for _, ref := range []string{"x", string(snap.ID), string(snap.ID[:3])} {
		if got, err := shots.GetSnapshot(t.Context(), ref); err != nil || !reflect.DeepEqual(got, snap) {
			t.Errorf("%s is %+v, %v", ref, got, err)
		}
	}
	write(t, s, "db", 0, "new")
	write(t, s, "db", MiB, "more")
	one, err := shots.FromSnapshot(t.Context(), "x", volume.Spec{Name: "one"})
	if err != nil || one.From != string(snap.ID) || one.Size != 2*MiB {
		t.Fatalf("made as %+v, %v", one, err)
	}
	if big, err := shots.FromSnapshot(t.Context(), "x", volume.Spec{Name: "big", Size: 3 * MiB}); err != nil || big.Size != 3*MiB {
		t.Fatalf("made as %+v, %v", big, err)
	}
	_, err = shots.FromSnapshot(t.Context(), "x", volume.Spec{Name: "small", Size: MiB})
	class(t, "a smaller volume", err, errdefs.InvalidArgument)
	_, err = shots.FromSnapshot(t.Context(), "x", volume.Spec{Name: "one"})
	class(t, "a taken name", err, errdefs.AlreadyExists)
	_, err = shots.FromSnapshot(t.Context(), "none", volume.Spec{})
	class(t, "no such snapshot", err, errdefs.NotFound)
	write(t, s, "one", 4096, "mine")
	holds(t, s, "db", 2, map[int64]string{0: "new", MiB: "more"})
	holds(t, s, "one", 2, map[int64]string{0: "old", 4096: "mine"})
	holds(t, s, "big", 3, map[int64]string{0: "old"})
	if err := ability[volume.Maker](t, s).Delete(t.Context(), "db"); err != nil {
		t.Fatal(err)
	}
	if _, err := shots.FromSnapshot(t.Context(), "x", volume.Spec{Name: "two"}); err != nil {
		t.Errorf("after its volume is deleted: %v", err)
	}
	if err := shots.DeleteSnapshot(t.Context(), "x"); err != nil {
		t.Error(err)
	}
	class(t, "deleted twice", shots.DeleteSnapshot(t.Context(), "x"), errdefs.NotFound)
	_, err = shots.GetSnapshot(t.Context(), "x")
	class(t, "deleted", err, errdefs.NotFound)
	holds(t, s, "two", 2, map[int64]string{0: "old"})
	holds(t, s, "big", 3, map[int64]string{0: "old"})
}

func snapshotNames(t *testing.T, s volume.Store) {
	shots := ability[volume.Snapshotter](t, s)
	create(t, s, "db", 1)
	for what, c := range map[string]struct {
		ref  string
		spec volume.Spec
		want errdefs.Class
	}{
		"name":           {"db", volume.Spec{Name: "a/b"}, errdefs.InvalidArgument},
		"label":          {"db", volume.Spec{Labels: map[string]string{"": ""}}, errdefs.InvalidArgument},
		"size":           {"db", volume.Spec{Size: 2 * MiB}, errdefs.InvalidArgument},
		"no such volume": {"none", volume.Spec{}, errdefs.NotFound},
	} {
		_, err := shots.Snapshot(t.Context(), c.ref, c.spec)
		class(t, what, err, c.want)
	}
	for _, name := range []string{"db", "b", "a"} { // a snapshot may have the name of a volume
		if _, err := shots.Snapshot(t.Context(), "db", volume.Spec{Name: name}); err != nil {
			t.Error(err)
		}
	}
	_, err := shots.Snapshot(t.Context(), "db", volume.Spec{Name: "a"})
	class(t, "a taken name", err, errdefs.AlreadyExists)
	all, err := shots.Snapshots(t.Context())
	if err != nil || len(all) != 3 || all[0].Name != "a" || all[1].Name != "b" || all[2].Name != "db" {
		t.Errorf("list is %+v, %v", all, err)
	}
	if x, err := shots.Snapshot(t.Context(), "db", volume.Spec{}); err != nil || vm.ValidateName(x.Name) != nil {
		t.Errorf("without a name: %+v, %v", x, err)
	}
}

func restores(t *testing.T, s volume.Store) {
	shots := ability[volume.Snapshotter](t, s)
	v := create(t, s, "db", 1)
	write(t, s, "db", 0, "old")
	if _, err := shots.Snapshot(t.Context(), "db", volume.Spec{Name: "x"}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Resize(t.Context(), "db", 2*MiB); err != nil {
		t.Fatal(err)
	}
	write(t, s, "db", 0, "new")
	write(t, s, "db", MiB, "more")
	if _, err := shots.Snapshot(t.Context(), "db", volume.Spec{Name: "large"}); err != nil {
		t.Fatal(err)
	}
	user := vm.NewID()
	if _, _, err := s.Attach(t.Context(), "db", user, volume.Mode{ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	_, err := shots.Restore(t.Context(), "db", "x")
	class(t, "while attached", err, errdefs.FailedPrecondition)
	if err == nil || !strings.Contains(err.Error(), string(user)) {
		t.Errorf("the error does not name the VM: %v", err)
	}
	if err := s.Detach(t.Context(), "db", user); err != nil {
		t.Fatal(err)
	}
	got, err := shots.Restore(t.Context(), "db", "x")
	if err != nil || got.ID != v.ID || got.Name != "db" || got.Size != 2*MiB {
		t.Errorf("restored as %+v, %v", got, err)
	}
	holds(t, s, "db", 2, map[int64]string{0: "old"})
	if _, err := shots.Restore(t.Context(), "db", "large"); err != nil {
		t.Error(err)
	}
	holds(t, s, "db", 2, map[int64]string{0: "new", MiB: "more"})
	write(t, s, "db", 0, "own") // does not change the snapshot
	if _, err := shots.Restore(t.Context(), "db", "large"); err != nil {
		t.Error(err)
	}
	holds(t, s, "db", 2, map[int64]string{0: "new", MiB: "more"})
	create(t, s, "small", 1)
	_, err = shots.Restore(t.Context(), "small", "large")
	class(t, "a larger snapshot", err, errdefs.InvalidArgument)
	_, err = shots.Restore(t.Context(), "db", "none")
	class(t, "no such snapshot", err, errdefs.NotFound)
	_, err = shots.Restore(t.Context(), "none", "x")
	class(t, "no such volume", err, errdefs.NotFound)
}

func clones(t *testing.T, s volume.Store) {
	cloner := ability[volume.Cloner](t, s)
	v := create(t, s, "db", 2)
	write(t, s, "db", MiB, "old")
	user := vm.NewID()
	if _, _, err := s.Attach(t.Context(), "db", user, volume.Mode{}); err != nil { // a VM that is paused
		t.Fatal(err)
	}
	c, err := cloner.Clone(t.Context(), "db", volume.Spec{Name: "c"})
	if err != nil || c.ID == v.ID || c.From != string(v.ID) || c.Size != v.Size || len(c.Attachments) != 0 || len(c.Labels) != 0 {
		t.Fatalf("cloned as %+v, %v", c, err)
	}
	if err := s.Detach(t.Context(), "db", user); err != nil {
		t.Fatal(err)
	}
	write(t, s, "c", 0, "mine")
	write(t, s, "db", MiB, "new")
	if big, err := cloner.Clone(t.Context(), "c", volume.Spec{Name: "big", Size: 3 * MiB}); err != nil || big.Size != 3*MiB {
		t.Errorf("cloned as %+v, %v", big, err)
	}
	holds(t, s, "db", 2, map[int64]string{MiB: "new"})
	holds(t, s, "c", 2, map[int64]string{0: "mine", MiB: "old"})
	holds(t, s, "big", 3, map[int64]string{0: "mine", MiB: "old"})
	for what, spec := range map[string]volume.Spec{"smaller": {Name: "d", Size: MiB}, "name": {Name: "a/b"}, "no size": {Name: "d", Size: -1}} {
		_, err := cloner.Clone(t.Context(), "db", spec)
		class(t, what, err, errdefs.InvalidArgument)
	}
	_, err = cloner.Clone(t.Context(), "db", volume.Spec{Name: "c"})
	class(t, "a taken name", err, errdefs.AlreadyExists)
	_, err = cloner.Clone(t.Context(), "none", volume.Spec{})
	class(t, "no such volume", err, errdefs.NotFound)
	if err := ability[volume.Maker](t, s).Delete(t.Context(), "db"); err != nil {
		t.Error(err)
	}
	holds(t, s, "c", 2, map[int64]string{0: "mine", MiB: "old"})
}

// live copies a volume while a VM writes to it all the time. Each copy holds what the VM had written in its order up to one instant. A
// store that cannot do that says so, and leaves nothing.
func live(t *testing.T, s volume.Store) {
	shots, cloner := ability[volume.Snapshotter](t, s), ability[volume.Cloner](t, s)
	const size, copies = 4, 5
	create(t, s, "db", size)
	user := vm.NewID()
	_, disk, err := s.Attach(t.Context(), "db", user, volume.Mode{})
	if err != nil {
		t.Fatal(err)
	}
	checker := ability[volume.LiveChecker](t, s)
	class(t, "the check of a volume that does not exist", checker.CheckLive(t.Context(), "none"), errdefs.NotFound)
	told := checker.CheckLive(t.Context(), "db")
	if _, err := shots.Snapshot(t.Context(), "db", volume.Spec{Name: "s", Live: true}); err != nil {
		class(t, "what was told in advance of a live snapshot", told, errdefs.FailedPrecondition)
		class(t, "a live snapshot", err, errdefs.FailedPrecondition)
		_, err := cloner.Clone(t.Context(), "db", volume.Spec{Name: "c", Live: true})
		class(t, "a live clone", err, errdefs.FailedPrecondition)
		if all, err := shots.Snapshots(t.Context()); err != nil || len(all) > 0 {
			t.Errorf("left are %v, %v", all, err)
		}
		return
	}
	if told != nil {
		t.Errorf("in advance, a live snapshot was refused: %v", told)
	}
	data, err := os.OpenFile(disk.Path, os.O_WRONLY|os.O_SYNC, 0) // the order of writes counts, also on a device
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() { // the first block gets each number first, the last one last
		block := make([]byte, volume.Block)
		for n := uint64(1); ; n++ {
			binary.LittleEndian.PutUint64(block, n)
			for off := int64(0); off < size*MiB; off += MiB / 4 {
				if _, err := data.WriteAt(block, off); err != nil {
					ended <- err
					return
				}
			}
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
		}
	}()
	for i := range copies {
		name := fmt.Sprint("copy-", i)
		if _, err := cloner.Clone(t.Context(), "db", volume.Spec{Name: name, Live: true}); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := ability[volume.Carrier](t, s).Export(t.Context(), name, &out); err != nil {
			t.Fatal(err)
		}
		round := binary.LittleEndian.Uint64(out.Bytes())
		for off, expect := 0, round; off < size*MiB; off += MiB / 4 {
			got := binary.LittleEndian.Uint64(out.Bytes()[off:])
			if got != expect && got+1 == round { // the round was not complete
				expect = got
			}
			if got != expect {
				t.Fatalf("%s is of no instant: the first block has %d, the one at %d has %d", name, round, off, got)
			}
		}
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// exportRace exports a volume while VMs come and go. Each stream holds one content, not parts of two.
func exportRace(t *testing.T, s volume.Store) {
	carrier := ability[volume.Carrier](t, s)
	create(t, s, "db", 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := range 20 {
			user := vm.NewID()
			_, disk, err := s.Attach(t.Context(), "db", user, volume.Mode{})
			if errdefs.IsFailedPrecondition(err) {
				continue // an export reads it
			}
			if err == nil {
				err = writeAt(disk.Path, bytes.Repeat([]byte{byte(n)}, MiB), 0)
			}
			if err := errors.Join(err, s.Detach(t.Context(), "db", user)); err != nil {
				t.Error(err)
			}
		}
	})
	for range 2 {
		wg.Go(func() {
			for range 10 {
				var out bytes.Buffer
				err := carrier.Export(t.Context(), "db", &out)
				if errdefs.IsFailedPrecondition(err) {
					continue // a VM writes to it
				}
				if err != nil || out.Len() != MiB || bytes.Count(out.Bytes(), out.Bytes()[:1]) != MiB {
					t.Errorf("exported %d bytes of several contents, %v", out.Len(), err)
				}
			}
		})
	}
	wg.Wait()
}

func carries(t *testing.T, s volume.Store) {
	carrier := ability[volume.Carrier](t, s)
	content := make([]byte, 3*MiB)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(content[MiB-100 : MiB+100])
	_, _ = random.Read(content[len(content)-1:])
	content[len(content)-1] |= 1
	var last int64
	v, err := carrier.Import(t.Context(), volume.Spec{Name: "a"}, bytes.NewReader(content), func(n int64) {
		if n <= last {
			t.Errorf("progress of %d after %d", n, last)
		}
		last = n
	})
	if err != nil || v.Size != 3*MiB || v.From != "" || last != 3*MiB {
		t.Fatalf("imported %d bytes as %+v, %v", last, v, err)
	}
	if !bytes.Equal(read(t, s, "a"), content) {
		t.Error("another content was imported")
	}
	var out bytes.Buffer
	if err := carrier.Export(t.Context(), "a", &out); err != nil || !bytes.Equal(out.Bytes(), content) {
		t.Errorf("exported %d bytes, %v", out.Len(), err)
	}
	for what, c := range map[string]struct{ bytes, size, want int64 }{
		"few bytes":         {5, 0, volume.MinSize},
		"an odd number":     {MiB + 1, 0, MiB + volume.Block},
		"fewer than wanted": {MiB, 2 * MiB, 2 * MiB},
		"exactly":           {MiB, MiB, MiB},
	} {
		in := bytes.Repeat([]byte("x"), int(c.bytes))
		v, err := carrier.Import(t.Context(), volume.Spec{Size: c.size}, io.MultiReader(bytes.NewReader(in[:c.bytes/3]), bytes.NewReader(in[c.bytes/3:])), nil)
		if err != nil || v.Size != c.want {
			t.Errorf("%s: %+v, %v", what, v, err)
			continue
		}
		if !bytes.Equal(read(t, s, v.Name), append(in, make([]byte, c.want-c.bytes)...)) {
			t.Errorf("%s: another content", what)
		}
	}
	importFile(t, s, carrier)
	var zero bytes.Buffer
	create(t, s, "zero", 2)
	if err := carrier.Export(t.Context(), "zero", &zero); err != nil || !bytes.Equal(zero.Bytes(), make([]byte, 2*MiB)) {
		t.Errorf("exported %d bytes of an empty volume, %v", zero.Len(), err)
	}
	class(t, "no such volume", carrier.Export(t.Context(), "none", io.Discard), errdefs.NotFound)
}

// importFile imports a file with holes at both ends, and one that is only a hole.
func importFile(t *testing.T, s volume.Store, carrier volume.Carrier) {
	f, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := make([]byte, 4*MiB)
	for _, name := range []string{"hole", "file"} {
		if err := errors.Join(f.Truncate(3*MiB), f.Sync()); err != nil {
			t.Fatal(err)
		}
		r, err := sparse.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if v, err := carrier.Import(t.Context(), volume.Spec{Name: name, Size: 4 * MiB}, r, nil); err != nil || v.Size != 4*MiB {
			t.Fatalf("import of a %s: %+v, %v", name, v, err)
		}
		if !bytes.Equal(read(t, s, name), want) {
			t.Errorf("import of a %s: another content", name)
		}
		copy(want[MiB+4711:], "what somebody wrote")
		if _, err := f.WriteAt(want[MiB:2*MiB], MiB); err != nil {
			t.Fatal(err)
		}
	}
	r, err := sparse.ReadFile(f)
	if err != nil {
		t.Fatal(err)
	}
	_, err = carrier.Import(t.Context(), volume.Spec{Size: 2 * MiB}, r, nil)
	class(t, "a file that is larger than the volume", err, errdefs.InvalidArgument)
}

// failing is a reader of some bytes that then fails.
func failing(n int, err error) io.Reader {
	return io.MultiReader(bytes.NewReader(bytes.Repeat([]byte("x"), n)), iotest.ErrReader(err))
}

func importFails(t *testing.T, s volume.Store) {
	carrier := ability[volume.Carrier](t, s)
	create(t, s, "taken", 1)
	boom := errdefs.Unavailablef("boom")
	for what, c := range map[string]struct {
		spec volume.Spec
		r    io.Reader
		want errdefs.Class
	}{
		"more than the size":   {volume.Spec{Name: "a", Size: MiB}, bytes.NewReader(make([]byte, MiB+1)), errdefs.InvalidArgument},
		"many more":            {volume.Spec{Name: "a", Size: MiB}, bytes.NewReader(make([]byte, 5*MiB)), errdefs.InvalidArgument},
		"no bytes":             {volume.Spec{Name: "a"}, strings.NewReader(""), errdefs.InvalidArgument},
		"an impossible size":   {volume.Spec{Name: "a", Size: 1}, strings.NewReader("x"), errdefs.InvalidArgument},
		"name":                 {volume.Spec{Name: "a/b"}, strings.NewReader("x"), errdefs.InvalidArgument},
		"a taken name":         {volume.Spec{Name: "taken"}, strings.NewReader("x"), errdefs.AlreadyExists},
		"a stream that fails":  {volume.Spec{Name: "a"}, failing(2*MiB+5, boom), errdefs.Unavailable},
		"a stream that is cut": {volume.Spec{Name: "a"}, failing(5, io.ErrUnexpectedEOF), errdefs.Internal},
	} {
		_, err := carrier.Import(t.Context(), c.spec, c.r, nil)
		class(t, what, err, c.want)
	}
	if all, err := s.List(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("there is %+v, %v", all, err)
	}
	create(t, s, "a", 1)
}

func exportRefused(t *testing.T, s volume.Store) {
	carrier := ability[volume.Carrier](t, s)
	create(t, s, "a", 1)
	one, two := vm.NewID(), vm.NewID()
	if _, _, err := s.Attach(t.Context(), "a", one, volume.Mode{}); err != nil {
		t.Fatal(err)
	}
	err := carrier.Export(t.Context(), "a", io.Discard)
	class(t, "while a VM writes", err, errdefs.FailedPrecondition)
	if err == nil || !strings.Contains(err.Error(), string(one)) {
		t.Errorf("the error does not name the VM: %v", err)
	}
	if err := s.Detach(t.Context(), "a", one); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Attach(t.Context(), "a", one, volume.Mode{ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	if err := carrier.Export(t.Context(), "a", io.Discard); err != nil {
		t.Errorf("while a VM reads: %v", err)
	}
	if err := s.Detach(t.Context(), "a", one); err != nil {
		t.Fatal(err)
	}
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- errors.Join(carrier.Export(t.Context(), "a", w), w.Close()) }()
	if _, err := io.ReadFull(r, make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	_, _, err = s.Attach(t.Context(), "a", two, volume.Mode{})
	class(t, "a writer during an export", err, errdefs.FailedPrecondition)
	if _, _, err := s.Attach(t.Context(), "a", one, volume.Mode{ReadOnly: true}); err != nil {
		t.Errorf("a reader during an export: %v", err)
	}
	if n, err := io.Copy(io.Discard, r); err != nil || n != MiB-10 {
		t.Errorf("%d bytes, %v", n, err)
	}
	if err := errors.Join(<-ended, s.Detach(t.Context(), "a", one)); err != nil {
		t.Error(err)
	}
	if _, _, err := s.Attach(t.Context(), "a", two, volume.Mode{}); err != nil {
		t.Errorf("after the export: %v", err)
	}
}
