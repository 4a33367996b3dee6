package stream

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// File is a Memory that writes an image of the memory into a new, empty file. The file is sparse, with holes for pages of
// zeros. With a base it omits pages that are the same there.
type File struct {
	f    *os.File
	base *base // nil: every page is written
	size int64
	came sparse.Pages // pages that have come
	full sparse.Pages // pages that are not zero
	own  sparse.Pages // with a base: pages that differ from it
	run  []byte       // consecutive pages that are not written yet
	at   int64        // offset of run
}

// runLength is how many bytes are written at once. A larger value gains nothing.
const runLength = 1 << 20

// NewFile writes to f. under, if not nil, is the file of an earlier memory that may be similar: if it has the same size and
// most of its content is the same, f becomes a delta to it. The caller keeps owning both.
func NewFile(f, under *os.File) *File {
	m := &File{f: f, run: make([]byte, 0, runLength)}
	if under != nil {
		m.base = &base{f: under}
	}
	return m
}

// Size implements Memory.
func (m *File) Size(size int64) error {
	if size > vm.MaxMemory {
		return errdefs.DataLossf("the migration stream has %d bytes of memory; no guest has more than %d", size, int64(vm.MaxMemory))
	}
	if err := m.f.Truncate(size); err != nil {
		return m.failed(err)
	}
	m.size, m.came, m.full = size, sparse.NewPages(size), sparse.NewPages(size)
	if m.base == nil {
		return nil
	}
	fits, err := m.base.open(size)
	if !fits {
		m.base = nil
	}
	m.own = sparse.NewPages(size)
	return err
}

// Page implements Memory.
func (m *File) Page(at int64, data []byte) error {
	n := at / PageSize
	if m.base != nil {
		same, err := m.base.same(at, data)
		if err != nil {
			return err
		}
		if same {
			if err := m.drop(at); err != nil {
				return err
			}
			m.came.Set(n)
			m.full.Set(n)
			m.own.Clear(n)
			return nil
		}
		m.own.Set(n)
	}
	if len(m.run) > 0 && (at != m.at+int64(len(m.run)) || len(m.run) == runLength) {
		if err := m.flush(); err != nil {
			return err
		}
	}
	if len(m.run) == 0 {
		m.at = at
	}
	m.run = append(m.run, data...)
	m.came.Set(n)
	m.full.Set(n)
	return nil
}

// Zero implements Memory.
func (m *File) Zero(at int64) error {
	n := at / PageSize
	if err := m.drop(at); err != nil {
		return err
	}
	m.came.Set(n)
	m.full.Clear(n)
	if m.base == nil {
		return nil
	}
	if m.base.data.Has(n) {
		m.own.Set(n)
	} else {
		m.own.Clear(n)
	}
	return nil
}

// drop turns the content of f for a page into a hole.
func (m *File) drop(at int64) error {
	n := at / PageSize
	if !m.full.Has(n) || m.base != nil && !m.own.Has(n) {
		return nil // it is a hole already
	}
	if err := m.flush(); err != nil {
		return err
	}
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
		return errdefs.Exhaustedf("write the guest's memory: %w; free some space there", err)
	}
	return fmt.Errorf("write the guest's memory: %w", err)
}

// Written is the result of saving a memory.
type Written struct {
	Used  int64 // bytes that are not zero
	Delta bool  // the file contains only what differs from the base
}

// Finish writes the rest. If more than half of the data differs from the base, the file is made complete: the base is not worth
// keeping for so little. It returns DataLoss if a page never came.
func (m *File) Finish() (Written, error) {
	if err := m.flush(); err != nil {
		return Written{}, err
	}
	if missing := m.size/PageSize - m.came.Count(); missing != 0 || m.size == 0 {
		return Written{}, errdefs.DataLossf("the hypervisor did not save %d of %d pages of memory", missing, m.size/PageSize)
	}
	w := Written{Used: m.full.Count() * PageSize}
	if m.base == nil {
		return w, nil
	}
	if shared := m.shared(); shared.Count() < (m.full.Count()+1)/2 {
		return w, m.fill(shared)
	}
	w.Delta = true
	return w, m.failed(sparse.EndDelta(m.f, m.size, m.own))
}

// shared returns the pages that have data, but only in the base.
func (m *File) shared() sparse.Pages {
	p := sparse.NewPages(m.size)
	for n := range p {
		p[n] = m.full[n] &^ m.own[n]
	}
	return p
}

// fill copies pages from the base.
func (m *File) fill(pages sparse.Pages) error {
	buf := m.run[:cap(m.run)]
	for _, e := range pages.Extents(m.size) {
		for e.Length > 0 {
			p := buf[:min(e.Length, int64(len(buf)))]
			if err := m.base.read(p, e.Offset); err != nil {
				return err
			}
			if _, err := m.f.WriteAt(p, e.Offset); err != nil {
				return m.failed(err)
			}
			e.Offset, e.Length = e.Offset+int64(len(p)), e.Length-int64(len(p))
		}
	}
	return nil
}
