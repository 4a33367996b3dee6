package proc

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// tapUser is the user of a process that holds a tap.
const tapUser = 0x71234568

// takeAddress is what the test binary does as a process that holds a tap as descriptor 3: it prints what becomes of each request.
func takeAddress() {
	const fd = firstFile
	req, err := unix.NewIfreq("")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("get:", unix.IoctlIfreq(fd, unix.SIOCGIFHWADDR, req))
	raw := (*[unsafe.Sizeof(*req)]byte)(unsafe.Pointer(req))
	raw[unix.IFNAMSIZ+2+5]++
	fmt.Println("set:", unix.IoctlIfreq(fd, unix.SIOCSIFHWADDR, req))
	_, _, errno := syscall.RawSyscall(unix.SYS_IOCTL, fd, 1<<32|unix.SIOCSIFHWADDR, uintptr(unsafe.Pointer(req)))
	fmt.Println("set by a long number:", errno)
	_, _, errno = syscall.RawSyscall(x32|514, fd, unix.SIOCSIFHWADDR, uintptr(unsafe.Pointer(req)))
	fmt.Println("set by x32:", errno)
}

// firstFile is the descriptor of the first file of a Spec.
const firstFile = 3

// makeTap returns a new tap in a network namespace of its own. Nothing of it is left when nobody has it open.
func makeTap(t *testing.T) *os.File {
	t.Helper()
	need.Tun(t)
	var tap *os.File
	err := OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		tap = os.NewFile(uintptr(fd), "tap")
		req, err := unix.NewIfreq("tap0")
		if err != nil {
			return err
		}
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		return unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	})
	if tap != nil {
		t.Cleanup(func() { tap.Close() })
	}
	if err != nil {
		t.Fatal(err)
	}
	return tap
}

// address returns the hardware address of a tap.
func address(t *testing.T, tap *os.File) string {
	t.Helper()
	req, err := unix.NewIfreq("")
	if err == nil {
		err = unix.IoctlIfreq(int(tap.Fd()), unix.SIOCGIFHWADDR, req)
	}
	if err != nil {
		t.Fatal(err)
	}
	raw := (*[unsafe.Sizeof(*req)]byte)(unsafe.Pointer(req))
	return fmt.Sprintf("%x", raw[unix.IFNAMSIZ+2:unix.IFNAMSIZ+8])
}

// TestTapKeepsItsAddress: a process as a hypervisor is started, and as a server that a hypervisor talks to, reads the address of a tap that it holds
// and cannot set it. Linux itself would let it.
func TestTapKeepsItsAddress(t *testing.T) {
	tap := makeTap(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const want = "get: <nil>\nset: operation not permitted\nset by a long number: operation not permitted\nset by x32: operation not permitted\n"
	for name, s := range map[string]Spec{
		"user":   {Path: self, User: &User{UID: tapUser, GID: tapUser}, Isolated: true, Root: &Root{}},
		"mapped": {Path: "/proc/self/exe", Mapped: &testIDs, Isolated: true},
	} {
		t.Run(name, func(t *testing.T) {
			before := address(t, tap)
			out, err := os.Create(filepath.Join(t.TempDir(), "out"))
			if err != nil {
				t.Fatal(err)
			}
			defer out.Close()
			s.Args, s.Env, s.Files, s.Out = []string{"take-address"}, []string{"PROC_TEST_TAP=1"}, []*os.File{tap}, out
			exit, err := start(t, s).Wait(t.Context())
			said, rerr := os.ReadFile(out.Name())
			if err := errors.Join(err, rerr); err != nil || exit != (Exit{}) || string(said) != want {
				t.Errorf("%+v, %v: it said\n%swant\n%s", exit, err, said, want)
			}
			if after := address(t, tap); after != before {
				t.Errorf("the tap has the address %s, before %s", after, before)
			}
		})
	}
}

// TestForeignCalls: a system call of i386 in a program of amd64 fails. The filter knows only the numbers of amd64.
func TestForeignCalls(t *testing.T) {
	need.Root(t)
	const refused, done = 9, 7
	s := Spec{Path: programOf(t, foreignCaller), Args: []string{"program"}}
	if exit, err := start(t, s).Wait(t.Context()); err != nil || exit != (Exit{Code: done}) {
		need.Missing(t, fmt.Sprintf("a kernel that runs system calls of i386 is needed: %+v, %v", exit, err))
	}
	s.User, s.Isolated, s.Root = &User{UID: tapUser, GID: tapUser}, true, &Root{}
	if exit, err := start(t, s).Wait(t.Context()); err != nil || exit != (Exit{Code: refused}) {
		t.Errorf("it ended with %+v, %v; want %d, after its system call has failed", exit, err, refused)
	}
}

// foreignCaller asks the kernel to end it: with the code 7 by a system call of i386, and if that fails, with the code 9 by one of amd64.
var foreignCaller = []byte{
	0xbb, 7, 0, 0, 0, // mov ebx, 7
	0xb8, 1, 0, 0, 0, // mov eax, 1: exit of i386
	0xcd, 0x80, // int 0x80
	0xbf, 9, 0, 0, 0, // mov edi, 9
	0xb8, 60, 0, 0, 0, // mov eax, 60: exit of amd64
	0x0f, 0x05, // syscall
}

// programOf makes a program that consists of this code of amd64, and returns its path. Its file is in its memory at codeAt.
func programOf(t *testing.T, code []byte) string {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("this code is machine code of amd64, and this machine has another CPU")
	}
	head := elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT), Phnum: 1,
	}
	part := elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X), Vaddr: codeAt, Align: 4096}
	head.Ehsize, head.Phentsize = uint16(binary.Size(head)), uint16(binary.Size(part))
	head.Phoff = uint64(head.Ehsize)
	size := uint64(head.Ehsize) + uint64(head.Phentsize)
	head.Entry, part.Filesz, part.Memsz = codeAt+size, size+uint64(len(code)), size+uint64(len(code))
	var out bytes.Buffer
	for _, x := range []any{head, part, code} {
		if err := binary.Write(&out, binary.LittleEndian, x); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, out.Bytes(), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

const codeAt = 0x400000
