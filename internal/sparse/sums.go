package sparse

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// SumSuffix is appended to a file's name to get the name of its checksum file, in the same folder.
const SumSuffix = ".sum"

// The file of checksums holds: for each run, the number of its first block and the number of blocks, 8 bytes each; the
// CRC-32C of each block of the runs, 4 bytes each; and at the end:
const (
	sumsMagic   = "cocoons1"
	sumsTrailer = 8 + 8 + 8 + 4 + 4 // magic, size of the file, number of runs, checksum of all before it, zero
	sumsRun     = 8 + 8
)

// Sums are the checksums of a file: one for each block that is not zero. Holes cost nothing.
//
// They detect changes by a disk, a file system or an accident. They do not protect against somebody who may write to the
// files: that person can write the checksums, too.
type Sums struct {
	size int64
	runs []sumRun
	of   []uint32
}

// sumRun is a sequence of consecutive blocks that are not zero.
type sumRun struct {
	first, count int64
	at           int // index of the first block's checksum in Sums.of
}

// SumOf reads f and returns its checksums. It moves the offset of f.
func SumOf(ctx context.Context, f *os.File) (*Sums, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	s := &Sums{size: info.Size()}
	err = eachBlock(ctx, f, s.size, func(n int64, data []byte) error {
		if IsZero(data) {
			return nil
		}
		if last := len(s.runs) - 1; last >= 0 && s.runs[last].first+s.runs[last].count == n {
			s.runs[last].count++
		} else {
			s.runs = append(s.runs, sumRun{first: n, count: 1, at: len(s.of)})
		}
		s.of = append(s.of, crc32.Checksum(data, castagnoli))
		return nil
	})
	return s, err
}

// eachBlock calls do for every block of f that is not in a hole. The last block may be short.
func eachBlock(ctx context.Context, f *os.File, size int64, do func(n int64, data []byte) error) error {
	m, err := Extents(f, size)
	if err != nil {
		return err
	}
	buf := make([]byte, 256<<10)
	next := int64(0) // block after the last one: extents need not be aligned
	for _, e := range m {
		at, end := max(e.Offset/Block, next)*Block, min((e.End()+Block-1)/Block*Block, size)
		for at < end {
			if err := ctx.Err(); err != nil {
				return err
			}
			p := buf[:min(int64(len(buf)), end-at)]
			if n, err := f.ReadAt(p, at); n < len(p) {
				return fmt.Errorf("read %s at byte %d: %w", f.Name(), at+int64(n), err)
			}
			for off := 0; off < len(p); off += Block {
				if err := do((at+int64(off))/Block, p[off:min(off+Block, len(p))]); err != nil {
					return err
				}
			}
			at += int64(len(p))
		}
		next = max(next, (end+Block-1)/Block)
	}
	return nil
}

// Size is the size of the file, holes included. Data counts only the blocks that are not zero.
func (s *Sums) Size() int64 { return s.size }

// Data is the number of bytes of the file in blocks that are not zero.
func (s *Sums) Data() int64 { return int64(len(s.of)) * Block }

// Verify reads all of f and compares it with the checksums.
// Errors: DataLoss, which names the file and the first byte of the first block that differs.
func (s *Sums) Verify(ctx context.Context, f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size() != s.size {
		return errdefs.DataLossf("%s has %d bytes instead of %d", f.Name(), info.Size(), s.size)
	}
	m, err := Extents(f, s.size)
	if err != nil {
		return err
	}
	if err := s.covered(f.Name(), m); err != nil {
		return err
	}
	return eachBlock(ctx, f, s.size, func(n int64, data []byte) error { return s.check(f.Name(), n, data) })
}

// covered reports whether all blocks that are not zero are within m: data that has become a hole is lost.
func (s *Sums) covered(name string, m []Extent) error {
	for _, r := range s.runs {
		for at, end := r.first*Block, min((r.first+r.count)*Block, s.size); at < end; {
			for len(m) > 0 && m[0].End() <= at {
				m = m[1:]
			}
			// An extent need not start at a block boundary: an overlap with the block is enough, check compares the rest.
			if len(m) == 0 || m[0].Offset >= min(at+Block, end) {
				return damaged(name, at)
			}
			at = max(m[0].End(), at+1)
			if at < end { // continue at the first block that is not covered yet
				at = (at + Block - 1) / Block * Block
			}
		}
	}
	return nil
}

// check compares the blocks in data with their checksums; the first is block n.
func (s *Sums) check(name string, n int64, data []byte) error {
	for ; len(data) > 0; n++ {
		block := data[:min(Block, len(data))]
		data = data[len(block):]
		want, ok := s.at(n)
		if ok && crc32.Checksum(block, castagnoli) != want || !ok && !IsZero(block) {
			return damaged(name, n*Block)
		}
	}
	return nil
}

func damaged(name string, at int64) error {
	return errdefs.DataLossf("%s is damaged at byte %d: the checksum does not match", name, at)
}

// at returns the checksum of block n, or false if the block is zero.
func (s *Sums) at(n int64) (uint32, bool) {
	i, found := slices.BinarySearchFunc(s.runs, n, func(r sumRun, n int64) int { return cmp.Compare(r.first, n) })
	if !found {
		i--
	}
	if i < 0 || n >= s.runs[i].first+s.runs[i].count {
		return 0, false
	}
	return s.of[int64(s.runs[i].at)+n-s.runs[i].first], true
}

// readAt is f.ReadAt, but verifies every block that it touches.
func (s *Sums) readAt(f *os.File, p []byte, off int64) (done int, err error) {
	if s == nil {
		return f.ReadAt(p, off)
	}
	if off >= s.size {
		return 0, io.EOF
	}
	var end error
	if int64(len(p)) > s.size-off {
		p, end = p[:s.size-off], io.EOF
	}
	var odd [Block]byte
	for done < len(p) {
		at := off + int64(done)
		first := at / Block * Block
		into, whole := p[done:], at == first
		if rest := at + int64(len(into)); rest < s.size { // only whole blocks
			into = into[:len(into)/Block*Block]
		}
		if !whole || len(into) == 0 { // part of a block
			into, whole = odd[:min(Block, s.size-first)], false
		}
		if n, err := f.ReadAt(into, first); n < len(into) {
			if errors.Is(err, io.EOF) {
				err = errdefs.DataLossf("%s is truncated to %d bytes", f.Name(), first+int64(n))
			}
			return done, err
		}
		if err := s.check(f.Name(), first/Block, into); err != nil {
			return done, err
		}
		if whole {
			done += len(into)
		} else {
			done += copy(p[done:], into[at-first:])
		}
	}
	return done, end
}

// Write saves s durably to path, which must not exist, with mode 0600.
func (s *Sums) Write(path string) (err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(s.encode())
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func (s *Sums) encode() []byte {
	b := make([]byte, 0, len(s.runs)*sumsRun+len(s.of)*4+sumsTrailer)
	for _, r := range s.runs {
		b = binary.LittleEndian.AppendUint64(b, uint64(r.first))
		b = binary.LittleEndian.AppendUint64(b, uint64(r.count))
	}
	for _, c := range s.of {
		b = binary.LittleEndian.AppendUint32(b, c)
	}
	b = append(b, sumsMagic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(s.size))
	b = binary.LittleEndian.AppendUint64(b, uint64(len(s.runs)))
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	return append(b, 0, 0, 0, 0)
}

// ReadSums reads a file that Write wrote.
// Errors: DataLoss when it is missing or damaged.
func ReadSums(path string) (*Sums, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, errdefs.DataLossf("the checksums in %s are missing", path)
	}
	if err != nil {
		return nil, err
	}
	s, err := parseSums(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

func parseSums(b []byte) (*Sums, error) {
	bad := errdefs.DataLossf("the checksums themselves are damaged")
	if len(b) < sumsTrailer {
		return nil, bad
	}
	body, end := b[:len(b)-sumsTrailer], b[len(b)-sumsTrailer:]
	size, runs := int64(binary.LittleEndian.Uint64(end[8:])), binary.LittleEndian.Uint64(end[16:])
	switch {
	case !bytes.HasPrefix(end, []byte(sumsMagic)) || size < 0 || runs > uint64(len(body))/sumsRun,
		crc32.Checksum(b[:len(b)-8], castagnoli) != binary.LittleEndian.Uint32(end[24:]), binary.LittleEndian.Uint32(end[28:]) != 0:
		return nil, bad
	}
	list := body[runs*sumsRun:]
	s := &Sums{size: size, runs: make([]sumRun, 0, runs), of: make([]uint32, 0, len(list)/4)}
	next, left := int64(0), int64(len(list)/4)
	blocks := size / Block
	if size%Block != 0 {
		blocks++
	}
	for at := 0; at < int(runs)*sumsRun; at += sumsRun {
		r := sumRun{int64(binary.LittleEndian.Uint64(body[at:])), int64(binary.LittleEndian.Uint64(body[at+8:])), len(list)/4 - int(left)}
		if r.first < next || r.first > blocks || r.count <= 0 || r.count > blocks-r.first || r.count > left {
			return nil, bad
		}
		s.runs, next, left = append(s.runs, r), r.first+r.count, left-r.count
	}
	if left != 0 || len(list)%4 != 0 {
		return nil, bad
	}
	for ; len(list) > 0; list = list[4:] {
		s.of = append(s.of, binary.LittleEndian.Uint32(list))
	}
	return s, nil
}

// Open opens the file at path. If base is not "", path is a delta to the file at base. With summed, every block that is
// read is compared with the checksums in the files beside them.
// Errors: those of open; DataLoss when a checksum file is missing, or when a file is damaged or was cut short.
func Open(open func(path string) (*os.File, error), path, base string, summed bool) (_ *File, err error) {
	var own, under *Sums
	if summed {
		if own, err = ReadSums(path + SumSuffix); err != nil {
			return nil, err
		}
	}
	if summed && base != "" {
		if under, err = ReadSums(base + SumSuffix); err != nil {
			return nil, err
		}
	}
	f, err := openBoth(open, path, base)
	if err != nil {
		return nil, err
	}
	f.sums, f.baseSums = own, under
	if err := f.asLong(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func openBoth(open func(path string) (*os.File, error), path, base string) (*File, error) {
	f, err := open(path)
	if err != nil {
		return nil, err
	}
	if base == "" {
		return NewFile(f)
	}
	under, err := open(base)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return NewDelta(f, under)
}

// asLong returns DataLoss unless the files are as long as their checksums say.
func (f *File) asLong() error {
	for _, of := range []struct {
		f *os.File
		s *Sums
	}{{f.f, f.sums}, {f.base, f.baseSums}} {
		if of.f == nil || of.s == nil {
			continue
		}
		info, err := of.f.Stat()
		if err != nil {
			return err
		}
		if info.Size() != of.s.size {
			return errdefs.DataLossf("%s has %d bytes instead of %d", of.f.Name(), info.Size(), of.s.size)
		}
	}
	return nil
}
