// Package stream splits QEMU's migration stream: the pages of the guest's memory go to a file that is an image of the memory.
// Everything else becomes a smaller stream, which QEMU loads on top of that memory.
//
// It knows the framing of the stream and the records of guest memory. It does not interpret the state of devices, and it starts
// no migration.
package stream

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// The framing, from QEMU's migration/savevm.c.
const (
	magic   = 0x5145564d // "QEVM"
	version = 3

	sectionStart  = 0x01
	sectionPart   = 0x02
	sectionEnd    = 0x03
	sectionFull   = 0x04
	configuration = 0x07
	sectionFooter = 0x7e
)

// The records of memory, from QEMU's migration/ram.c: a page's offset with flags in its low bits.
const (
	flagZero     = 0x02
	flagSizes    = 0x04
	flagPage     = 0x08
	flagEnd      = 0x10
	flagContinue = 0x20
	flagMask     = PageSize - 1
)

// PageSize is the page size of the records, whatever page size the host uses.
const PageSize = 4096

// Limits for input that may come from a guest that has taken over its QEMU.
const (
	maxBlocks  = 1024
	maxBlock   = 1 << 30 // bytes of a block other than the guest's memory
	maxMachine = 256
	maxState   = 1 << 30 // bytes of the rest of the stream
)

// Memory receives the pages of the guest's memory. A page may come more than once; the last one counts.
type Memory interface {
	// Size is called once, before all pages.
	Size(bytes int64) error
	// Page receives a page that is not zero. data is valid only during the call.
	Page(at int64, data []byte) error
	// Zero receives a page of zeros.
	Zero(at int64) error
}

// Split reads a stream to its end. The pages of the memory block with that name go to mem. The rest goes to rest and is a valid
// stream by itself. It returns the type of the machine that wrote the stream. Errors: DataLoss if the stream is cut short or is
// not a migration stream; Unsupported for features that we did not switch on; errors of mem and rest unchanged.
func Split(r io.Reader, block string, mem Memory, rest io.Writer) (machine string, err error) {
	out := bufio.NewWriterSize(&bounded{w: rest, left: maxState}, 256<<10)
	s := splitter{in: bufio.NewReaderSize(r, 1<<20), out: out, block: block, mem: mem}
	if machine, err = s.header(); err != nil {
		return "", cut(err)
	}
	for {
		kind, err := s.in.ReadByte()
		if err != nil {
			return "", cut(err)
		}
		if kind == sectionFull { // only devices follow
			break
		}
		if err := s.section(kind); err != nil {
			return "", cut(err)
		}
	}
	if s.sizes == nil {
		return "", errdefs.DataLossf("the migration stream holds no memory")
	}
	if err := out.WriteByte(sectionFull); err != nil {
		return "", err
	}
	if _, err := s.in.WriteTo(out); err != nil {
		return "", err
	}
	return machine, out.Flush()
}

// cut turns an early end of the stream into an error that says so and wraps io.ErrUnexpectedEOF.
func cut(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errdefs.DataLossf("the migration stream ends in the middle: %w", io.ErrUnexpectedEOF)
	}
	return err
}

// bounded refuses to write more than left bytes.
type bounded struct {
	w    io.Writer
	left int64
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.left -= int64(len(p)); b.left < 0 {
		return 0, errdefs.Exhaustedf("the state of the guest's devices is larger than %d bytes", int64(maxState))
	}
	return b.w.Write(p)
}

type splitter struct {
	in    *bufio.Reader
	out   *bufio.Writer
	block string
	mem   Memory

	ram   uint32           // number of the memory section
	sizes map[string]int64 // of the memory blocks; nil before the memory section begins
	last  string           // block of the last page
	open  bool             // a section is being written
	page  [PageSize]byte
	num   [8]byte
}

// header copies everything before the first section.
func (s *splitter) header() (machine string, err error) {
	if m, err := s.uint32(); err != nil {
		return "", err
	} else if m != magic {
		return "", errdefs.DataLossf("the output of QEMU is not a migration stream")
	}
	v, err := s.uint32()
	if err != nil {
		return "", err
	}
	if v != version {
		return "", errdefs.Unsupportedf("the migration stream has version %d; only %d is supported", v, version)
	}
	kind, err := s.in.ReadByte()
	if err != nil {
		return "", err
	}
	if kind != configuration {
		return "", errdefs.Unsupportedf("the migration stream does not name its machine")
	}
	n, err := s.uint32()
	if err != nil {
		return "", err
	}
	if n > maxMachine {
		return "", errdefs.DataLossf("the migration stream has an invalid machine name of %d bytes", n)
	}
	name := make([]byte, n)
	if _, err := io.ReadFull(s.in, name); err != nil {
		return "", err
	}
	s.put32(magic)
	s.put32(version)
	s.put(configuration)
	s.put32(n)
	s.put(name...)
	return string(name), nil
}

// section reads one of the sections before those of the devices.
func (s *splitter) section(kind byte) error {
	switch kind {
	case sectionStart, sectionPart, sectionEnd:
	default:
		return errdefs.Unsupportedf("the migration stream has a part of kind %#x, which is unknown", kind)
	}
	id, err := s.uint32()
	if err != nil {
		return err
	}
	switch {
	case kind == sectionStart && s.sizes == nil:
		if err := s.begin(id); err != nil {
			return err
		}
	case kind == sectionStart || s.sizes == nil || id != s.ram:
		return errdefs.Unsupportedf("the migration stream has a section %d besides the memory", id)
	}
	if kind == sectionEnd {
		s.resume(sectionEnd)
	}
	if err := s.records(); err != nil {
		return err
	}
	if foot, err := s.in.ReadByte(); err != nil {
		return err
	} else if foot != sectionFooter {
		return errdefs.DataLossf("a section of the migration stream has no end")
	}
	if again, err := s.uint32(); err != nil {
		return err
	} else if again != id {
		return errdefs.DataLossf("section %d of the migration stream ends as %d", id, again)
	}
	if s.open {
		s.put64(flagEnd)
		s.put(sectionFooter)
		s.put32(id)
		s.open = false
	}
	return nil
}

// begin reads the header of the memory section.
func (s *splitter) begin(id uint32) error {
	name, err := s.name()
	if err != nil {
		return err
	}
	instance, err := s.uint32()
	if err != nil {
		return err
	}
	format, err := s.uint32()
	if err != nil {
		return err
	}
	if name != "ram" || format != 4 {
		return errdefs.Unsupportedf("the migration stream begins with %.80q version %d instead of memory", name, format)
	}
	s.ram, s.sizes, s.open = id, map[string]int64{}, true
	s.put(sectionStart)
	s.put32(id)
	s.putName(name)
	s.put32(instance)
	s.put32(format)
	return nil
}

// resume writes the header of a later section, once there is something to put into it.
func (s *splitter) resume(kind byte) {
	if !s.open {
		s.put(kind)
		s.put32(s.ram)
		s.open = true
	}
}

// records reads the records of one section.
func (s *splitter) records() error {
	for {
		word, err := s.uint64()
		if err != nil {
			return err
		}
		at, flags := int64(word&^flagMask), word&flagMask
		switch flags {
		case flagEnd:
			return nil
		case flagSizes:
			err = s.blocks(at)
		case flagPage, flagZero, flagPage | flagContinue, flagZero | flagContinue:
			err = s.record(at, flags)
		default:
			err = errdefs.Unsupportedf("the migration stream has a memory record with unknown flags %#x", flags)
		}
		if err != nil {
			return err
		}
	}
}

// blocks reads the sizes of all blocks; their sum is total bytes.
func (s *splitter) blocks(total int64) error {
	if len(s.sizes) > 0 || !s.open || total < 0 {
		return errdefs.DataLossf("the migration stream lists the blocks of memory in the wrong place")
	}
	s.put64(uint64(total) | flagSizes)
	for left := total; left > 0; {
		name, err := s.name()
		if err != nil {
			return err
		}
		word, err := s.uint64()
		if err != nil {
			return err
		}
		size := int64(word)
		_, twice := s.sizes[name]
		if twice || size <= 0 || size > left || size%PageSize != 0 || len(s.sizes) == maxBlocks || name != s.block && size > maxBlock {
			return errdefs.DataLossf("the migration stream has an invalid memory block %.80q of %d bytes", name, size)
		}
		s.sizes[name] = size
		left -= size
		s.putName(name)
		s.put64(word)
	}
	size, ok := s.sizes[s.block]
	if !ok {
		return errdefs.Unsupportedf("the guest has no block of memory named %q", s.block)
	}
	return s.mem.Size(size)
}

// record reads one page.
func (s *splitter) record(at int64, flags uint64) error {
	if flags&flagContinue == 0 {
		name, err := s.name()
		if err != nil {
			return err
		}
		s.last = name
	}
	size, ok := s.sizes[s.last]
	if !ok || at < 0 || at >= size {
		return errdefs.DataLossf("the migration stream has a page at %d outside block %.80q of %d bytes", at, s.last, size)
	}
	ours := s.last == s.block
	if !ours {
		s.resume(sectionPart)
		s.put64(uint64(at) | flags&^flagContinue)
		s.putName(s.last)
	}
	if flags&flagZero != 0 {
		fill, err := s.in.ReadByte()
		switch {
		case err != nil:
			return err
		case fill != 0:
			return errdefs.Unsupportedf("the migration stream has a page full of %#x", fill)
		case ours:
			return s.mem.Zero(at)
		}
		s.put(0)
		return nil
	}
	if ours { // avoids a copy
		data, err := s.in.Peek(PageSize)
		if err != nil {
			return err
		}
		if err := s.mem.Page(at, data); err != nil {
			return err
		}
		_, err = s.in.Discard(PageSize)
		return err
	}
	if _, err := io.ReadFull(s.in, s.page[:]); err != nil {
		return err
	}
	s.put(s.page[:]...)
	return nil
}

func (s *splitter) uint32() (uint32, error) {
	_, err := io.ReadFull(s.in, s.num[:4])
	return binary.BigEndian.Uint32(s.num[:4]), err
}

func (s *splitter) uint64() (uint64, error) {
	_, err := io.ReadFull(s.in, s.num[:])
	return binary.BigEndian.Uint64(s.num[:]), err
}

func (s *splitter) name() (string, error) {
	n, err := s.in.ReadByte()
	if err != nil {
		return "", err
	}
	b, err := s.in.Peek(int(n))
	if err != nil {
		return "", err
	}
	name := s.last
	if name != string(b) { // most pages belong to the same block as the previous one
		name = string(b)
	}
	_, err = s.in.Discard(int(n))
	return name, err
}

// The writer keeps its first error, and the final Flush returns it.

func (s *splitter) put(b ...byte) { _, _ = s.out.Write(b) }

func (s *splitter) put32(v uint32) {
	_, _ = s.out.Write(binary.BigEndian.AppendUint32(s.out.AvailableBuffer(), v))
}

func (s *splitter) put64(v uint64) {
	_, _ = s.out.Write(binary.BigEndian.AppendUint64(s.out.AvailableBuffer(), v))
}

func (s *splitter) putName(name string) {
	s.put(byte(len(name)))
	_, _ = s.out.WriteString(name)
}
