package atomicfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A thousand concurrent callers share a few syncs. Each waits for a sync that began after its call.
func TestGroupIsShared(t *testing.T) {
	const callers = 1000
	dir := t.TempDir()
	var clock, syncs atomic.Int64
	var mu sync.Mutex
	began := map[string]int64{} // when the last sync of a file, or of the file system, began
	note := func(name string) {
		mu.Lock()
		began[name] = clock.Add(1)
		mu.Unlock()
		syncs.Add(1)
		<-time.After(time.Millisecond) // simulates a slow disk
	}
	g := Group{
		fsync:  func(f *os.File) error { note(f.Name()); return nil },
		syncfs: func(*os.File) error { note(""); return nil },
	}
	file := func(i int) string { return filepath.Join(dir, fmt.Sprint(i)) }
	for i := range callers {
		if err := os.WriteFile(file(i), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	come := make(chan struct{})
	for i := range callers {
		wg.Go(func() {
			<-come
			path := file(i)
			called := clock.Add(1)
			if err := g.Sync(path, dir); err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			if max(began[path], began[""]) < called {
				t.Errorf("caller %d was answered by a sync that began before it asked", i)
			}
		})
	}
	close(come)
	wg.Wait()
	if n := syncs.Load(); n > callers/4 {
		t.Errorf("%d callers caused %d syncs", callers, n)
	}
}

func TestGroupTellsWhoseFileFailed(t *testing.T) {
	dir := t.TempDir()
	bad, good := filepath.Join(dir, "bad"), filepath.Join(dir, "good")
	for _, path := range []string{bad, good} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	broken := errors.New("broken disk")
	g := Group{fsync: func(f *os.File) error {
		if f.Name() == bad {
			return broken
		}
		return nil
	}}
	if err := g.Sync(good, dir); err != nil {
		t.Error(err)
	}
	if err := g.Sync(good, bad); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if err := g.Sync(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	if err := new(Group).Sync(good, dir); err != nil { // with the real syncs
		t.Error(err)
	}
}
