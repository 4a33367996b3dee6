package sparse

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// A delta is a file that holds only what differs from a base file of the same size. Its blocks keep their offsets, so a
// hole in one of its own blocks means zeros. After them come one bit per block, set for the delta's own blocks, and:
const (
	deltaMagic   = "cocoond1"
	deltaTrailer = 8 + 8 + 8 + 4 + 4 // magic, size, number of own blocks, checksum of the bits and all before it, zero
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// DeltaSize is the size in bytes, holes included, of the delta of a file of size bytes.
func DeltaSize(size int64) int64 { return size + mapSize(size) }

func mapSize(size int64) int64 { return (size/Block+7)/8 + deltaTrailer }

// EndDelta completes f as the delta of a file. f is size bytes long and holds the blocks of own.
func EndDelta(f *os.File, size int64, own Pages) error {
	_, err := f.WriteAt(encodeMap(size, own), size)
	return err
}

func encodeMap(size int64, own Pages) []byte {
	b := make([]byte, 0, len(own)*8+deltaTrailer)
	for _, w := range own {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	b = append(b[:(size/Block+7)/8], deltaMagic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(size))
	b = binary.LittleEndian.AppendUint64(b, uint64(own.Count()))
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	return append(b, 0, 0, 0, 0)
}

// parseMap reads what encodeMap wrote for a file of size bytes.
func parseMap(b []byte, size int64) (Pages, error) {
	if size < 0 || size%Block != 0 || int64(len(b)) != mapSize(size) {
		return nil, errdefs.DataLossf("its block map has %d bytes, which does not match a file of %d bytes", len(b), size)
	}
	bits, own := b[:len(b)-deltaTrailer], NewPages(size)
	for n := range own {
		var word [8]byte
		copy(word[:], bits[n*8:])
		own[n] = binary.LittleEndian.Uint64(word[:])
	}
	if last := size / Block % 64; last != 0 {
		own[len(own)-1] &= 1<<last - 1
	}
	if !bytes.Equal(encodeMap(size, own), b) {
		return nil, errdefs.DataLossf("its block map is damaged")
	}
	return own, nil
}

// File is a sparse file open for reading: a plain file, or a delta with its base, which read the same. Several goroutines
// may read at once.
type File struct {
	f    *os.File
	base *os.File // nil: f holds everything
	own  Pages    // blocks that f holds; base holds the others
	size int64

	sums, baseSums *Sums // of f and of base; nil: reads are not verified
}

// NewFile returns a File of the plain file f. It takes ownership of f, even on failure.
func NewFile(f *os.File) (*File, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &File{f: f, size: info.Size()}, nil
}

// NewDelta returns the file whose delta to base is f. It takes ownership of both, even on failure.
// Errors: DataLoss when one of the two is damaged or they do not belong together.
func NewDelta(f, base *os.File) (*File, error) {
	own, size, err := readMap(f, base)
	if err != nil {
		_, _ = f.Close(), base.Close()
		return nil, err
	}
	return &File{f: f, base: base, own: own, size: size}, nil
}

func readMap(f, base *os.File) (own Pages, size int64, err error) {
	info, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	under, err := base.Stat()
	if err != nil {
		return nil, 0, err
	}
	if size = under.Size(); size%Block != 0 || info.Size() != DeltaSize(size) {
		return nil, 0, errdefs.DataLossf("%s has %d bytes and is not a delta of a file of %d bytes", f.Name(), info.Size(), size)
	}
	b := make([]byte, mapSize(size))
	if _, err := f.ReadAt(b, size); err != nil {
		return nil, 0, fmt.Errorf("read the map of %s: %w", f.Name(), err)
	}
	if own, err = parseMap(b, size); err != nil {
		return nil, 0, fmt.Errorf("%s: %w", f.Name(), err)
	}
	return own, size, nil
}

// Name is the name of the file, for messages.
func (f *File) Name() string { return f.f.Name() }

// Size returns the size of the file in bytes, holes included.
func (f *File) Size() int64 { return f.size }

// Stat describes the open file. For a delta this is the delta itself, whose size differs from Size.
func (f *File) Stat() (fs.FileInfo, error) { return f.f.Stat() }

// Close closes all files that it owns.
func (f *File) Close() error {
	if f.base == nil {
		return f.f.Close()
	}
	return errors.Join(f.f.Close(), f.base.Close())
}

// ReadAt implements io.ReaderAt.
func (f *File) ReadAt(p []byte, off int64) (int, error) {
	if f.base == nil {
		return f.sums.readAt(f.f, p, off)
	}
	if off < 0 || off >= f.size {
		return 0, io.EOF
	}
	var end error
	if int64(len(p)) > f.size-off {
		p, end = p[:f.size-off], io.EOF
	}
	for done := 0; done < len(p); {
		at := off + int64(done)
		page := at / Block
		from, sums := f.base, f.baseSums
		if f.own.Has(page) {
			from, sums = f.f, f.sums
		}
		last := (off + int64(len(p)) + Block - 1) / Block
		upTo := (page + f.own.run(page, last)) * Block
		n, err := sums.readAt(from, p[done:min(int64(len(p)), upTo-off)], at)
		if done += n; err != nil {
			return done, err
		}
	}
	return len(p), end
}

// Extents returns where it has data. Only one caller may use it at a time.
// Errors: DataLoss when there is a hole where its checksums expect data.
func (f *File) Extents() ([]Extent, error) {
	m, err := extentsOf(f.f, f.size, f.sums)
	if f.base == nil || err != nil {
		return m, err
	}
	data, under := NewPages(f.size), NewPages(f.size)
	data.Add(m)
	if m, err = extentsOf(f.base, f.size, f.baseSums); err != nil {
		return nil, err
	}
	under.Add(m)
	for n := range data {
		data[n] = data[n]&f.own[n] | under[n]&^f.own[n]
	}
	return data.Extents(f.size), nil
}

// extentsOf is Extents for one file with checksums; sums may be nil.
func extentsOf(f *os.File, size int64, sums *Sums) ([]Extent, error) {
	if sums == nil {
		return Extents(f, size)
	}
	m, err := Extents(f, sums.size) // the map of a delta follows after size
	if err != nil {
		return nil, err
	}
	if err := sums.covered(f.Name(), m); err != nil {
		return nil, err
	}
	return clip(m, size), nil
}

// clip returns the part of m before size.
func clip(m []Extent, size int64) []Extent {
	for n, e := range m {
		if e.Offset >= size {
			return m[:n]
		}
		m[n].Length = min(e.Length, size-e.Offset)
	}
	return m
}
