package bundle

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/sparse"
)

// Limits that a reader enforces.
const (
	MaxHeader = 16 << 20 // bytes of the first entry, and of the record
	MaxFile   = 64 << 40 // bytes of one file
	MaxFiles  = 4096
	maxSums   = 1 << 20
	tarBlock  = 512
	maxTail   = 1 << 20 // zeros after the end: tar pads to its records
)

var nameRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// Reader reads the output of Writer or of others in the same format: call Header, then Next and CopyTo in turn until
// io.EOF.
//
// Errors of all methods: InvalidArgument for other formats, DataLoss for a stream that is truncated or whose sums are
// wrong; errors of the underlying reader are passed on.
type Reader struct {
	src  *source
	tar  *tar.Reader
	sums map[string]string // of the files read so far; "" if skipped
	cur  File
	open bool // cur can be copied
	back bool // cur is the next file
	end  bool
}

// NewReader begins to read a stream.
func NewReader(r io.Reader) *Reader {
	src := &source{r: r}
	return &Reader{src: src, tar: tar.NewReader(src), sums: map[string]string{}}
}

// source records how the underlying reader ended.
type source struct {
	r    io.Reader
	read int64 // bytes
	err  error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.read += int64(n)
	if err != nil && (n == 0 || !errors.Is(err, io.EOF)) { // an EOF that comes with the last bytes is returned again by the next Read
		s.err = err
	}
	return n, err
}

// Header reads the first entry, and the second if that is the record. The record is not validated: it can be a file of
// another program.
func (r *Reader) Header() (artifact.TarHeader, error) {
	f, err := r.next()
	if errors.Is(err, io.EOF) {
		return artifact.TarHeader{}, errdefs.DataLossf("the stream is empty: a snapshot was expected")
	}
	if err != nil {
		return artifact.TarHeader{}, err
	}
	if f.Name != FileHeader || f.Extents != nil || f.Size > MaxHeader {
		return artifact.TarHeader{}, errdefs.Invalidf("this is not an exported snapshot: it begins with %q of %d bytes, not with %s", f.Name, f.Size, FileHeader)
	}
	var buf bytes.Buffer
	if _, err := r.copy(&buf); err != nil {
		return artifact.TarHeader{}, err
	}
	var h artifact.TarHeader
	if err := json.Unmarshal(buf.Bytes(), &h); err != nil {
		return artifact.TarHeader{}, errdefs.Invalidf("the record of the exported snapshot cannot be read: %w", err)
	}
	if h.Version != Version {
		return artifact.TarHeader{}, errdefs.Invalidf("the exported snapshot has version %d, but this node supports version %d", h.Version, Version)
	}
	if len(h.Snapshot) == 0 || bytes.Equal(h.Snapshot, []byte("null")) {
		h.Snapshot, err = r.record()
	}
	return h, err
}

// record returns the content of the next file if it is the record; nil if it is not.
func (r *Reader) record() ([]byte, error) {
	f, err := r.next()
	if errors.Is(err, io.EOF) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if f.Name != artifact.TitleVMConfig || f.Extents != nil || f.Size > MaxHeader {
		r.back = true
		return nil, nil
	}
	var buf bytes.Buffer
	_, err = r.copy(&buf)
	return buf.Bytes(), err
}

// Next returns the next file, or io.EOF at a proper end of the stream. It skips a file that was not copied.
func (r *Reader) Next() (File, error) {
	f, err := r.next()
	if err != nil || f.Name != artifact.FileSums {
		return f, err
	}
	if f.Extents != nil || f.Size > maxSums {
		return File{}, errdefs.Invalidf("the checksums of the stream have an invalid size of %d bytes: refused", f.Size)
	}
	var buf bytes.Buffer
	if _, err := r.copy(&buf); err != nil {
		return File{}, err
	}
	if err := r.compare(buf.Bytes()); err != nil {
		return File{}, err
	}
	if f, err := r.next(); err == nil {
		return File{}, errdefs.Invalidf("the stream has %s after its checksums, which must be its last entry", f.Name)
	} else if !errors.Is(err, io.EOF) {
		return File{}, err
	}
	return File{}, io.EOF
}

func (r *Reader) compare(list []byte) error {
	sums, err := parseSums(list)
	if err != nil {
		return err
	}
	for name, got := range r.sums {
		want, ok := sums[name]
		if name == artifact.FileSums || name == FileHeader && !ok {
			continue
		}
		if !ok {
			return errdefs.Invalidf("the checksums of the stream do not list %s", name)
		} else if got != "" && got != want {
			return errdefs.DataLossf("%s is damaged: its sha256 is %s, expected %s; fetch the snapshot again", name, got, want)
		}
	}
	for name := range sums {
		if _, ok := r.sums[name]; !ok {
			return errdefs.DataLossf("the stream lacks %s, which its checksums list; fetch the snapshot again", name)
		}
	}
	return nil
}

func (r *Reader) next() (File, error) {
	if r.back {
		r.back = false
		return r.cur, nil
	}
	r.open = false
	if r.end {
		return File{}, io.EOF
	}
	h, err := r.tar.Next()
	if errors.Is(err, io.EOF) {
		if r.src.err != nil || r.src.read%tarBlock != 0 { // it ended without the end marker
			return File{}, r.fail(io.ErrUnexpectedEOF)
		}
		r.end = true
		return File{}, r.tail()
	}
	if err != nil {
		return File{}, r.fail(err)
	}
	f, err := file(h)
	if err != nil {
		return File{}, err
	}
	if _, twice := r.sums[f.Name]; twice {
		return File{}, errdefs.Invalidf("the stream has %s twice", f.Name)
	}
	if len(r.sums) == MaxFiles {
		return File{}, errdefs.Invalidf("the stream has more than %d files", MaxFiles)
	}
	r.sums[f.Name], r.cur, r.open = "", f, true
	return f, nil
}

// tail checks that only padding follows the end, and returns io.EOF.
func (r *Reader) tail() error {
	buf := make([]byte, 32<<10)
	for total := 0; ; {
		n, err := r.src.Read(buf)
		if total += n; !sparse.IsZero(buf[:n]) || total > maxTail {
			return errdefs.Invalidf("data follows the end of the exported snapshot: refused")
		}
		if errors.Is(err, io.EOF) {
			return io.EOF
		}
		if err != nil {
			return r.fail(err)
		}
	}
}

// fail classifies a read error; nil means that the data ended early.
func (r *Reader) fail(err error) error {
	switch {
	case r.src.err != nil && !errors.Is(r.src.err, io.EOF) && !errors.Is(r.src.err, io.ErrUnexpectedEOF):
		return fmt.Errorf("read the exported snapshot: %w", r.src.err)
	case r.src.err != nil, err == nil, errors.Is(err, io.ErrUnexpectedEOF):
		return errdefs.DataLossf("the exported snapshot is truncated; fetch it again")
	}
	return errdefs.Invalidf("this is not an exported snapshot: %w", err)
}

// file validates the header of an entry.
func file(h *tar.Header) (File, error) {
	switch {
	case h.Typeflag != tar.TypeReg:
		return File{}, errdefs.Invalidf("the stream has %.100q, which is not a regular file: refused", h.Name)
	case !nameRE.MatchString(h.Name):
		return File{}, errdefs.Invalidf("the stream has a file with the invalid name %.100q: refused", h.Name)
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse") {
			return File{}, errdefs.Invalidf("%s uses the sparse format of GNU tar, which is not supported", h.Name)
		}
	}
	f := File{Name: h.Name, Size: h.Size, Sum: h.PAXRecords[artifact.PAXSum]}
	if f.Sum != "" && !isSum(f.Sum) {
		return File{}, errdefs.Invalidf("%s has the invalid sha256 %.100q", f.Name, f.Sum)
	}
	m, sparsely := h.PAXRecords[artifact.PAXSparseMap]
	size, sized := h.PAXRecords[artifact.PAXSparseSize]
	if sparsely != sized {
		return File{}, errdefs.Invalidf("%s has only one of %s and %s: both are needed", f.Name, artifact.PAXSparseMap, artifact.PAXSparseSize)
	}
	if sparsely {
		var err error
		if f.Size, err = strconv.ParseInt(size, 10, 64); err != nil {
			return File{}, errdefs.Invalidf("%s has the invalid size %.100q", f.Name, size)
		}
		if f.Extents, err = sparse.Parse([]byte(m), f.Size); err != nil {
			return File{}, fmt.Errorf("%s: %w", f.Name, err)
		}
		if f.Extents == nil {
			f.Extents = []sparse.Extent{}
		}
		if f.Data() != h.Size {
			return File{}, errdefs.Invalidf("%s has %d bytes of data, but its sparse map has %d", f.Name, h.Size, f.Data())
		}
	}
	if f.Size < 0 || f.Size > MaxFile {
		return File{}, errdefs.Invalidf("%s has %d bytes: at most %d are possible", f.Name, f.Size, int64(MaxFile))
	}
	return f, nil
}

// Copy writes the data of the current file to w as they are in the stream and returns their sha256 in hex.
// Preconditions: Next returned the file and it has not been copied yet.
func (r *Reader) Copy(w io.Writer) (sum string, err error) { return r.copy(w) }

// CopyTo writes the current file to w, which is new: it writes data at their offsets and leaves out blocks of zeros. It
// does not set the size of w. progress, which may be nil, gets the number of data bytes written at once.
// Preconditions: as Copy.
func (r *Reader) CopyTo(w io.WriterAt, progress func(off, n int64) error) (sum string, err error) {
	return r.copy(&scatter{w: w, m: r.cur.Map(), progress: progress})
}

func (r *Reader) copy(w io.Writer) (string, error) {
	if !r.open {
		return "", errdefs.New(errdefs.Internal, "no file of the stream is open")
	}
	r.open = false
	to := &noted{w: w}
	h := sha256.New()
	n, err := copyHashed(to, r.tar, h, r.cur.Data())
	if to.err != nil {
		return "", fmt.Errorf("write %s: %w", r.cur.Name, to.err)
	}
	if err != nil || n != r.cur.Data() {
		return "", fmt.Errorf("%s: %w", r.cur.Name, r.fail(err))
	}
	sum := sumOf(h)
	if r.cur.Sum != "" && sum != r.cur.Sum {
		return "", errdefs.DataLossf("%s is damaged: its sha256 is %s, expected %s; fetch the snapshot again", r.cur.Name, sum, r.cur.Sum)
	}
	r.sums[r.cur.Name] = sum
	return sum, nil
}

// noted records an error of the writer, to tell it from one of the reader.
type noted struct {
	w   io.Writer
	err error
}

func (n *noted) Write(p []byte) (int, error) {
	k, err := n.w.Write(p)
	n.err = err
	return k, err
}

// scatter writes a stream of data to the offsets in the map.
type scatter struct {
	w        io.WriterAt
	m        []sparse.Extent
	at       int64 // in m[0]
	progress func(off, n int64) error
}

func (s *scatter) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		if len(s.m) == 0 {
			return done, io.ErrShortWrite
		}
		n := min(int64(len(p)-done), s.m[0].Length-s.at)
		off := s.m[0].Offset + s.at
		if err := sparse.WriteAt(s.w, p[done:done+int(n)], off); err != nil {
			return done, err
		}
		if s.progress != nil {
			if err := s.progress(off, n); err != nil {
				return done, err
			}
		}
		done += int(n)
		if s.at += n; s.at == s.m[0].Length {
			s.m, s.at = s.m[1:], 0
		}
	}
	return done, nil
}
