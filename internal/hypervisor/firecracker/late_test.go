package firecracker

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/pager"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

const (
	memory  = 4 << 30
	regions = `[{"base_host_virt_addr":139999993528320,"size":3221225472,"offset":0,"page_size":4096,"page_size_kib":4096},` +
		`{"base_host_virt_addr":139990003294208,"size":1073741824,"offset":3221225472,"page_size":4096,"page_size_kib":4096}]`
)

func TestParseRegions(t *testing.T) {
	all, err := parseRegions([]byte(regions), memory)
	if err != nil || len(all) != 2 || all[1] != (pager.Region{Base: 139990003294208, Size: 1 << 30, Offset: 3 << 30}) {
		t.Errorf("%+v, %v", all, err)
	}
	for what, bad := range map[string]string{"none": "[]", "text": "hello", "another size": strings.ReplaceAll(regions, "1073741824", "1073745920"), "many": "[" + strings.Repeat(`{"size":4096},`, maxRegions) + "{}]"} {
		if got, err := parseRegions([]byte(bad), memory); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %+v, %v", what, got, err)
		}
	}
}

// FuzzRegions: whatever a process that its guest may have taken over says of its memory, it is refused, or each byte of the file has one place.
func FuzzRegions(f *testing.F) {
	f.Add([]byte(regions), int64(memory))
	f.Add([]byte(`[{"base_host_virt_addr":4096,"size":4096,"offset":0}]`), int64(4096))
	f.Add([]byte(`[{"base_host_virt_addr":-1,"size":1e3,"offset":null}]`), int64(0))
	f.Fuzz(func(t *testing.T, text []byte, size int64) {
		all, err := parseRegions(text, size)
		if err != nil {
			return
		}
		if len(all) > maxRegions {
			t.Fatalf("%d regions", len(all))
		}
		at := int64(0)
		for _, r := range all {
			if r.Offset != at || r.Size <= 0 || r.Base+uint64(r.Size) < r.Base {
				t.Fatalf("%+v", all)
			}
			at += r.Size
		}
		if at != size || !pager.Is(pager.Args(all)) && size > 0 {
			t.Fatalf("%d of %d bytes", at, size)
		}
	})
}

// TestReceive: only a userfaultfd is taken, and no descriptor is left open.
func TestReceive(t *testing.T) {
	const one = `[{"base_host_virt_addr":4096,"size":8192,"offset":0}]`
	faults := userfaultfd(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, c := range []struct {
		text string
		fds  []int
		want string // of the error
	}{
		{one, []int{faults}, ""},
		{one, nil, "0 descriptors"},
		{one, []int{faults, faults}, "2 descriptors"},
		{one, []int{int(null.Fd())}, `but "/dev/null"`},
		{"[]", []int{faults}, "0 bytes"},
	} {
		before := open(t)
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(pair[0]), "socket")
		conn, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		if err := unix.Sendmsg(pair[1], []byte(c.text), unix.UnixRights(c.fds...), nil, 0); err != nil {
			t.Fatal(err)
		}
		got, file, err := receive(conn.(*net.UnixConn), 8192)
		switch {
		case c.want == "" && (err != nil || len(got) != 1):
			t.Errorf("%+v, %v", got, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%+v: %v", c, err)
		}
		jail.CloseAll([]*os.File{file})
		_ = conn.Close()
		_ = unix.Close(pair[1])
		if after := open(t); after > before {
			t.Errorf("%+v: %d descriptors are open, and %d were", c, after, before)
		}
	}
}

// TestLastWord: a pager can say its last word however full the disk of its log has become. While it says nothing, nothing is taken for its word. If the disk is full before,
// no pager starts.
func TestLastWord(t *testing.T) {
	need.Root(t)
	faults := userfaultfd(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	other := filepath.Join(dir, "other")
	fill := func() {
		if err := os.WriteFile(other, make([]byte, 2<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
	fill()
	if l, i := launchOf(t, dir, faults); !errors.Is(l.startPager(t.Context(), i), unix.ENOSPC) || i.pager != nil {
		t.Error("a pager has started whose log has no room")
	}
	if err := os.Remove(other); err != nil {
		t.Fatal(err)
	}
	l, i := launchOf(t, dir, faults)
	if err := l.startPager(t.Context(), i); err != nil {
		t.Fatal(err)
	}
	defer i.pager.release()
	fill()
	if word := i.h.lastWord(); !strings.Contains(word, "was killed") {
		t.Errorf("it has said nothing, and its last word is %q", word)
	}
	if err := i.Proc.Kill(t.Context()); err != nil { // then nobody needs the pager
		t.Fatal(err)
	}
	<-i.pager.over()
	if err := i.lost(); err != nil {
		t.Error(err)
	}
}

// userfaultfd returns the descriptor of one that can be waited for.
func userfaultfd(t *testing.T) int {
	t.Helper()
	dev, err := unix.Open(faultsDevice, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("%s: %v", faultsDevice, err)
	}
	defer func() { _ = unix.Close(dev) }()
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(dev), 0xaa00, unix.O_CLOEXEC|unix.O_NONBLOCK)
	if errno != 0 {
		t.Fatal(errno)
	}
	t.Cleanup(func() { _ = unix.Close(int(fd)) })
	api := [3]uint64{0xaa, 1 << 3}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, 0xc018aa3f, uintptr(unsafe.Pointer(&api))); errno != 0 {
		t.Fatal(errno)
	}
	return int(fd)
}

// launchOf returns a launch in dir. Its process has reported one page of memory, and nobody delivers that page.
func launchOf(t *testing.T, dir string, faults int) (*launch, *instance) {
	t.Helper()
	d, err := New(Config{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l := &launch{Rooted: jail.Rooted{Launch: jail.Launch{Jail: d.jail, Plan: hypervisor.Plan{ID: "x", Memory: 4096}}}, d: d}
	if l.Proc, err = proc.Start(proc.Spec{Path: "/bin/sleep", Args: []string{"sleep", "1000"}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Proc.Kill(context.WithoutCancel(t.Context())) })
	if l.Dir, err = jail.OpenDir(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Dir.Close() })
	path := filepath.Join(t.TempDir(), "socket")
	if l.late.listener, err = net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path}); err != nil {
		t.Fatal(err)
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if _, _, err := conn.WriteMsgUnix([]byte(`[{"base_host_virt_addr":4096,"size":4096,"offset":0}]`), unix.UnixRights(faults), nil); err != nil {
		t.Fatal(err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(pair[1]) })
	l.late.feed = os.NewFile(uintptr(pair[0]), "feed")
	if l.late.memory, err = os.CreateTemp(t.TempDir(), "memory"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.late.close)
	return l, newInstance(d, handle{Handle: jail.Handle{ID: "x", Dir: dir}}, nil, l.Proc)
}

// answered returns an instance whose API the test answers. Its folder is the working directory of the test.
func answered(t *testing.T) (*instance, net.Listener) {
	t.Helper()
	need.Root(t)
	dir := t.TempDir()
	t.Chdir(dir)
	private, err := jail.NewPrivate(0)
	if err != nil {
		t.Fatal(err)
	}
	defer private.Close()
	api, err := net.Listen("unix", fmt.Sprintf("/proc/self/fd/%d/%s", private.Fd(), apiSocket))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = api.Close() })
	d, err := New(Config{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	p, err := proc.Start(proc.Spec{
		Path: "/bin/sleep", Args: []string{"sleep", "1000"}, Isolated: true, User: &proc.User{UID: 1, GID: 1},
		Root: &proc.Root{Files: []proc.RootFile{{At: rootPrivate, File: private, Scratch: true}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Kill(context.Background()) })
	return newInstance(d, handle{Handle: jail.Handle{ID: "x", Dir: dir}}, nil, p), api
}

// TestStateOfWaiting: a process that waits for memory, and so does not answer, runs. It keeps nobody waiting.
func TestStateOfWaiting(t *testing.T) {
	i, _ := answered(t)
	i.whole = make(chan struct{})
	if s, err := i.State(t.Context()); err != nil || s != hypervisor.Running {
		t.Errorf("%s, %v", s, err)
	}
	close(i.whole)
	brief, cancel := context.WithCancel(t.Context())
	cancel()
	if s, err := i.State(brief); err == nil {
		t.Errorf("%s", s)
	}
}

// TestNoPager: a launch fails whose pager does not start, also after the process has let the guest run.
func TestNoPager(t *testing.T) {
	i, api := answered(t)
	says, err := net.Listen("unix", "memory.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer says.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { // it never says where its memory is
		for {
			conn, err := api.Accept()
			if err != nil {
				return
			}
			r, err := http.ReadRequest(bufio.NewReader(conn))
			_, _ = conn.Write([]byte("HTTP/1.1 204 No Content\r\n\r\n"))
			_, _ = io.Copy(io.Discard, conn) // until the answer was heard
			_ = conn.Close()
			if err == nil && r.Method == http.MethodPatch { // the last one: the guest runs
				cancel()
			}
		}
	}()
	l := &launch{d: i.d, late: late{listener: says.(*net.UnixListener)}}
	l.Plan.Incoming, l.Proc = &hypervisor.Incoming{}, i.Proc
	if err := l.attended(ctx, i); !errdefs.IsUnavailable(err) {
		t.Errorf("the launch: %v", err)
	}
}

func open(t *testing.T) int {
	t.Helper()
	all, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}
