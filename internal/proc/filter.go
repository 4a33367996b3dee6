package proc

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// archs are the architectures that the filter supports, by the numbers that the kernel gives them. All are little-endian: the lower half of an argument comes first.
var archs = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// Offsets in seccomp_data: the number of the system call, its architecture, and the lower half of its second argument.
const (
	callNumber = 0
	callArch   = 4
	callSecond = 24
)

// x32 is the least number of the system calls of x32, which the kernel takes for calls of amd64.
const x32 = 0x40000000

// keepAddress makes this thread, and the processes that it starts from now on, unable to set the hardware address of an interface. Linux lets whoever
// holds a tap do that, without a capability; a tap with the address of another VM would get the packets that the host sends to that VM. System
// calls of another architecture than the native one fail, too: the same request has another number there.
// Preconditions: the thread is locked, and no_new_privs is set.
func keepAddress() error {
	arch, ok := archs[runtime.GOARCH]
	if !ok {
		return errdefs.Unsupportedf("the system calls of a process cannot be filtered on %s", runtime.GOARCH)
	}
	const load, equal, atLeast, give = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	filter := [...]unix.SockFilter{ // Jt and Jf are numbers of instructions that are left out
		{Code: load, K: callArch},
		{Code: equal, K: arch, Jf: 5},
		{Code: load, K: callNumber},
		{Code: atLeast, K: x32, Jt: 3},
		{Code: equal, K: unix.SYS_IOCTL, Jf: 3},
		{Code: load, K: callSecond}, // the kernel reads no more of a request than this half
		{Code: equal, K: unix.SIOCSIFHWADDR, Jf: 1},
		{Code: give, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: give, K: unix.SECCOMP_RET_ALLOW},
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	// Without SPEC_ALLOW, Linux before 5.16 slows the process down.
	_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(&filter)
	if errno != 0 {
		return fmt.Errorf("filter system calls: %w", errno)
	}
	return nil
}
