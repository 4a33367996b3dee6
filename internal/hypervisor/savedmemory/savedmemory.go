// Package savedmemory keeps the memory of saved guests loaded, so that many VMs can map the same pages copy-on-write.
//
// It reads the files of hypervisor.Incoming and hands out memfds. How a hypervisor maps one, and what else a saved guest consists
// of, is the driver's business.
package savedmemory

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/sparse"
)

// Memory is a reference to a guest's saved memory in a memfd.
type Memory struct {
	File *os.File // the caller does not close it, but releases the reference
	free func()
}

// Release drops the reference; it does nothing for a nil Memory, or a second time.
func (m *Memory) Release() {
	if m != nil {
		m.free()
	}
}

// Load returns the memory of in for a hypervisor that maps it, after the state of in has been compared with its checksums, if it has some.
func (t *Cache) Load(ctx context.Context, in *hypervisor.Incoming, size int64) (*Memory, error) {
	if in.Summed {
		if err := Verify(ctx, in.State); err != nil {
			return nil, err
		}
	}
	if in.Alone {
		return LoadAlone(ctx, in, size)
	}
	return t.Use(ctx, in, size)
}

// LoadAlone loads memory for a single VM, which then writes to it.
func LoadAlone(ctx context.Context, in *hypervisor.Incoming, size int64) (*Memory, error) {
	src, err := openMemory(in, size)
	if err != nil {
		return nil, err
	}
	defer src.Close()
	f, err := load(ctx, src, size)
	if err != nil {
		return nil, err
	}
	return &Memory{File: f, free: sync.OnceFunc(func() { _ = f.Close() })}, nil
}

// openMemory opens a file of saved memory, which must have size bytes, and its base if it is a delta.
func openMemory(in *hypervisor.Incoming, size int64) (*sparse.File, error) {
	src, err := sparse.Open(openRead, in.Memory, in.Base, in.Summed)
	if err != nil {
		return nil, err
	}
	if src.Size() != size {
		_ = src.Close()
		return nil, errdefs.DataLossf("the saved memory %s has %d bytes, but the VM has %d", in.Memory, src.Size(), size)
	}
	return src, nil
}

func openRead(path string) (*os.File, error) { return jail.OpenData(path, "", false) }

// Verify compares a file of a saved state, which the hypervisor reads as it is, with its checksums.
func Verify(ctx context.Context, path string) error {
	sums, err := sparse.ReadSums(path + sparse.SumSuffix)
	if err != nil {
		return err
	}
	f, err := openRead(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return sums.Verify(ctx, f)
}

// load copies src into a new memfd. Holes stay holes.
func load(ctx context.Context, src *sparse.File, size int64) (_ *os.File, err error) {
	fd, err := unix.MemfdCreate("guest", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("load saved memory: %w", err)
	}
	dst := os.NewFile(uintptr(fd), "guest memory")
	defer func() {
		if err != nil {
			_ = dst.Close()
		}
	}()
	// A hypervisor opens its descriptor again, by name, as its own user. No other process has a name for it.
	if err := dst.Chmod(0o666); err != nil {
		return nil, fmt.Errorf("load saved memory: %w", err)
	}
	if err := dst.Truncate(size); err != nil {
		return nil, fmt.Errorf("load saved memory: %w", err)
	}
	if err := copyData(ctx, dst, src); err != nil {
		return nil, fmt.Errorf("load saved memory %s: %w", src.Name(), err)
	}
	return dst, nil
}

// loadPiece is how many bytes one worker copies at once.
const loadPiece = 4 << 20

// copyData copies everything except holes, with a few workers.
func copyData(ctx context.Context, dst *os.File, src *sparse.File) error {
	data, err := src.Extents()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	pieces := make(chan sparse.Extent)
	var workers sync.WaitGroup
	for range min(runtime.NumCPU(), 4) {
		workers.Go(func() {
			buf := make([]byte, 256<<10)
			for e := range pieces {
				if err := copyPiece(dst, src, e, buf); err != nil {
					cancel(err)
				}
			}
		})
	}
	for _, e := range data {
		for ; e.Length > 0 && ctx.Err() == nil; e.Offset, e.Length = e.Offset+loadPiece, e.Length-loadPiece {
			select {
			case pieces <- sparse.Extent{Offset: e.Offset, Length: min(e.Length, loadPiece)}:
			case <-ctx.Done():
			}
		}
	}
	close(pieces)
	workers.Wait()
	return context.Cause(ctx)
}

func copyPiece(dst *os.File, src *sparse.File, e sparse.Extent, buf []byte) error {
	for at := e.Offset; at < e.End(); {
		n, err := src.ReadAt(buf[:min(int64(len(buf)), e.End()-at)], at)
		if errors.Is(err, io.EOF) {
			return errdefs.DataLossf("it is truncated")
		}
		if err != nil {
			return err
		}
		if _, err := dst.WriteAt(buf[:n], at); err != nil {
			return err
		}
		at += int64(n)
	}
	return nil
}

// templateRest is how long an unused template is kept at most.
const templateRest = 15 * time.Minute

// Cache holds saved memory for VMs that map it copy-on-write. Each file is loaded once, sealed, and shared. Templates in
// use stay, because their VMs keep the pages anyway. If the unused ones exceed budget, those unused for the longest time are
// dropped.
type Cache struct {
	budget int64 // bytes

	mu    sync.Mutex
	all   map[memoryKey]*template
	timer *time.Timer
}

// NewCache returns an empty cache. Unused memory in it is limited to budget bytes.
func NewCache(budget int64) *Cache { return &Cache{budget: budget} }

// memoryKey identifies a file and distinguishes old content from new.
type memoryKey struct {
	dev, ino    uint64
	size, mtime int64
}

type template struct {
	key   memoryKey
	path  string
	base  string
	size  int64
	ready chan struct{} // closed when file or err is set
	file  *os.File
	bytes int64
	err   error
	users int
	idle  time.Time // since when it has no users
}

// Use returns the memory of in, loaded by this call or another one.
func (t *Cache) Use(ctx context.Context, in *hypervisor.Incoming, size int64) (*Memory, error) {
	tm := t.join(in, size)
	if tm == nil {
		src, err := openMemory(in, size)
		if err != nil {
			return nil, err
		}
		if tm, err = t.entry(ctx, in, src); err != nil {
			return nil, err
		}
	}
	free := sync.OnceFunc(func() { t.drop(tm) })
	select {
	case <-tm.ready:
	case <-ctx.Done():
		free()
		return nil, ctx.Err()
	}
	if tm.err != nil {
		free()
		return nil, tm.err
	}
	return &Memory{File: tm.file, free: free}, nil
}

// join finds the template of in without opening its files or their checksums; nil if there is none.
func (t *Cache) join(in *hypervisor.Incoming, size int64) *template {
	info, err := os.Lstat(in.Memory)
	if err != nil {
		return nil // opening the file reports the reason
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	tm := t.all[keyOf(info)]
	if tm == nil || tm.size != size || tm.base != in.Base {
		return nil
	}
	tm.users++
	return tm
}

// entry finds the template of src or starts to load it. It takes ownership of src.
func (t *Cache) entry(ctx context.Context, in *hypervisor.Incoming, src *sparse.File) (*template, error) {
	info, err := src.Stat()
	if err != nil {
		_ = src.Close()
		return nil, fmt.Errorf("look at saved memory %s: %w", in.Memory, err)
	}
	key := keyOf(info)
	t.mu.Lock()
	defer t.mu.Unlock()
	if tm := t.all[key]; tm != nil {
		_ = src.Close()
		tm.users++
		return tm, nil
	}
	tm := &template{key: key, path: in.Memory, base: in.Base, size: src.Size(), ready: make(chan struct{}), users: 1}
	if t.all == nil {
		t.all = map[memoryKey]*template{}
	}
	t.all[key] = tm
	go t.load(context.WithoutCancel(ctx), tm, src) // others may wait for the template even if this caller gives up
	return tm, nil
}

func (t *Cache) load(ctx context.Context, tm *template, src *sparse.File) {
	defer src.Close()
	f, err := load(ctx, src, src.Size())
	if err == nil {
		if err = seal(ctx, f); err != nil {
			_ = f.Close()
			err = fmt.Errorf("seal saved memory %s: %w", tm.path, err)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		tm.err = err
		delete(t.all, tm.key)
	} else {
		var st unix.Stat_t
		_ = unix.Fstat(int(f.Fd()), &st)
		tm.file, tm.bytes, tm.idle = f, st.Blocks*512, time.Now()
	}
	close(tm.ready)
	t.sweep()
}

// sealLimit is how long a page of a memfd may be in the kernel's own hands. Linux moves pages under memory pressure, and
// refuses to seal a file (EBUSY) that has such a page after 150 ms (memfd_wait_for_pins in mm/memfd.c).
const sealLimit, sealPause = 20 * time.Second, 20 * time.Millisecond

// seal makes f constant. After this nothing can change it, even if a guest takes over its hypervisor.
func seal(ctx context.Context, f *os.File) error {
	_, err := backoff.Retry(ctx, func() (int, error) {
		n, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
		if !errors.Is(err, unix.EBUSY) {
			err = backoff.Permanent(err)
		}
		return n, err
	}, backoff.WithBackOff(backoff.NewConstantBackOff(sealPause)), backoff.WithMaxElapsedTime(sealLimit))
	return err
}

func (t *Cache) drop(tm *template) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if tm.users--; tm.users == 0 {
		tm.idle = time.Now()
	}
	t.sweep()
}

// sweep drops unused templates: those whose file is gone or replaced, those unused for too long, and the oldest ones beyond
// budget.
func (t *Cache) sweep() {
	var idle []*template
	var bytes int64
	for key, tm := range t.all {
		if tm.users > 0 || tm.file == nil {
			continue
		}
		if time.Since(tm.idle) >= templateRest || !same(key, tm.path) {
			t.forget(tm)
			continue
		}
		idle = append(idle, tm)
		bytes += tm.bytes
	}
	for bytes > t.budget {
		oldest := 0
		for n := range idle {
			if idle[n].idle.Before(idle[oldest].idle) {
				oldest = n
			}
		}
		bytes -= idle[oldest].bytes
		t.forget(idle[oldest])
		idle = append(idle[:oldest], idle[oldest+1:]...)
	}
	if len(idle) > 0 && t.timer == nil {
		t.timer = time.AfterFunc(templateRest, func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.timer = nil
			t.sweep()
		})
	}
}

func (t *Cache) forget(tm *template) {
	delete(t.all, tm.key)
	_ = tm.file.Close()
}

func same(key memoryKey, path string) bool {
	info, err := os.Stat(path)
	return err == nil && key == keyOf(info)
}

func keyOf(info fs.FileInfo) memoryKey {
	st, _ := info.Sys().(*syscall.Stat_t) // always succeeds on Linux
	return memoryKey{st.Dev, st.Ino, st.Size, st.Mtim.Nano()}
}

// HostBytes returns the host's memory in bytes.
func HostBytes() int64 {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit)
}
