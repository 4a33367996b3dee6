package savedmemory

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/sparse"
)

const testMemory = 12 << 20

// savedMemory creates a sparse file with data at both ends and in the middle.
func savedMemory(t *testing.T, name string, fill byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(testMemory); err != nil {
		t.Fatal(err)
	}
	for _, at := range []int64{0, 5<<20 + 4096, testMemory - 4096} {
		if _, err := f.WriteAt(bytes.Repeat([]byte{fill}, 4096), at); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

func sameBytes(t *testing.T, f *os.File, path string) {
	t.Helper()
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(io.NewSectionReader(f, 0, testMemory+1))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes differ from the file's %d, %v", len(got), len(want), err)
	}
}

func TestTemplateIsSealed(t *testing.T) {
	ts := Cache{budget: 1 << 30}
	path := savedMemory(t, "memory", 7)
	m, err := ts.Use(t.Context(), loadOf(path, ""), testMemory)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Release()
	sameBytes(t, m.File, path)
	if _, err := m.File.WriteAt([]byte("x"), 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("write: %v", err)
	}
	if err := m.File.Truncate(0); !errors.Is(err, unix.EPERM) {
		t.Errorf("truncate: %v", err)
	}
	if _, err := unix.Mmap(int(m.File.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); !errors.Is(err, unix.EPERM) {
		t.Errorf("map shared: %v", err)
	}
	private, err := unix.Mmap(int(m.File.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatalf("map copy-on-write: %v", err)
	}
	private[0] = 'x'
	sameBytes(t, m.File, path)
	if err := unix.Munmap(private); err != nil {
		t.Error(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(m.File.Fd()), &st); err != nil || st.Blocks*512 > testMemory/2 {
		t.Errorf("it occupies %d bytes: holes were filled; %v", st.Blocks*512, err)
	}
}

// TestSealWaits shows that a page in use only delays the seal. A writable mapping stands for the kernel's own use of a page:
// both make Linux answer EBUSY.
func TestSealWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "test")
		defer f.Close()
		if err := f.Truncate(4096); err != nil {
			t.Fatal(err)
		}
		page, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		if err := seal(t.Context(), f); !errors.Is(err, unix.EBUSY) {
			t.Errorf("a page that stays in use: %v, want EBUSY", err)
		}
		time.AfterFunc(sealLimit/2, func() { _ = unix.Munmap(page) })
		if err := seal(t.Context(), f); err != nil {
			t.Errorf("a page that is in use for a moment: %v", err)
		}
		if err := f.Truncate(0); !errors.Is(err, unix.EPERM) {
			t.Errorf("truncate: %v, want EPERM", err)
		}
	})
}

func TestTemplateIsLoadedOnce(t *testing.T) {
	ts := Cache{budget: 1 << 30}
	path := savedMemory(t, "memory", 7)
	files := make(chan *os.File, 8)
	var wg sync.WaitGroup
	for range cap(files) {
		wg.Go(func() {
			m, err := ts.Use(t.Context(), loadOf(path, ""), testMemory)
			if err != nil {
				t.Error(err)
				return
			}
			files <- m.File
			m.Release()
			m.Release() // as when both the launch and the instance release it
		})
	}
	wg.Wait()
	close(files)
	first := <-files
	for f := range files {
		if f != first {
			t.Error("it was loaded twice")
		}
	}
	for _, tm := range ts.all {
		if tm.users != 0 {
			t.Errorf("%d users are left", tm.users)
		}
	}
}

func TestTemplatesAreBounded(t *testing.T) {
	ts := Cache{budget: 40 << 10} // each takes 12 KiB
	var paths []string
	var held []*Memory
	for n := range 6 {
		path := savedMemory(t, "memory", byte(n+1))
		m, err := ts.Use(t.Context(), loadOf(path, ""), testMemory)
		if err != nil {
			t.Fatal(err)
		}
		paths, held = append(paths, path), append(held, m)
	}
	if len(ts.all) != 6 {
		t.Errorf("%d of 6 templates in use are kept", len(ts.all))
	}
	for _, m := range held {
		m.Release()
	}
	if len(ts.all) != 3 {
		t.Errorf("%d templates are kept, want 3", len(ts.all))
	}
	for _, tm := range ts.all {
		if tm.path != paths[3] && tm.path != paths[4] && tm.path != paths[5] {
			t.Errorf("%s was kept, which was used before the others", tm.path)
		}
	}
	// A template whose file is gone is dropped at the next call.
	if err := os.Remove(paths[5]); err != nil {
		t.Fatal(err)
	}
	m, err := ts.Use(t.Context(), loadOf(paths[4], ""), testMemory)
	if err != nil {
		t.Fatal(err)
	}
	m.Release()
	if len(ts.all) != 2 {
		t.Errorf("%d templates are kept, want 2", len(ts.all))
	}
}

func TestTemplateOfNewContent(t *testing.T) {
	ts := Cache{budget: 1 << 30}
	path := savedMemory(t, "memory", 1)
	old, err := ts.Use(t.Context(), loadOf(path, ""), testMemory)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Release()
	if err := os.Rename(savedMemory(t, "memory2", 2), path); err != nil {
		t.Fatal(err)
	}
	m, err := ts.Use(t.Context(), loadOf(path, ""), testMemory)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Release()
	sameBytes(t, m.File, path)
}

func TestLoadAlone(t *testing.T) {
	path := savedMemory(t, "memory", 9)
	m, err := LoadAlone(t.Context(), loadOf(path, ""), testMemory)
	if err != nil {
		t.Fatal(err)
	}
	sameBytes(t, m.File, path)
	if _, err := m.File.WriteAt([]byte("x"), 0); err != nil {
		t.Errorf("write: %v", err)
	}
	m.Release()
}

// TestLoadDelta loads memory that is saved as a delta to another memory.
func TestLoadDelta(t *testing.T) {
	base, path := savedMemory(t, "base", 9), filepath.Join(t.TempDir(), "delta")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	own := sparse.NewPages(testMemory)
	own.Set(2)
	own.Set(testMemory/4096 - 1) // zero now
	_, err = f.WriteAt(bytes.Repeat([]byte{8}, 4096), 2*4096)
	err = errors.Join(err, f.Truncate(testMemory), sparse.EndDelta(f, testMemory, own), f.Close())
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(base)
	if err != nil {
		t.Fatal(err)
	}
	copy(want[2*4096:], bytes.Repeat([]byte{8}, 4096))
	clear(want[testMemory-4096:])
	whole := filepath.Join(t.TempDir(), "whole")
	if err := os.WriteFile(whole, want, 0o600); err != nil {
		t.Fatal(err)
	}
	ts := Cache{budget: 1 << 30}
	for _, use := range []func(context.Context, *hypervisor.Incoming, int64) (*Memory, error){ts.Use, LoadAlone} {
		m, err := use(t.Context(), loadOf(path, base), testMemory)
		if err != nil {
			t.Fatal(err)
		}
		sameBytes(t, m.File, whole)
		m.Release()
		if _, err := use(t.Context(), loadOf(path, ""), testMemory); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("without its base: %v", err)
		}
		if _, err := use(t.Context(), loadOf(base, path), testMemory); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("the wrong way round: %v", err)
		}
	}
}

func TestMemoryRefused(t *testing.T) {
	ts := Cache{budget: 1 << 30}
	path := savedMemory(t, "memory", 9)
	for name, use := range map[string]func(context.Context, *hypervisor.Incoming, int64) (*Memory, error){"shared": ts.Use, "alone": LoadAlone} {
		if _, err := use(t.Context(), loadOf(path, ""), testMemory+4096); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s: a file that is too short: %v", name, err)
		}
		if _, err := use(t.Context(), loadOf(filepath.Dir(path), ""), testMemory); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: a folder: %v", name, err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := use(ctx, loadOf(path, ""), testMemory); !errors.Is(err, context.Canceled) && err != nil {
			t.Errorf("%s: cancelled: %v", name, err)
		}
	}
}

func loadOf(path, base string) *hypervisor.Incoming {
	return &hypervisor.Incoming{Memory: path, Base: base}
}
