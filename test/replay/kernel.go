//go:build replay

// Package replay proves that no power cut takes an appliance's boot away: it records each write that an update, a trial, a confirmation and a
// rollback make to the boot partition, cuts after each of them and inside each, and starts what is left.
package replay

import (
	"encoding/binary"
)

// standIn returns a kernel that GRUB starts as Linux and that writes three lines to the serial port: its own name, the content of its initramfs, its
// command line. Then it resets the machine. Its code, in 32 bits, runs wherever it is:
//
//	     call next                    puts: lodsb
//	next: pop ebx                           test al, al
//	     mov ebp, esi                       jz 2f
//	     cld                                call putc
//	     lea esi, [ebx + text - next]       jmp puts
//	     call puts                    2:    mov al, 10
//	     mov esi, [ebp + 0x218]       putc: mov ah, al
//	     call puts                          mov dx, 0x3fd
//	     mov esi, [ebp + 0x228]       1:    in al, dx
//	     call puts                          test al, 0x20
//	     mov dx, 0xcf9                      jz 1b
//	     mov al, 0x0e                       mov dx, 0x3f8
//	     out dx, al                         mov al, ah
//	stop: hlt                               out dx, al
//	     jmp stop                           ret
//	                                  text:
func standIn(name string) []byte {
	code := []byte{
		0xe8, 0x00, 0x00, 0x00, 0x00, 0x5b, 0x89, 0xf5, 0xfc, 0x8d, 0xb3, 0x50, 0x00, 0x00, 0x00, 0xe8, 0x20, 0x00, 0x00, 0x00, 0x8b, 0xb5, 0x18, 0x02,
		0x00, 0x00, 0xe8, 0x15, 0x00, 0x00, 0x00, 0x8b, 0xb5, 0x28, 0x02, 0x00, 0x00, 0xe8, 0x0a, 0x00, 0x00, 0x00, 0x66, 0xba, 0xf9, 0x0c, 0xb0, 0x0e,
		0xee, 0xf4, 0xeb, 0xfd, 0xac, 0x84, 0xc0, 0x74, 0x07, 0xe8, 0x04, 0x00, 0x00, 0x00, 0xeb, 0xf4, 0xb0, 0x0a, 0x88, 0xc4, 0x66, 0xba, 0xfd, 0x03,
		0xec, 0xa8, 0x20, 0x74, 0xfb, 0x66, 0xba, 0xf8, 0x03, 0x88, 0xe0, 0xee, 0xc3,
	}
	code = append(append(code, name...), 0)
	const setup = 2 * 512
	k := make([]byte, setup+1024)
	copy(k[setup:], code)
	le := binary.LittleEndian
	k[0x1f1] = setup/512 - 1
	le.PutUint32(k[0x1f4:], 1024/16)
	le.PutUint16(k[0x1fe:], 0xaa55)
	copy(k[0x200:], []byte{0xeb, 0x66, 'H', 'd', 'r', 'S'})
	le.PutUint16(k[0x206:], 0x020d) // version of the boot protocol
	k[0x211] = 1                    // loaded high
	le.PutUint32(k[0x214:], 0x100000)
	le.PutUint32(k[0x22c:], 0x7fffffff) // the initramfs may be anywhere
	le.PutUint32(k[0x230:], 0x200000)   // alignment
	k[0x234], k[0x235] = 1, 21          // relocatable
	le.PutUint32(k[0x238:], 2047)       // of the command line
	le.PutUint64(k[0x258:], 0x1000000)  // preferred address
	le.PutUint32(k[0x260:], 0x10000)    // bytes of memory
	return k
}
