package stream

import (
	"errors"
	"fmt"
	"math/bits"
	"os"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// File is a Memory that writes an image of the memory into a new, empty file: sparse, with holes for pages of zeros.
type File struct {
	f    *os.File
	size int64
	came bitmap // pages that came
	full bitmap // pages that are not zero
	run  []byte // pages that follow each other and are not written yet
	at   int64  // of run
}

// runLength is how many bytes are written at once. More gains nothing.
const runLength = 1 << 20

// NewFile writes to f, which stays the caller's.
func NewFile(f *os.File) *File { return &File{f: f, run: make([]byte, 0, runLength)} }

// Size implements Memory.
func (m *File) Size(size int64) error {
	if size > vm.MaxMemory {
		return errdefs.DataLossf("the migration stream tells of %d bytes of memory; no guest has more than %d", size, int64(vm.MaxMemory))
	}
	if err := m.f.Truncate(size); err != nil {
		return m.failed(err)
	}
	m.size, m.came, m.full = size, newBitmap(size/PageSize), newBitmap(size/PageSize)
	return nil
}

// Page implements Memory.
func (m *File) Page(at int64, data []byte) error {
	if len(m.run) > 0 && (at != m.at+int64(len(m.run)) || len(m.run) == runLength) {
		if err := m.flush(); err != nil {
			return err
		}
	}
	if len(m.run) == 0 {
		m.at = at
	}
	m.run = append(m.run, data...)
	m.came.set(at / PageSize)
	m.full.set(at / PageSize)
	return nil
}

// Zero implements Memory.
func (m *File) Zero(at int64) error {
	m.came.set(at / PageSize)
	if !m.full.has(at / PageSize) {
		return nil // it is a hole
	}
	if err := m.flush(); err != nil {
		return err
	}
	m.full.clear(at / PageSize)
	err := unix.Fallocate(int(m.f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, PageSize)
	if errors.Is(err, unix.EOPNOTSUPP) {
		_, err = m.f.WriteAt(make([]byte, PageSize), at)
	}
	return m.failed(err)
}

func (m *File) flush() error {
	_, err := m.f.WriteAt(m.run, m.at)
	m.run = m.run[:0]
	return m.failed(err)
}

func (m *File) failed(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EFBIG):
		return errdefs.Exhaustedf("write the guest's memory: %w; make room there", err)
	}
	return fmt.Errorf("write the guest's memory: %w", err)
}

// Finish writes what is left and returns how many bytes are not zero. It returns DataLoss when a page never came.
func (m *File) Finish() (used int64, err error) {
	if err := m.flush(); err != nil {
		return 0, err
	}
	if missing := m.size/PageSize - m.came.count(); missing != 0 || m.size == 0 {
		return 0, errdefs.DataLossf("the hypervisor did not save %d of %d pages of memory", missing, m.size/PageSize)
	}
	return m.full.count() * PageSize, nil
}

// bitmap has one bit for each page.
type bitmap []uint64

func newBitmap(n int64) bitmap { return make(bitmap, (n+63)/64) }

func (b bitmap) set(n int64)      { b[n/64] |= 1 << (n % 64) }
func (b bitmap) clear(n int64)    { b[n/64] &^= 1 << (n % 64) }
func (b bitmap) has(n int64) bool { return b[n/64]&(1<<(n%64)) != 0 }

func (b bitmap) count() (n int64) {
	for _, w := range b {
		n += int64(bits.OnesCount64(w))
	}
	return n
}
