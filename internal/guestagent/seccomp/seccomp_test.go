package seccomp

import (
	"encoding/binary"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// answer runs the filter as the kernel does. The machine of package bpf reads big-endian words, so the data is written that way.
func answer(t *testing.T, capabilities []string, arch, number, arg0 uint32) uint32 {
	t.Helper()
	raw, err := program(capabilities)
	if err != nil {
		t.Fatal(err)
	}
	code, ok := bpf.Disassemble(raw)
	if !ok {
		t.Fatal("the filter has an unknown instruction")
	}
	vm, err := bpf.NewVM(code)
	if err != nil {
		t.Fatal(err)
	}
	data := make([]byte, 64)
	binary.BigEndian.PutUint32(data[atNumber:], number)
	binary.BigEndian.PutUint32(data[atArch:], arch)
	binary.BigEndian.PutUint32(data[atArg0:], arg0)
	got, err := vm.Run(data)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(got)
}

func TestFilter(t *testing.T) {
	admin := []string{"SYS_ADMIN"}
	for name, tc := range map[string]struct {
		capabilities       []string
		arch, number, arg0 uint32
		want               uint32
	}{
		"read":                       {nil, archAMD64, unix.SYS_READ, 0, allowed},
		"32-bit read":                {nil, archI386, 3, 0, allowed},
		"execve":                     {nil, archAMD64, unix.SYS_EXECVE, 0, allowed},
		"a call that nobody knows":   {nil, archAMD64, 9999, 0, allowed},
		"keyctl, whatever it has":    {admin, archAMD64, unix.SYS_KEYCTL, 0, denied},
		"32-bit keyctl":              {admin, archI386, 288, 0, denied},
		"mount":                      {nil, archAMD64, unix.SYS_MOUNT, 0, denied},
		"32-bit mount":               {nil, archI386, 21, 0, denied},
		"mount by an administrator":  {admin, archAMD64, unix.SYS_MOUNT, 0, allowed},
		"32-bit mount, likewise":     {admin, archI386, 21, 0, allowed},
		"access has mount's number":  {nil, archAMD64, 21, 0, allowed},
		"bpf by either capability":   {[]string{"BPF"}, archAMD64, unix.SYS_BPF, 0, allowed},
		"chroot":                     {nil, archAMD64, unix.SYS_CHROOT, 0, denied},
		"chroot with its capability": {[]string{"SYS_CHROOT"}, archAMD64, unix.SYS_CHROOT, 0, allowed},
		"the last call of the list":  {nil, archAMD64, unix.SYS_MIGRATE_PAGES, 0, denied},
		"fork":                       {nil, archAMD64, unix.SYS_CLONE, uint32(unix.SIGCHLD), allowed},
		"thread":                     {nil, archAMD64, unix.SYS_CLONE, unix.CLONE_VM | unix.CLONE_THREAD, allowed},
		"user namespace":             {nil, archAMD64, unix.SYS_CLONE, unix.CLONE_NEWUSER | uint32(unix.SIGCHLD), denied},
		"32-bit user namespace":      {nil, archI386, 120, unix.CLONE_NEWUSER, denied},
		"namespace of administrator": {admin, archAMD64, unix.SYS_CLONE, unix.CLONE_NEWNET, allowed},
		"unshare of users":           {nil, archAMD64, unix.SYS_UNSHARE, unix.CLONE_NEWUSER, denied},
		"32-bit unshare of users":    {nil, archI386, 310, unix.CLONE_NEWUSER, denied},
		"unshare of control groups":  {nil, archAMD64, unix.SYS_UNSHARE, unix.CLONE_NEWCGROUP, allowed},
		"unshare of both":            {nil, archAMD64, unix.SYS_UNSHARE, unix.CLONE_NEWCGROUP | unix.CLONE_NEWUSER, denied},
		"unshare by administrator":   {admin, archAMD64, unix.SYS_UNSHARE, unix.CLONE_NEWNET, allowed},
		"x32":                        {nil, archAMD64, x32 | unix.SYS_READ, 0, unknown},
		"another machine":            {nil, unix.AUDIT_ARCH_AARCH64, 63, 0, unknown},
	} {
		t.Run(name, func(t *testing.T) {
			if got := answer(t, tc.capabilities, tc.arch, tc.number, tc.arg0); got != tc.want {
				t.Errorf("the filter answers %#x, want %#x", got, tc.want)
			}
		})
	}
}
