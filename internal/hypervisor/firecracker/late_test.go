package firecracker

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

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
	faults := func() int {
		dev, err := unix.Open(faultsDevice, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Skipf("%s: %v", faultsDevice, err)
		}
		defer func() { _ = unix.Close(dev) }()
		fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(dev), 0xaa00, unix.O_CLOEXEC)
		if errno != 0 {
			t.Fatal(errno)
		}
		t.Cleanup(func() { _ = unix.Close(int(fd)) })
		return int(fd)
	}()
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
		if after := open(t); after != before {
			t.Errorf("%+v: %d descriptors are open, and %d were", c, after, before)
		}
	}
}

// TestStateOfWaiting: a process that waits for memory, and so does not answer, runs. It keeps nobody waiting.
func TestStateOfWaiting(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	t.Chdir(dir)
	if err := os.Mkdir(privateDir, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(privateDir, apiSocket))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d, err := New(Config{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	p, err := proc.Start(proc.Spec{Path: "/bin/sleep", Args: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Kill(t.Context()) }()
	i := newInstance(d, handle{Handle: jail.Handle{ID: "x", Dir: dir}}, nil, p)
	i.late.Store(true)
	if s, err := i.State(t.Context()); err != nil || s != hypervisor.Running {
		t.Errorf("%s, %v", s, err)
	}
	i.late.Store(false)
	brief, cancel := context.WithCancel(t.Context())
	cancel()
	if s, err := i.State(brief); err == nil {
		t.Errorf("%s", s)
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
