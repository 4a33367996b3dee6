package seccomp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Filter is a filter of system calls, as instructions for the kernel.
type Filter []bpf.RawInstruction

// Load filters the system calls of this thread and of the processes that it starts from now on, for good, by default. capabilities are
// those that the processes can have. Preconditions: as for Filter.Load.
func Load(capabilities []string) error {
	f, err := Default(capabilities)
	if err != nil {
		return err
	}
	return f.Load()
}

// Default returns the filter for processes without a profile that can have these capabilities.
func Default(capabilities []string) (Filter, error) { return program(capabilities) }

// Load filters the system calls of this thread and of the processes that it starts from now on, for good. Preconditions: the thread is
// locked and has CAP_SYS_ADMIN, or no_new_privs is set.
func (f Filter) Load() error {
	code := make([]unix.SockFilter, len(f))
	for i, r := range f {
		code[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	prog := unix.SockFprog{Len: uint16(len(code)), Filter: unsafe.SliceData(code)}
	_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(code)
	if errno != 0 {
		return fmt.Errorf("filter system calls: %w", errno)
	}
	return nil
}

// MarshalBinary returns f as bytes.
func (f Filter) MarshalBinary() (out []byte, _ error) {
	for _, r := range f {
		out = binary.LittleEndian.AppendUint16(out, r.Op)
		out = append(out, r.Jt, r.Jf)
		out = binary.LittleEndian.AppendUint32(out, r.K)
	}
	return out, nil
}

// UnmarshalBinary sets f to what MarshalBinary has returned.
func (f *Filter) UnmarshalBinary(b []byte) error {
	const size = 8
	if len(b)%size != 0 {
		return errors.New("the filter of system calls has half an instruction")
	}
	*f = nil
	for ; len(b) > 0; b = b[size:] {
		*f = append(*f, bpf.RawInstruction{Op: binary.LittleEndian.Uint16(b), Jt: b[2], Jf: b[3], K: binary.LittleEndian.Uint32(b[4:])})
	}
	return nil
}
