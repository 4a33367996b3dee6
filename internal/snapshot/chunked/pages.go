package chunked

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/sparse"
)

// pageHash is the size of the hash of a page: half a sha256. Two pages are compared only if they were at the same offset in
// the memories of VMs of one owner. By chance, two pages have the same hash once in 2^128 times. A guest that looks for two
// such pages needs 2^64 tries, and damages only its own memory.
const pageHash = 16

// pages has the hash of each page of a file, and zeros for a page of zeros. Its own file has no name, so nothing is left of
// it after a crash. Several goroutines may put at once.
type pages struct {
	f    *os.File
	at   int64 // where the hashes begin in f
	size int64 // of the file that it describes, bytes

	failed atomic.Pointer[error] // the first error of put
}

// newPages returns the hashes of a file of size zeros. dir is where their file lives.
func newPages(dir string, size int64) (*pages, error) {
	f, err := unnamed(dir)
	if err != nil {
		return nil, fmt.Errorf("make a table of pages: %w", err)
	}
	if err := f.Truncate(size / page * pageHash); err != nil {
		return nil, errors.Join(fmt.Errorf("make a table of pages: %w", err), f.Close())
	}
	return &pages{f: f, size: size}, nil
}

// unnamed returns an open file without a name.
func unnamed(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, unix.O_TMPFILE|os.O_RDWR, 0o600)
	if err == nil || !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) {
		return f, err
	}
	if f, err = os.CreateTemp(dir, ".pages-"); err != nil {
		return nil, err
	}
	return f, os.Remove(f.Name())
}

func (p *pages) close() {
	if p != nil {
		p.f.Close()
	}
}

// put hashes whole pages of the file, from offset on. err returns its errors: whoever transfers the file may go on without
// the hashes.
func (p *pages) put(offset int64, data []byte) {
	hashes := make([]byte, 0, len(data)/page*pageHash)
	for at := 0; at+page <= len(data); at += page {
		if b := data[at : at+page]; !sparse.IsZero(b) {
			sum := sha256.Sum256(b)
			hashes = append(hashes, sum[:pageHash]...)
		} else {
			hashes = append(hashes, zeroes[:pageHash]...)
		}
	}
	if _, err := p.f.WriteAt(hashes, p.at+offset/page*pageHash); err != nil {
		p.failed.CompareAndSwap(nil, &err)
	}
}

// err returns the reason for which hashes are missing.
func (p *pages) err() error {
	if err := p.failed.Load(); err != nil {
		return *err
	}
	return nil
}

// fill hashes all pages of f. It returns only errors of f.
func (p *pages) fill(ctx context.Context, f *sparse.File) error {
	data, err := f.Extents()
	if err != nil {
		return err
	}
	buf := make([]byte, readSize)
	done := int64(0) // up to here
	for _, e := range data {
		for at := max(e.Offset/page*page, done); at < min(e.End(), p.size); at = done {
			if err := ctx.Err(); err != nil {
				return err
			}
			n := min(readSize, (e.End()-at+page-1)/page*page, p.size-at)
			if _, err := f.ReadAt(buf[:n], at); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			p.put(at, buf[:n])
			done = at + n
		}
	}
	return nil
}

// readAt reads the hashes of the pages from offset of the file on.
func (p *pages) readAt(hashes []byte, offset int64) (int, error) {
	return p.f.ReadAt(hashes, p.at+offset/page*pageHash)
}

// sum returns the checksum of all hashes, as artifact.File.Pages has it.
func (p *pages) sum(ctx context.Context) (string, error) {
	if err := p.err(); err != nil {
		return "", err
	}
	h := sha256.New()
	buf := make([]byte, readSize)
	for r := p.reader(); ; {
		n, err := r.Read(buf)
		h.Write(buf[:n])
		if errors.Is(err, io.EOF) {
			return hex.EncodeToString(h.Sum(nil)), nil
		}
		if err = errors.Join(err, ctx.Err()); err != nil {
			return "", err
		}
	}
}

func (p *pages) reader() io.Reader { return io.NewSectionReader(p.f, p.at, p.size/page*pageHash) }
