package pager

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filling"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/sparse"
)

// TestMain lets the test binary be a pager.
func TestMain(m *testing.M) {
	if Is(os.Args[1:]) {
		os.Exit(Main(os.Args[1:], os.Stderr))
	}
	os.Exit(m.Run())
}

// world is this process, with memory that a pager gives it.
type world struct {
	dir     string
	mem     [][]byte
	regions []Region
	file    *os.File
	writer  *filling.Writer
	hangUp  func() // of the feed
	pager   *proc.Process
}

const pages = 512 // of the file, in two regions

// newWorld starts a pager. Of the file, the missing parts are not there yet.
func newWorld(t *testing.T, vm int, missing ...sparse.Extent) *world {
	t.Helper()
	dev, err := unix.Open("/dev/userfaultfd", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("/dev/userfaultfd: %v", err)
	}
	defer func() { _ = unix.Close(dev) }()
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(dev), 0xaa00, unix.O_CLOEXEC|unix.O_NONBLOCK)
	if errno != 0 {
		t.Fatal(errno)
	}
	faults := os.NewFile(fd, "userfaultfd")
	defer faults.Close()
	api := [3]uint64{0xaa, 1 << 3}
	if err := uffd(fd).ioctl(0xc018aa3f, unsafe.Pointer(&api)); err != nil {
		t.Fatal(err)
	}
	w := &world{dir: t.TempDir()}
	for n, size := range []int64{200 * sparse.Block, (pages - 200) * sparse.Block} {
		mem, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Munmap(mem) })
		register := [4]uint64{uint64(uintptr(unsafe.Pointer(&mem[0]))), uint64(size), 1}
		if err := uffd(fd).ioctl(0xc020aa00, unsafe.Pointer(&register)); err != nil {
			t.Fatal(err)
		}
		w.mem = append(w.mem, mem)
		w.regions = append(w.regions, Region{Base: register[0], Size: size, Offset: int64(n) * 200 * sparse.Block})
	}
	if w.file, err = os.Create(filepath.Join(w.dir, "memory")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.file.Close() })
	if err := w.file.Truncate(pages * sparse.Block); err != nil {
		t.Fatal(err)
	}
	w.writer = filling.NewWriter(pages*sparse.Block, missing)
	for n := range int64(pages) {
		if n%5 != 0 && !slices.ContainsFunc(missing, func(e sparse.Extent) bool { return e.Offset/sparse.Block <= n && n < e.End()/sparse.Block }) {
			w.write(t, n)
		}
	}
	l, err := net.Listen("unix", filepath.Join(w.dir, "feed"))
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = w.writer.Serve(t.Context(), l) }()
	conn, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	feed, err := conn.(*net.UnixConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer feed.Close()
	w.hangUp = func() { _ = conn.(*net.UnixConn).CloseRead() }
	t.Cleanup(func() { _ = conn.Close() })
	pidfd, err := unix.PidfdOpen(vm, 0)
	if err != nil {
		t.Fatal(err)
	}
	of := os.NewFile(uintptr(pidfd), "pidfd")
	defer of.Close()
	log, err := os.Create(filepath.Join(w.dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	w.pager, err = proc.Start(proc.Spec{Path: "/proc/self/exe", Args: append([]string{"pager"}, Args(w.regions)...), Err: log, Files: []*os.File{faults, w.file, feed, of}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.pager.Kill(t.Context()); _ = w.pager.Close() })
	return w
}

// content is page n of the file, if it is not zero.
func content(n int64) []byte { return bytes.Repeat([]byte(fmt.Sprintf("page %010d,", n)), 256) }

func (w *world) write(t *testing.T, n int64) {
	t.Helper()
	if _, err := w.file.WriteAt(content(n), n*sparse.Block); err != nil {
		t.Fatal(err)
	}
}

// page is page n of the file in our memory.
func (w *world) page(n int64) []byte {
	for i, r := range w.regions {
		if at := n*sparse.Block - r.Offset; at >= 0 && at < r.Size {
			return w.mem[i][at:][:sparse.Block]
		}
	}
	return nil
}

// read returns page n of our memory. The kernel waits for it, in a system call: a goroutine that waits otherwise would stop all others when garbage is collected.
func (w *world) read(n int64) []byte {
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		panic(err)
	}
	defer func() { _, _ = unix.Close(pipe[0]), unix.Close(pipe[1]) }()
	_, werr := unix.Write(pipe[1], w.page(n))
	got := make([]byte, sparse.Block)
	if k, err := unix.Read(pipe[0], got); err != nil || werr != nil || k < len(got) {
		panic(fmt.Sprint(k, err, werr))
	}
	return got
}

func (w *world) has(t *testing.T, n int64, want []byte) {
	t.Helper()
	if got := w.read(n); !bytes.Equal(got, want) {
		t.Errorf("page %d has %.20q, not %.20q", n, got, want)
	}
}

func (w *world) ends(t *testing.T, code int, word string) {
	t.Helper()
	e, err := w.pager.Wait(t.Context())
	text, lerr := os.ReadFile(filepath.Join(w.dir, "log"))
	last := strings.TrimSpace(string(text))
	if err != nil || lerr != nil || e.Code != code || !strings.Contains(last, word) {
		t.Errorf("it ends as %+v, %v, and says %q, %v; want %d and %q", e, err, last, lerr, code, word)
	}
}

func extent(page, n int64) sparse.Extent {
	return sparse.Extent{Offset: page * sparse.Block, Length: n * sparse.Block}
}

var zeros = make([]byte, sparse.Block)

func TestPager(t *testing.T) {
	w := newWorld(t, os.Getpid(), extent(100, 200), extent(500, 12))
	w.has(t, 1, content(1))
	w.has(t, 5, zeros) // a hole
	w.has(t, 499, content(499))

	// What is not there is waited for, and asked for.
	got := make(chan []byte)
	go func() { got <- w.read(222) }()
	<-w.writer.Wants()
	if at, ok := w.writer.Wanted(); !ok || at != 222*sparse.Block {
		t.Errorf("page %d is wanted, %v", at/sparse.Block, ok)
	}
	for n := range int64(100) {
		w.write(t, 200+n)
	}
	w.writer.Put(extent(200, 100))
	if p := <-got; !bytes.Equal(p, content(222)) {
		t.Errorf("page 222 has %.20q", p)
	}

	// What was given back is zero, whether it was there before or not.
	for _, n := range []int64{1, 150, 223, 501} {
		if err := unix.Madvise(w.page(n), unix.MADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
	}
	w.has(t, 1, zeros)
	w.has(t, 150, zeros)
	w.has(t, 222, content(222))
	w.page(222)[0] = '!' // it is ours

	for n := range int64(100) {
		w.write(t, 100+n)
	}
	w.writer.Put(extent(100, 100))
	select {
	case <-w.pager.Done():
		t.Error("the pager has ended, and pages are missing")
	default:
	}
	for n := range int64(12) {
		w.write(t, 500+n)
	}
	w.writer.Put(extent(500, 12))
	w.ends(t, 0, Whole)
	for n := range int64(pages) {
		switch {
		case n == 222:
			w.has(t, n, append([]byte{'!'}, content(n)[1:]...))
		case slices.Contains([]int64{1, 150, 223, 501}, n), n%5 == 0 && (n < 100 || n >= 300 && n < 500):
			w.has(t, n, zeros)
		default:
			w.has(t, n, content(n))
		}
	}
}

// TestGivenBackMeanwhile: a thread that gives pages back again and again neither stops the pager nor is stopped by it.
func TestGivenBackMeanwhile(t *testing.T) {
	w := newWorld(t, os.Getpid(), extent(0, pages))
	over := make(chan error)
	go func() {
		for {
			select {
			case over <- nil:
				return
			default:
			}
			if err := unix.Madvise(w.mem[0], unix.MADV_DONTNEED); err != nil {
				over <- err
				return
			}
		}
	}()
	for n := range int64(pages) {
		w.write(t, n)
		w.writer.Put(extent(n, 1))
	}
	w.ends(t, 0, Whole)
	if err := <-over; err != nil {
		t.Error(err)
	}
	w.has(t, pages-1, content(pages-1))
}

func TestFeedFails(t *testing.T) {
	w := newWorld(t, os.Getpid(), extent(3, 1))
	w.has(t, 1, content(1))
	w.writer.Fail(errors.New("a chunk has a wrong digest"))
	w.ends(t, 1, "a chunk has a wrong digest")
}

func TestFeedEnds(t *testing.T) {
	w := newWorld(t, os.Getpid(), extent(3, 1))
	w.has(t, 1, content(1))
	w.hangUp()
	w.ends(t, 1, "has ended before all of it was there")
}

func TestVMEnds(t *testing.T) {
	vm, err := proc.Start(proc.Spec{Path: "/bin/sleep", Args: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer vm.Close()
	w := newWorld(t, vm.PID(), extent(3, 1))
	w.has(t, 1, content(1))
	if err := vm.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.ends(t, 0, "")
}

func TestRegions(t *testing.T) {
	good := []Region{{8 << 20, 1 << 20, 0}, {4 << 20, 2 << 20, 1 << 20}}
	if err := CheckRegions(good, 3<<20); err != nil {
		t.Error(err)
	}
	for _, a := range Args(good)[1:] {
		if r, err := parseRegion(a); err != nil || !slices.Contains(good, r) {
			t.Errorf("%s: %+v, %v", a, r, err)
		}
	}
	for what, bad := range map[string][]Region{
		"none": nil, "short": good[:1], "order": {good[1], good[0]}, "over": {good[0], {8<<20 + 4096, 2 << 20, 1 << 20}}, "under": {good[0], {6<<20 + 4096, 2 << 20, 1 << 20}},
		"gap": {good[0], {4 << 20, 2<<20 - 4096, 1<<20 + 4096}}, "part of a page": {{1 << 20, 3<<20 - 1, 0}, {8 << 20, 1, 3<<20 - 1}}, "high": {{1<<63 - 4096, 3 << 20, 0}},
	} {
		if err := CheckRegions(bad, 3<<20); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
