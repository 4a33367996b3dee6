package proclog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/guest"
)

var t0 = time.Unix(1000, 0).UTC()

func entry(seq uint64, text string) guest.LogEntry {
	return guest.LogEntry{Seq: seq, Time: t0.Add(time.Duration(seq) * time.Second), Stream: "stdout", Data: []byte(text + "\n")}
}

func begun(t *testing.T, dir string, maxBytes int64) *Log {
	t.Helper()
	l := New(dir, maxBytes)
	if err := l.Begin(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Finish)
	return l
}

func put(t *testing.T, l *Log, from, to uint64) {
	t.Helper()
	for i := from; i <= to; i++ {
		if err := l.Append(entry(i, fmt.Sprint("line ", i))); err != nil {
			t.Fatal(err)
		}
	}
}

func seqs(t *testing.T, l *Log, opts guest.LogOptions) []uint64 {
	t.Helper()
	var out []uint64
	if err := l.Read(t.Context(), opts, func(e guest.LogEntry) error { out = append(out, e.Seq); return nil }); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestRead(t *testing.T) {
	l := begun(t, t.TempDir(), 1<<20)
	put(t, l, 1, 5)
	put(t, l, 3, 6) // existing entries are skipped
	for name, tt := range map[string]struct {
		opts guest.LogOptions
		want []uint64
	}{
		"all":            {guest.LogOptions{Tail: -1}, []uint64{1, 2, 3, 4, 5, 6}},
		"tail":           {guest.LogOptions{Tail: 2}, []uint64{5, 6}},
		"tail of more":   {guest.LogOptions{Tail: 100}, []uint64{1, 2, 3, 4, 5, 6}},
		"tail of none":   {guest.LogOptions{Tail: 0}, nil},
		"since":          {guest.LogOptions{Tail: -1, Since: t0.Add(4 * time.Second)}, []uint64{4, 5, 6}},
		"since and tail": {guest.LogOptions{Tail: 1, Since: t0.Add(4 * time.Second)}, []uint64{6}},
		"since later":    {guest.LogOptions{Tail: 5, Since: t0.Add(time.Hour)}, nil},
		"previous":       {guest.LogOptions{Tail: -1, Previous: true}, nil},
	} {
		if got := seqs(t, l, tt.opts); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: got %v, want %v", name, got, tt.want)
		}
	}
}

func TestRuns(t *testing.T) {
	dir := t.TempDir()
	l := begun(t, dir, 1<<20)
	if l.HasPrevious() {
		t.Error("a new log has a previous run")
	}
	put(t, l, 1, 2)
	l.Finish()
	for range 2 { // a start that was interrupted before its first line does not lose the previous run
		if err := l.Begin(); err != nil {
			t.Fatal(err)
		}
	}
	put(t, l, 1, 1)
	if got := seqs(t, l, guest.LogOptions{Tail: -1, Previous: true}); !reflect.DeepEqual(got, []uint64{1, 2}) || !l.HasPrevious() {
		t.Errorf("previous: %v", got)
	}
	if got := seqs(t, l, guest.LogOptions{Tail: -1}); !reflect.DeepEqual(got, []uint64{1}) {
		t.Errorf("current: %v", got)
	}
	l.Finish()
	if err := l.Append(entry(9, "x")); err == nil {
		t.Error("a finished log takes entries")
	}
}

func TestResumeAfterTornLine(t *testing.T) {
	dir := t.TempDir()
	l := begun(t, dir, 1<<20)
	put(t, l, 1, 3)
	l.Finish()
	f, err := os.OpenFile(filepath.Join(dir, currentRun, newer), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(f, `{"seq":4,"data":"AAAA`)
	f.Close()
	if got := seqs(t, New(dir, 1<<20), guest.LogOptions{Tail: -1}); !reflect.DeepEqual(got, []uint64{1, 2, 3}) {
		t.Errorf("with a torn line: %v", got)
	}
	l = New(dir, 1<<20)
	if err := l.Resume(); err != nil {
		t.Fatal(err)
	}
	defer l.Finish()
	if l.Last() != 3 {
		t.Errorf("goes on after %d, want 3", l.Last())
	}
	put(t, l, 4, 5)
	if got := seqs(t, l, guest.LogOptions{Tail: -1}); !reflect.DeepEqual(got, []uint64{1, 2, 3, 4, 5}) {
		t.Errorf("after resuming: %v", got)
	}
}

func TestBounded(t *testing.T) {
	dir := t.TempDir()
	l := begun(t, dir, 16<<10)
	put(t, l, 1, 2000)
	var size int64
	for _, name := range []string{newer, older} {
		info, err := os.Stat(filepath.Join(dir, currentRun, name))
		if err != nil {
			t.Fatal(err)
		}
		size += info.Size()
	}
	if size > 16<<10 {
		t.Errorf("%d bytes", size)
	}
	got := seqs(t, l, guest.LogOptions{Tail: -1})
	if len(got) < 50 || got[len(got)-1] != 2000 || got[0] != 2000-uint64(len(got))+1 {
		t.Errorf("%d entries, %d..%d", len(got), got[0], got[len(got)-1])
	}
	l.Finish()
	if l = New(dir, 16<<10); l.Resume() != nil || l.Last() != 2000 {
		t.Errorf("resumes at %d", l.Last())
	}
	l.Finish()
}

func TestHugeEntryIsCut(t *testing.T) {
	l := begun(t, t.TempDir(), 4<<20)
	if err := l.Append(guest.LogEntry{Seq: 1, Data: bytes.Repeat([]byte("x"), maxData+5)}); err != nil {
		t.Fatal(err)
	}
	put(t, l, 2, 2)
	if got := seqs(t, l, guest.LogOptions{Tail: -1}); !reflect.DeepEqual(got, []uint64{1, 2}) {
		t.Errorf("got %v", got)
	}
}

// TestFollow has readers of several speeds follow a writer over many rotations: each sees growing numbers up to the
// last, and the one that keeps up misses none.
func TestFollow(t *testing.T) {
	const n = 3000
	l := begun(t, t.TempDir(), 64<<10)
	var wg sync.WaitGroup
	seen := make([][]uint64, 3)
	step := make(chan struct{}) // the first reader paces the writer
	for i := range seen {
		wg.Go(func() {
			err := l.Read(t.Context(), guest.LogOptions{Follow: true, Tail: -1}, func(e guest.LogEntry) error {
				seen[i] = append(seen[i], e.Seq)
				if i == 0 {
					step <- struct{}{}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	for i := uint64(1); i <= n; i++ {
		put(t, l, i, i)
		<-step
	}
	l.Finish()
	wg.Wait()
	if len(seen[0]) != n {
		t.Errorf("the reader that keeps up saw %d of %d", len(seen[0]), n)
	}
	for i, got := range seen {
		for k := 1; k < len(got); k++ {
			if got[k] <= got[k-1] {
				t.Fatalf("reader %d: %d after %d", i, got[k], got[k-1])
			}
		}
		if len(got) == 0 || got[len(got)-1] != n {
			t.Errorf("reader %d did not reach the end", i)
		}
	}
}

func TestFollowEnds(t *testing.T) {
	l := begun(t, t.TempDir(), 1<<20)
	put(t, l, 1, 1)
	ctx, cancel := context.WithCancel(t.Context())
	err := l.Read(ctx, guest.LogOptions{Follow: true, Tail: -1}, func(guest.LogEntry) error { cancel(); return nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	// A follower of a run does not continue into the next one.
	first := make(chan struct{})
	done := make(chan []uint64)
	go func() {
		var got []uint64
		_ = l.Read(t.Context(), guest.LogOptions{Follow: true, Tail: -1}, func(e guest.LogEntry) error {
			if got = append(got, e.Seq); len(got) == 1 {
				close(first)
			}
			return nil
		})
		done <- got
	}()
	<-first
	if err := l.Begin(); err != nil {
		t.Fatal(err)
	}
	put(t, l, 1, 3)
	if got := <-done; !reflect.DeepEqual(got, []uint64{1}) {
		t.Errorf("got %v", got)
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"seq":1,"stream":"stdout","data":"aGkK"}` + "\n"))
	f.Add([]byte("{\"seq\":2}\n{\"seq\":1}\n{\"seq\":3"))
	f.Add([]byte("\n\n\x00null\n[]\n{\"seq\":-1}\n{\"seq\":18446744073709551615}\n{\"seq\":3}\n"))
	f.Add([]byte(strings.Repeat("x", 70<<10) + "\n{\"seq\":7}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, currentRun), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, currentRun, newer), data, 0o600); err != nil {
			t.Fatal(err)
		}
		l := New(dir, 1<<20)
		var last uint64
		err := l.Read(t.Context(), guest.LogOptions{Tail: -1}, func(e guest.LogEntry) error {
			if e.Seq <= last {
				t.Fatalf("%d after %d", e.Seq, last)
			}
			last = e.Seq
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Resume(); err != nil {
			t.Fatal(err)
		}
		defer l.Finish()
		if l.Last() < last {
			t.Fatalf("resumed at %d, read %d", l.Last(), last)
		}
		if l.Last() == ^uint64(0) { // nothing can follow it
			return
		}
		next := l.Last() + 1
		if err := l.Append(entry(next, "x")); err != nil {
			t.Fatal(err)
		}
		if got := seqs(t, l, guest.LogOptions{Tail: -1}); len(got) == 0 || got[len(got)-1] != next {
			t.Fatalf("the new entry is not at the end: %v", got)
		}
	})
}

func TestForeignRun(t *testing.T) {
	dir := t.TempDir()
	l := New(dir, 1<<20)
	check := func(step string, last uint64, want string) {
		t.Helper()
		var got string
		if err := l.Read(t.Context(), guest.LogOptions{Tail: -1}, func(e guest.LogEntry) error { got += string(e.Data); return nil }); err != nil {
			t.Fatal(err)
		}
		if l.Last() != last || got != want {
			t.Errorf("%s: last %d, log %q; want %d, %q", step, l.Last(), got, last, want)
		}
	}
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	add := func(seq uint64, text string) {
		t.Helper()
		do(l.Append(guest.LogEntry{Seq: seq, Stream: "stdout", Data: []byte(text)}))
	}
	do(l.Begin())
	do(l.Skip(0, 9)) // not of another run: nothing is left out
	add(1, "old.")
	check("ordinary", 1, "old.")
	do(l.BeginForeign())
	check("begun", 0, "")
	do(l.Skip(0, 5))
	do(l.Skip(0, 7)) // called again: entries since then belong to it
	check("skipped", 5, "")
	add(6, "new.")
	check("gone on", 6, "new.")
	l = New(dir, 1<<20)
	do(l.Resume())
	do(l.Skip(0, 8))
	check("resumed", 6, "new.")
	do(l.BeginForeign())
	l = New(dir, 1<<20)
	do(l.Resume())
	do(l.Skip(0, 3))
	check("cut off before it was known", 3, "")
	n := 0
	do(l.Read(t.Context(), guest.LogOptions{Tail: 2}, func(guest.LogEntry) error { n++; return nil }))
	if n != 0 {
		t.Errorf("the tail has %d entries", n)
	}
}

// A guest of several containers that was restored to an earlier state has runs that the log has already seen.
func TestSkipOfRuns(t *testing.T) {
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	add := func(l *Log, run int, seq uint64, text string) {
		t.Helper()
		do(l.Append(guest.LogEntry{Run: run, Seq: seq, Stream: "stdout", Data: []byte(text)}))
	}
	for _, seq := range []uint64{0, 2} { // the last entry of run 2 by then
		dir := t.TempDir()
		l := New(dir, 1<<20)
		do(l.Begin())
		add(l, 3, 9, "third.")
		do(l.BeginForeign())
		l = New(dir, 1<<20)
		do(l.Resume())
		do(l.Skip(2, seq))
		l = New(dir, 1<<20)
		do(l.Resume())
		if run, at := l.Place(); run != 2 || at != seq {
			t.Errorf("it goes on after entry %d of run %d, not after %d", at, run, seq)
		}
		add(l, 1, 5, "long ago.")
		add(l, 2, seq+1, "second.")
		for previous, want := range map[bool]string{false: "second.", true: "third."} {
			got := ""
			do(l.Read(t.Context(), guest.LogOptions{Tail: -1, Previous: previous}, func(e guest.LogEntry) error { got += string(e.Data); return nil }))
			if got != want {
				t.Errorf("previous %v: %q, want %q", previous, got, want)
			}
		}
	}
}

// TestFollowFirstRun: who follows a log before its first run gets that run to its end, and none after it.
func TestFollowFirstRun(t *testing.T) {
	l := New(t.TempDir(), 64<<10)
	if err := l.Resume(); err != nil {
		t.Fatal(err)
	}
	var seen []uint64
	read, got := make(chan error, 1), make(chan struct{}, 3)
	waits := make(chan struct{})
	go func() {
		close(waits)
		read <- l.Read(t.Context(), guest.LogOptions{Follow: true, Tail: -1}, func(e guest.LogEntry) error {
			seen = append(seen, e.Seq)
			got <- struct{}{}
			return nil
		})
	}()
	<-waits
	for _, e := range []guest.LogEntry{{Run: 1}, {Run: 1, Seq: 1, Data: []byte("a\n")}, {Run: 1, Seq: 2, Data: []byte("b\n")}} {
		if err := l.Append(e); err != nil {
			t.Fatal(err)
		}
	}
	<-got
	<-got
	for _, e := range []guest.LogEntry{{Run: 2}, {Run: 2, Seq: 1, Data: []byte("c\n")}} {
		if err := l.Append(e); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-read; err != nil || len(seen) != 2 {
		t.Errorf("read %v, %v; want the two entries of the first run", seen, err)
	}
}
