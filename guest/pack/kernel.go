package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/pierrec/lz4/v4"

	"cocoonstack.io/cocoon/internal/image/compress"
)

// Offsets in the setup header of a bzImage (Documentation/x86/boot).
const (
	offSetupSects    = 0x1f1
	offMagic         = 0x202
	offPayload       = 0x248
	offPayloadLength = 0x24c
	headerEnd        = 0x250

	maxKernel = 512 << 20 // bytes; far above any kernel, so that a damaged length cannot use up all memory
)

// extract returns the vmlinux that a bzImage contains. A direct boot of it skips the guest's own decompressor,
// which costs 0.6 s under emulation. Debian's cloud kernels are compressed with LZ4, Ubuntu's kernels with Zstandard.
func extract(image []byte) ([]byte, error) {
	if len(image) < headerEnd || string(image[offMagic:offMagic+4]) != "HdrS" {
		return nil, errors.New("it is not a bzImage")
	}
	start := (int(image[offSetupSects]) + 1) * 512
	start += int(binary.LittleEndian.Uint32(image[offPayload:]))
	length := int(binary.LittleEndian.Uint32(image[offPayloadLength:]))
	if length < 8 || start > len(image) || length > len(image)-start {
		return nil, fmt.Errorf("its payload of %d bytes at %d lies outside of the file", length, start)
	}
	payload := image[start : start+length]
	size := binary.LittleEndian.Uint32(payload[length-4:]) // appended by the kernel's build
	packed := bytes.NewReader(payload[:length-4])
	plain := io.Reader(lz4.NewReader(packed))
	if !bytes.HasPrefix(payload, []byte{0x02, 0x21, 0x4c, 0x18}) {
		r, kind, err := compress.Reader(packed)
		if err != nil {
			return nil, fmt.Errorf("decompress: %w", err)
		}
		defer r.Close()
		if kind == compress.None {
			return nil, fmt.Errorf("its payload (% x...) is compressed in an unknown way", payload[:4])
		}
		plain = r
	}
	if size > maxKernel {
		return nil, fmt.Errorf("it claims to hold %d bytes", size)
	}
	elf := make([]byte, size)
	if _, err := io.ReadFull(plain, elf); err != nil {
		return nil, fmt.Errorf("decompress: %w", err)
	}
	if !bytes.HasPrefix(elf, []byte("\x7fELF")) {
		return nil, errors.New("what it holds is not ELF")
	}
	return elf, nil
}
