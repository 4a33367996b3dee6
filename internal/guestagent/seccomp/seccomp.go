// Package seccomp filters the system calls of a process: by a profile, or as the default profile of container runtimes does. By default,
// calls that change the kernel or look into it fail with EPERM, unless a capability of the process allows them.
//
// The default is a list of calls that fail; containerd's and Docker's profiles are lists of calls that work. So a call that is newer than
// this list works. The boundary of a guest is its VM; the filter protects the containers of a pod from each other.
package seccomp

import (
	"fmt"
	"slices"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// none marks a call that an architecture does not have.
const none = -1

// call is one system call: its numbers for 64-bit and for 32-bit programs.
type call struct{ amd64, i386 int }

// group are calls that fail unless the process has one of these capabilities.
type group struct {
	unless []string
	calls  []call
}

// groups follow the table "Significant syscalls blocked by the default profile" of Docker's documentation, and containerd's profile
// for newer calls. The numbers for 32-bit programs are those of the kernel's syscall_32.tbl.
var groups = []group{
	{nil, []call{
		{unix.SYS_ADD_KEY, 286},
		{unix.SYS_REQUEST_KEY, 287},
		{unix.SYS_KEYCTL, 288}, // keys have no namespaces
		{unix.SYS_USERFAULTFD, 374},
		{unix.SYS_IO_URING_SETUP, 425},
		{unix.SYS_IO_URING_ENTER, 426},
		{unix.SYS_IO_URING_REGISTER, 427},
		{unix.SYS_USELIB, 86},
		{unix.SYS_USTAT, 62},
		{unix.SYS_SYSFS, 135},
		{unix.SYS__SYSCTL, 149},
		{unix.SYS_NFSSERVCTL, 169},
		{unix.SYS_CREATE_MODULE, 127},
		{unix.SYS_GET_KERNEL_SYMS, 130},
		{unix.SYS_QUERY_MODULE, 167},
		{none, 166}, // vm86
		{none, 113}, // vm86old
	}},
	{[]string{"SYS_ADMIN"}, []call{
		{unix.SYS_MOUNT, 21},
		{unix.SYS_UMOUNT2, 52},
		{none, 22}, // umount
		{unix.SYS_FSOPEN, 430},
		{unix.SYS_FSCONFIG, 431},
		{unix.SYS_FSMOUNT, 432},
		{unix.SYS_FSPICK, 433},
		{unix.SYS_OPEN_TREE, 428},
		{unix.SYS_MOVE_MOUNT, 429},
		{unix.SYS_MOUNT_SETATTR, 442},
		{unix.SYS_SETNS, 346},
		{unix.SYS_SETHOSTNAME, 74},
		{unix.SYS_SETDOMAINNAME, 121},
		{unix.SYS_FANOTIFY_INIT, 338},
		{unix.SYS_LOOKUP_DCOOKIE, 253},
		{unix.SYS_QUOTACTL, 131},
		{unix.SYS_QUOTACTL_FD, 443},
		{unix.SYS_SWAPON, 87},
		{unix.SYS_SWAPOFF, 115},
	}},
	{[]string{"SYS_ADMIN", "BPF"}, []call{{unix.SYS_BPF, 357}}},
	{[]string{"SYS_ADMIN", "PERFMON"}, []call{{unix.SYS_PERF_EVENT_OPEN, 336}}},
	{[]string{"SYS_ADMIN", "SYSLOG"}, []call{{unix.SYS_SYSLOG, 103}}},
	{[]string{"SYS_BOOT"}, []call{{unix.SYS_REBOOT, 88}, {unix.SYS_KEXEC_LOAD, 283}, {unix.SYS_KEXEC_FILE_LOAD, none}}},
	{[]string{"SYS_MODULE"}, []call{{unix.SYS_INIT_MODULE, 128}, {unix.SYS_FINIT_MODULE, 350}, {unix.SYS_DELETE_MODULE, 129}}},
	{[]string{"SYS_PACCT"}, []call{{unix.SYS_ACCT, 51}}},
	{[]string{"SYS_PTRACE"}, []call{{unix.SYS_KCMP, 349}}},
	{[]string{"SYS_RAWIO"}, []call{{unix.SYS_IOPERM, 101}, {unix.SYS_IOPL, 110}}},
	{[]string{"SYS_TIME"}, []call{{unix.SYS_SETTIMEOFDAY, 79}, {unix.SYS_CLOCK_SETTIME, 264}, {none, 25}, {none, 404}}}, // stime, clock_settime64
	{[]string{"SYS_TTY_CONFIG"}, []call{{unix.SYS_VHANGUP, 111}}},
	{[]string{"SYS_CHROOT"}, []call{{unix.SYS_CHROOT, 61}}},
	{[]string{"DAC_READ_SEARCH"}, []call{{unix.SYS_OPEN_BY_HANDLE_AT, 342}}},
	{[]string{"SYS_NICE"}, []call{
		{unix.SYS_MBIND, 274},
		{unix.SYS_GET_MEMPOLICY, 275},
		{unix.SYS_SET_MEMPOLICY, 276},
		{unix.SYS_SET_MEMPOLICY_HOME_NODE, 450},
		{unix.SYS_MOVE_PAGES, 317},
		{unix.SYS_MIGRATE_PAGES, 294},
	}},
}

// flagged are calls whose first argument has flags. With one of these they fail, unless the process has SYS_ADMIN.
//
// clone3 can do the same as clone and has its arguments in memory, which no filter can see. It stays, because the agent starts
// processes with it. unshare of the control groups stays too, because the agent does it for each process before it becomes the
// program; the kernel asks for SYS_ADMIN by itself.
var flagged = []struct {
	call
	flags uint32
}{
	{call{unix.SYS_CLONE, 120}, namespaces},
	{call{unix.SYS_UNSHARE, 310}, namespaces &^ unix.CLONE_NEWCGROUP},
}

// namespaces are the flags that make namespaces.
const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID |
	unix.CLONE_NEWNET | unix.CLONE_NEWCGROUP

// Offsets in struct seccomp_data, and its architectures.
const (
	atNumber = 0
	atArch   = 4
	atArg0   = 16 // the lower half, on a little-endian machine

	archAMD64 = unix.AUDIT_ARCH_X86_64
	archI386  = unix.AUDIT_ARCH_I386
	x32       = 0x40000000 // bit of the numbers of a third kind of programs
)

// Results of a filter.
const (
	allowed = unix.SECCOMP_RET_ALLOW
	denied  = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	unknown = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
)

// program returns the filter for a process with these capabilities, named as in Linux without CAP_.
func program(capabilities []string) ([]bpf.RawInstruction, error) {
	has := func(names ...string) bool {
		return slices.ContainsFunc(names, func(n string) bool { return slices.Contains(capabilities, n) })
	}
	section := func(number func(call) int) (out []bpf.Instruction) {
		out = append(out, bpf.LoadAbsolute{Off: atNumber, Size: 4})
		for _, g := range groups {
			for _, c := range g.calls {
				if n := number(c); n != none && !has(g.unless...) {
					out = append(out, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(n), SkipTrue: 1}, bpf.RetConstant{Val: denied})
				}
			}
		}
		for _, f := range flagged {
			if has("SYS_ADMIN") {
				break
			}
			out = append(out,
				bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(number(f.call)), SkipTrue: 4},
				bpf.LoadAbsolute{Off: atArg0, Size: 4},
				bpf.JumpIf{Cond: bpf.JumpBitsNotSet, Val: f.flags, SkipTrue: 1},
				bpf.RetConstant{Val: denied},
				bpf.RetConstant{Val: allowed},
			)
		}
		return append(out, bpf.RetConstant{Val: allowed})
	}
	of64 := section(func(c call) int { return c.amd64 })
	of32 := section(func(c call) int { return c.i386 })
	all := []bpf.Instruction{
		bpf.LoadAbsolute{Off: atArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: archAMD64, SkipTrue: 3},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: archI386, SkipTrue: 1},
		bpf.RetConstant{Val: unknown},
		bpf.Jump{Skip: uint32(len(of64) + 3)},
		bpf.LoadAbsolute{Off: atNumber, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpLessThan, Val: x32, SkipTrue: 1},
		bpf.RetConstant{Val: unknown},
	}
	raw, err := bpf.Assemble(slices.Concat(all, of64, of32))
	if err != nil {
		return nil, fmt.Errorf("assemble the filter of system calls: %w", err)
	}
	return raw, nil
}
