package sparse

import (
	"io"
	"os"
)

// Holed is a reader that knows where it has holes.
type Holed interface {
	io.Reader
	// Skip moves past the hole that begins at the current place, and returns its length; 0: there is none. Read would return zeros.
	Skip() (int64, error)
}

// FileReader reads a file from its first to its last byte. It implements Holed.
type FileReader struct {
	f    *os.File
	m    []Extent // those that are not read yet
	at   int64
	size int64
}

// ReadFile returns a reader of f, which stays the caller's.
func ReadFile(f *os.File) (*FileReader, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	m, err := Extents(f, info.Size())
	return &FileReader{f: f, m: m, size: info.Size()}, err
}

// File is the file that it reads.
func (r *FileReader) File() *os.File { return r.f }

// Size returns the size of the file in bytes, holes included.
func (r *FileReader) Size() int64 { return r.size }

// hole returns the length of the hole at the current place.
func (r *FileReader) hole() int64 {
	for len(r.m) > 0 && r.m[0].End() <= r.at {
		r.m = r.m[1:]
	}
	if len(r.m) == 0 {
		return r.size - r.at
	}
	return max(0, r.m[0].Offset-r.at)
}

// Skip implements Holed.
func (r *FileReader) Skip() (int64, error) {
	n := r.hole()
	r.at += n
	return n, nil
}

// Read implements io.Reader.
func (r *FileReader) Read(p []byte) (int, error) {
	if r.at >= r.size {
		return 0, io.EOF
	}
	if n := r.hole(); n > 0 {
		p = p[:min(int64(len(p)), n)]
		clear(p)
		r.at += int64(len(p))
		return len(p), nil
	}
	n, err := r.f.ReadAt(p[:min(int64(len(p)), r.m[0].End()-r.at)], r.at)
	r.at += int64(n)
	if n > 0 {
		err = nil
	} else if err == io.EOF {
		err = io.ErrUnexpectedEOF // it was cut meanwhile
	}
	return n, err
}
