package sqlite

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/journal/journaltest"
	"cocoonstack.io/cocoon/internal/vm"
)

func open(t testing.TB, dir string, history int) *Journal {
	t.Helper()
	j, err := Open(t.Context(), Config{Path: filepath.Join(dir, "journal.db"), History: history})
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func TestContract(t *testing.T) {
	journaltest.Run(t, func(t *testing.T, dir string, history int) journal.Journal { return open(t, dir, history) })
}

func TestFilesArePrivate(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "journal.db")
	if err := os.WriteFile(path, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	j := open(t, dir, 0)
	defer j.Close()
	r := journaltest.Record("a")
	if _, err := j.Begin(t.Context(), journal.Intent{ID: r.ID, Op: "create"}, r); err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		info, err := f.Info()
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", f.Name(), info.Mode())
		}
	}
}

func TestOneWriter(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, 0)
	_, err := Open(t.Context(), Config{Path: filepath.Join(dir, "journal.db")})
	if !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a second writer: got %v", err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if err := open(t, dir, 0).Close(); err != nil {
		t.Error(err)
	}
}

func TestBadFiles(t *testing.T) {
	t.Run("garbage", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "journal.db")
		if err := os.WriteFile(path, make([]byte, 8192), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(t.Context(), Config{Path: path}); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("newer schema", func(t *testing.T) {
		dir := t.TempDir()
		j := open(t, dir, 0)
		if _, err := j.conn.ExecContext(t.Context(), `UPDATE schema SET version = 99`); err != nil {
			t.Fatal(err)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(t.Context(), Config{Path: filepath.Join(dir, "journal.db")}); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("no folder", func(t *testing.T) {
		if _, err := Open(t.Context(), Config{Path: filepath.Join(t.TempDir(), "no", "journal.db")}); err == nil {
			t.Error("no error")
		}
	})
	t.Run("damaged record", func(t *testing.T) {
		dir := t.TempDir()
		j := open(t, dir, 0)
		defer j.Close()
		if _, err := j.conn.ExecContext(t.Context(), `INSERT INTO vms (id, name, record) VALUES ('x', 'x', '{')`); err != nil {
			t.Fatal(err)
		}
		if _, _, err := j.Load(t.Context()); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("got %v", err)
		}
	})
}

// TestFullDisk limits the file instead of the disk: SQLite reports both alike. A failed change must leave nothing
// behind.
func TestFullDisk(t *testing.T) {
	j := open(t, t.TempDir(), 0)
	defer j.Close()
	if _, err := j.conn.ExecContext(t.Context(), `PRAGMA max_page_count = 12`); err != nil {
		t.Fatal(err)
	}
	n := 0
	for ; ; n++ {
		r := journaltest.Record(fmt.Sprint("vm", n))
		_, err := j.Begin(t.Context(), journal.Intent{ID: r.ID, Op: "create"}, r)
		if err == nil && n < 1000 {
			continue
		}
		if !errdefs.Is(err, errdefs.ResourceExhausted) {
			t.Fatalf("after %d records: %v", n, err)
		}
		break
	}
	records, _, err := j.Load(t.Context())
	if err != nil || len(records) != n || j.Revision() != int64(n) {
		t.Fatalf("%d records, %v, revision %d; want %d", len(records), err, j.Revision(), n)
	}
	if _, err := j.conn.ExecContext(t.Context(), `PRAGMA max_page_count = 10000`); err != nil {
		t.Fatal(err)
	}
	if err := j.Forget(t.Context(), records[0].ID); err != nil {
		t.Errorf("after making room: %v", err)
	}
}

func TestClosed(t *testing.T) {
	j := open(t, t.TempDir(), 0)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := j.Update(t.Context(), journaltest.Record("a")); !errdefs.IsUnavailable(err) {
		t.Errorf("got %v", err)
	}
}

// BenchmarkLife measures what the engine does for one VM that is launched and removed: five changes, and three waits
// for durability.
func BenchmarkLife(b *testing.B) {
	for _, parallel := range []int{1, 32, 1000} {
		b.Run(fmt.Sprint(parallel), func(b *testing.B) {
			var syncs atomic.Int64
			j, err := Open(b.Context(), Config{Path: filepath.Join(b.TempDir(), "journal.db"), Synced: func() { syncs.Add(1) }})
			if err != nil {
				b.Fatal(err)
			}
			defer j.Close()
			var n atomic.Int64
			b.SetParallelism((parallel + runtime.GOMAXPROCS(0) - 1) / runtime.GOMAXPROCS(0))
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					r := journaltest.Record(fmt.Sprint("vm", n.Add(1)))
					r, err := j.Begin(b.Context(), journal.Intent{ID: r.ID, Op: "launch", Step: "disks"}, r)
					if err == nil {
						r, err = j.Step(b.Context(), r.ID, "launch", r)
					}
					if err == nil {
						r, err = j.Settle(b.Context(), r)
					}
					if err == nil {
						err = j.Sync(b.Context())
					}
					if err == nil {
						r, err = j.Begin(b.Context(), journal.Intent{ID: r.ID, Op: "remove"}, r)
					}
					if err == nil {
						err = j.Sync(b.Context())
					}
					if err == nil {
						err = j.Forget(b.Context(), r.ID)
					}
					if err == nil {
						err = j.Sync(b.Context())
					}
					if err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "VMs/s")
			b.ReportMetric(float64(syncs.Load())/float64(b.N), "syncs/VM")
		})
	}
}

// TestRemembered compares the events from memory with those from the file, in a history longer than either part.
func TestRemembered(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, 3*keepRecent)
	r := journaltest.Record("a")
	r, err := j.Begin(t.Context(), journal.Intent{ID: r.ID, Op: "create"}, r)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 * keepRecent {
		r.Message = fmt.Sprint(i)
		if r, err = j.Settle(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.Forget(t.Context(), r.ID); err != nil {
		t.Fatal(err)
	}
	last := j.Revision()
	asked := []int64{0, last - 4*keepRecent, last - 2*keepRecent, last - keepRecent, last - 2, last - 1, last, last + 1}
	told := func() (all []string) {
		for _, after := range asked {
			for _, limit := range []int{0, 10} {
				events, err := j.Events(t.Context(), after, limit)
				text, jerr := json.Marshal(events)
				if jerr != nil {
					t.Fatal(jerr)
				}
				all = append(all, fmt.Sprintf("after %d at most %d: %v %s", after, limit, errdefs.IsFailedPrecondition(err), text))
			}
		}
		return all
	}
	fromMemory := told()
	if _, ok := j.recall(last-keepRecent, 0); !ok {
		t.Error("nothing is remembered")
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = open(t, dir, 3*keepRecent)
	defer j.Close()
	if _, ok := j.recall(last-1, 0); ok {
		t.Error("a new journal remembers what it did not write")
	}
	for i, want := range told() {
		if fromMemory[i] != want {
			t.Errorf("from memory: %.300s\nfrom the file: %.300s", fromMemory[i], want)
		}
	}
}

// Later changes of the caller's record must not change the event.
func TestRememberedIsOurOwn(t *testing.T) {
	j := open(t, t.TempDir(), 100)
	defer j.Close()
	r := journaltest.Record("a")
	r.NICs = []vm.NIC{{IP: "10.0.0.1"}}
	r, err := j.Begin(t.Context(), journal.Intent{ID: r.ID, Op: "create"}, r)
	if err != nil {
		t.Fatal(err)
	}
	r.NICs[0].IP = "10.0.0.2"
	if got, err := j.Events(t.Context(), 0, 0); err != nil || len(got) != 1 || got[0].Record.NICs[0].IP != "10.0.0.1" {
		t.Errorf("told %+v, %v", got, err)
	}
}

// onDisk opens what remains of a journal after a power cut: its files as of the last sync.
func onDisk(t *testing.T, files map[string][]byte) *Journal {
	t.Helper()
	dir := t.TempDir()
	for suffix, text := range files {
		if err := os.WriteFile(filepath.Join(dir, "journal.db"+suffix), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return open(t, dir, 0)
}

// TestSyncSurvivesAPowerCut checks the files as they are on the disk: they contain every change made before a Sync that
// has returned. The files are captured at each sync, so a missing sync would show.
func TestSyncSurvivesAPowerCut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal.db")
	files := map[string][]byte{}
	j, err := Open(t.Context(), Config{Path: path, Synced: func() {
		for _, suffix := range []string{"", "-wal"} {
			text, err := os.ReadFile(path + suffix)
			if err != nil {
				t.Error(err)
			}
			files[suffix] = text
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	for i := range 10 {
		r := journaltest.Record(fmt.Sprint("vm", i))
		if r, err = j.Begin(t.Context(), journal.Intent{ID: r.ID, Op: "create"}, r); err == nil {
			_, err = j.Settle(t.Context(), r)
		}
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			continue
		}
		if err := j.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		left := onDisk(t, files)
		all, unsettled, err := left.Load(t.Context())
		if err != nil || len(all) != i+1 || len(unsettled) > 0 || left.Revision() != j.Revision() {
			t.Errorf("%d of %d records are left, unsettled %v, %v", len(all), i+1, unsettled, err)
		}
		if err := left.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestSyncsAreShared makes a thousand callers settle at once: they wait for a few syncs, not for a thousand.
func TestSyncsAreShared(t *testing.T) {
	const callers = 1000
	var syncs atomic.Int64
	j, err := Open(t.Context(), Config{Path: filepath.Join(t.TempDir(), "journal.db"), Synced: func() { syncs.Add(1) }})
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			r := journaltest.Record(fmt.Sprint("vm", i))
			r, err := j.Begin(t.Context(), journal.Intent{ID: r.ID, Op: "launch"}, r)
			if err == nil {
				_, err = j.Settle(t.Context(), r)
			}
			if err == nil {
				err = j.Sync(t.Context())
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := syncs.Load(); n == 0 || n > callers/4 {
		t.Errorf("%d callers caused %d syncs", callers, n)
	}
	t.Logf("%d callers, %d syncs", callers, syncs.Load())
}

// killed returns a folder with the journal that a process killed now would leave. An undamaged journal is not refused.
func killed(t *testing.T, dir string) string {
	t.Helper()
	left := t.TempDir()
	for _, suffix := range []string{"", "-wal", ".mark"} {
		text, err := os.ReadFile(filepath.Join(dir, "journal.db"+suffix))
		if err == nil {
			err = os.WriteFile(filepath.Join(left, "journal.db"+suffix), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	whole := filepath.Join(t.TempDir(), "whole")
	if err := os.CopyFS(whole, os.DirFS(left)); err != nil {
		t.Fatal(err)
	}
	if err := open(t, whole, 0).Close(); err != nil {
		t.Fatal(err)
	}
	return left
}

// TestOlderIsRefused damages a journal in realistic ways. It is refused with a message that states the options, until
// the operator accepts it as older; and revisions are never used twice.
func TestOlderIsRefused(t *testing.T) {
	garbage := func(n int) []byte { return bytes.Repeat([]byte("garbage!"), n/8) }
	for name, damage := range map[string]func(path string) error{
		"empty file":      func(path string) error { return os.Truncate(path, 0) },
		"no file":         os.Remove,
		"garbage in log":  func(path string) error { return os.WriteFile(path+"-wal", garbage(20<<10), 0o600) },
		"no log":          func(path string) error { return os.Remove(path + "-wal") },
		"garbage":         func(path string) error { return os.WriteFile(path, garbage(8<<10), 0o600) },
		"no mark to read": func(path string) error { return os.WriteFile(path+".mark", garbage(32), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for _, name := range []string{"a", "b"} { // the first is in the file, the second in the log
				j := open(t, dir, 0)
				r := journaltest.Record(name)
				if _, err := j.Begin(t.Context(), journal.Intent{ID: r.ID, Op: "create"}, r); err != nil {
					t.Fatal(err)
				}
				if err := j.Sync(t.Context()); err != nil {
					t.Fatal(err)
				}
				if name == "b" {
					dir = killed(t, dir)
				}
				if err := j.Close(); err != nil {
					t.Fatal(err)
				}
			}
			const reached = 2
			path := filepath.Join(dir, "journal.db")
			if err := damage(path); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				_, err := Open(t.Context(), Config{Path: path})
				if !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), "--rebuild") {
					t.Fatalf("got %v", err)
				}
			}
			if name == "garbage" {
				return // nothing remains to continue from
			}
			older, err := Open(t.Context(), Config{Path: path, Older: true})
			if err != nil {
				t.Fatal(err)
			}
			if older.Revision() < reached {
				t.Errorf("revision %d is used again, %d was reached", older.Revision(), reached)
			}
			if _, err := older.Events(t.Context(), reached-1, 0); name != "no mark to read" && !errdefs.IsFailedPrecondition(err) {
				t.Errorf("who has seen revision %d is told %v", reached-1, err)
			}
			if err := older.Close(); err != nil {
				t.Fatal(err)
			}
			again := open(t, dir, 0)
			if again.Revision() < reached {
				t.Errorf("it is at revision %d", again.Revision())
			}
			if err := again.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestOlderLeapsAtItsMark: what has been put back may be older than the copies of the records although its mark agrees with it, because the mark was put back too.
func TestOlderLeapsAtItsMark(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, 0)
	r := journaltest.Record("a")
	if _, err := j.Begin(t.Context(), journal.Intent{ID: r.ID, Op: "create"}, r); err != nil {
		t.Fatal(err)
	}
	reached := j.Revision()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	older, err := Open(t.Context(), Config{Path: filepath.Join(dir, "journal.db"), Older: true})
	if err != nil {
		t.Fatal(err)
	}
	defer older.Close()
	if older.Revision() <= reached+1 {
		t.Errorf("it goes on at revision %d after %d, which the future that is gone may have reached", older.Revision(), reached)
	}
	if _, err := older.Events(t.Context(), reached, 0); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("who has seen revision %d is told %v", reached, err)
	}
}
