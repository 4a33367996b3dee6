package fake

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"cocoonstack.io/cocoon/internal/hypervisor"
)

var _ hypervisor.MemoryDumper = (*Instance)(nil)

// DumpMemory implements hypervisor.MemoryDumper. The core file has the text that the guest remembers (see Host.Remember), and one byte more. A
// fault OpDumped comes when a part is written.
func (i *Instance) DumpMemory(ctx context.Context, w io.Writer) error {
	if err := i.dump(ctx, w); err != nil {
		return fmt.Errorf("dump the memory of VM %s: %w", i.v.Plan.ID, err)
	}
	return nil
}

func (i *Instance) dump(ctx context.Context, w io.Writer) error {
	if err := i.usable(ctx, OpDump); err != nil {
		return err
	}
	i.d.host.mu.Lock()
	memory := append([]byte(i.v.Memory), 0)
	i.d.host.mu.Unlock()
	const header, part = 64, 56 // bytes
	var b bytes.Buffer
	err := errors.Join(binary.Write(&b, binary.LittleEndian, elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_CORE), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Phoff: header, Ehsize: header, Phentsize: part, Phnum: 1, Shentsize: 64,
	}), binary.Write(&b, binary.LittleEndian, elf.Prog64{
		Type: uint32(elf.PT_LOAD), Off: header + part, Filesz: uint64(len(memory)), Memsz: uint64(len(memory)),
	}))
	if err != nil {
		return err
	}
	if _, err := w.Write(b.Bytes()); err != nil {
		return err
	}
	if err := i.usable(ctx, OpDumped); err != nil {
		return err
	}
	_, err = w.Write(memory)
	return err
}
