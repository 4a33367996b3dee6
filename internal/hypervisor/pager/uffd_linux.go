package pager

import (
	"encoding/binary"
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// uffd is a userfaultfd of another process (linux/userfaultfd.h).
type uffd int

const (
	uffdWake       = 0x8010aa02
	uffdUnregister = 0x8010aa01
	uffdCopy       = 0xc028aa03
	uffdZero       = 0xc020aa04

	eventFault  = 0x12
	eventRemove = 0x15
	messageSize = 32
)

// span is a range of addresses of the other process.
type span struct{ start, length uint64 }

// event is a message of a userfaultfd: the span that the process has given back, or the page for which it waits (then length is 0).
type event struct {
	span
	removed bool
}

// maxMessages is how many messages are read at once.
const maxMessages = 64

// read returns the messages that wait; none if there are none.
func (u uffd) read(buf []byte) ([]event, error) {
	n, err := unix.Read(int(u), buf)
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
		return nil, nil
	case err != nil:
		return nil, err
	}
	var out []event
	for m := buf[:n]; len(m) >= messageSize; m = m[messageSize:] {
		switch m[0] {
		case eventFault:
			out = append(out, event{span: span{start: binary.NativeEndian.Uint64(m[16:])}})
		case eventRemove:
			start, end := binary.NativeEndian.Uint64(m[8:]), binary.NativeEndian.Uint64(m[16:])
			out = append(out, event{span: span{start, end - start}, removed: true})
		}
	}
	return out, nil
}

func (u uffd) ioctl(request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(u), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// copy gives the process the pages of data at start, and lets go on what waits for them. It returns how many bytes it has given before it failed.
func (u uffd) copy(start uint64, data []byte) (int64, error) {
	arg := struct {
		dst, src, length, mode uint64
		done                   int64
	}{dst: start, src: uint64(uintptr(unsafe.Pointer(&data[0]))), length: uint64(len(data))}
	err := u.ioctl(uffdCopy, unsafe.Pointer(&arg))
	return max(arg.done, 0), err
}

// zero gives the process pages of zeros.
func (u uffd) zero(s span) (int64, error) {
	arg := struct {
		span
		mode uint64
		done int64
	}{span: s}
	err := u.ioctl(uffdZero, unsafe.Pointer(&arg))
	return max(arg.done, 0), err
}

// wake lets go on what waits for pages that are there.
func (u uffd) wake(s span) error { return u.ioctl(uffdWake, unsafe.Pointer(&s)) }

// unregister makes the span ordinary memory, in which what is not there is zero.
func (u uffd) unregister(s span) error { return u.ioctl(uffdUnregister, unsafe.Pointer(&s)) }
