// Package bundle encodes a whole snapshot as a tar stream: its description and its record first, then its files, sparse
// ones with the map of their data.
//
// It is a pure codec: it opens no file. Callers must check the record against the files.
package bundle

import (
	"archive/tar"
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"strconv"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/sparse"
)

// FileHeader is the name of the first entry: an artifact.TarHeader as JSON. The second is artifact.TitleVMConfig, with
// TarHeader.Snapshot. Other programs replace the first entry, so FileSums does not list it.
const FileHeader = "snapshot.json"

// Version is the version of the stream, artifact.TarHeader.Version.
const Version = 1

const copyBuffer = 1 << 20

// File is one file of a stream.
type File struct {
	Name string
	Size int64 // of the whole file, holes included
	// Extents are the data ranges of a sparse file; nil: the file has no holes.
	Extents []sparse.Extent
	Sum     string // sha256 of the data as they are in the stream, hex; "": unknown
}

// Data returns the number of bytes of the file in the stream.
func (f File) Data() int64 {
	if f.Extents == nil {
		return f.Size
	}
	return sparse.Data(f.Extents)
}

// Map returns the extents of the file; a file without holes has one extent.
func (f File) Map() []sparse.Extent {
	if f.Extents == nil && f.Size > 0 {
		return []sparse.Extent{{Offset: 0, Length: f.Size}}
	}
	return f.Extents
}

// Writer writes a stream: call Header, File for each file, then Close.
type Writer struct {
	out  *bufio.Writer
	tar  *tar.Writer
	sum  hash.Hash // nil: no sums
	sums []byte
	maps int // bytes left for maps
}

// NewWriter begins a stream. With sums, a last entry has the sha256 of each file, which a reader verifies. Without
// sums, the stream has only the entries of the files.
func NewWriter(w io.Writer, sums bool) *Writer {
	out := bufio.NewWriterSize(w, copyBuffer) // headers and small files are written together
	b := &Writer{out: out, tar: tar.NewWriter(out), maps: artifact.MaxMaps}
	if sums {
		b.sum = sha256.New()
	}
	return b
}

// Header writes the first two entries. It fills in h.Version.
func (w *Writer) Header(h artifact.TarHeader) error {
	record := h.Snapshot
	h.Version, h.Snapshot = Version, nil
	data, err := json.Marshal(h)
	if err != nil {
		return fmt.Errorf("write the description of the snapshot: %w", err)
	}
	if err := w.File(File{Name: FileHeader, Size: int64(len(data))}, bytes.NewReader(data)); err != nil || record == nil {
		return err
	}
	return w.File(File{Name: artifact.TitleVMConfig, Size: int64(len(record))}, bytes.NewReader(record))
}

// File writes one file. data are its data; for a sparse file, the data of the extents one after the other. data must
// end exactly where they do.
// Errors: DataLoss when data is shorter or longer than that.
func (w *Writer) File(f File, data io.Reader) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: f.Name, Size: f.Size, Mode: 0o600, ModTime: time.Unix(0, 0), Format: tar.FormatPAX, PAXRecords: map[string]string{}}
	if f.Extents != nil {
		if err := sparse.Check(f.Extents, f.Size); err != nil {
			return fmt.Errorf("write %s: %w", f.Name, err)
		}
		wide := artifact.FitMap(f.Extents, &w.maps)
		if len(wide) != len(f.Extents) {
			data = sparse.Widen(data, f.Extents, wide)
			f.Extents, f.Sum = wide, ""
		}
		h.PAXRecords[artifact.PAXSparseMap] = string(sparse.Encode(f.Extents))
		h.PAXRecords[artifact.PAXSparseSize] = strconv.FormatInt(f.Size, 10)
		h.Size = f.Data()
	}
	if f.Sum != "" {
		h.PAXRecords[artifact.PAXSum] = f.Sum
	}
	if err := w.tar.WriteHeader(h); err != nil {
		return fmt.Errorf("write %s: %w", f.Name, err)
	}
	if h.Size >= copyBuffer { // smaller data stays in the buffer; large data should bypass it
		if err := w.out.Flush(); err != nil {
			return fmt.Errorf("write %s: %w", f.Name, err)
		}
	}
	n, err := copyHashed(w.tar, data, w.sum, h.Size)
	if errors.Is(err, tar.ErrWriteTooLong) {
		return errdefs.DataLossf("write %s: it has more bytes of data than its recorded size, %d: it changed during the export", f.Name, h.Size)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", f.Name, err)
	}
	if n != h.Size {
		return errdefs.DataLossf("write %s: it has %d bytes of data, but its recorded size is %d: it changed during the export", f.Name, n, h.Size)
	}
	if w.sum != nil {
		if f.Name != FileHeader {
			w.sums = fmt.Appendf(w.sums, "%x  %s\n", w.sum.Sum(nil), f.Name)
		}
		w.sum.Reset()
	}
	return nil
}

// Close ends the stream; a reader treats a stream without this end as truncated. It does not close the underlying
// writer.
func (w *Writer) Close() error {
	if w.sum != nil {
		sums := w.sums
		w.sum = nil
		if err := w.File(File{Name: artifact.FileSums, Size: int64(len(sums))}, bytes.NewReader(sums)); err != nil {
			return err
		}
	}
	if err := w.tar.Close(); err != nil {
		return fmt.Errorf("end the stream: %w", err)
	}
	if err := w.out.Flush(); err != nil {
		return fmt.Errorf("end the stream: %w", err)
	}
	return nil
}

// copyHashed copies r to w while another goroutine hashes the data: on most machines the hash is slower than the copy.
// sum may be nil; size is the expected number of bytes.
func copyHashed(w io.Writer, r io.Reader, sum hash.Hash, size int64) (int64, error) {
	var total int64
	length := min(copyBuffer, size+1)
	bufs := [2][]byte{make([]byte, length), make([]byte, length)}
	hashed := make(chan struct{}, 1)
	hashed <- struct{}{}
	defer func() { <-hashed }()
	for i := 0; ; i = 1 - i {
		n, rerr := io.ReadFull(r, bufs[i])
		p := bufs[i][:n]
		<-hashed
		if sum != nil && n > 0 {
			go func() { _, _ = sum.Write(p); hashed <- struct{}{} }() // the loop and the defer wait for it
		} else {
			hashed <- struct{}{}
		}
		if n > 0 {
			if _, err := w.Write(p); err != nil {
				return total, err
			}
			total += int64(n)
		}
		switch {
		case rerr == nil:
		case errors.Is(rerr, io.EOF), errors.Is(rerr, io.ErrUnexpectedEOF): // possibly too early: callers know the expected size
			return total, nil
		default:
			return total, rerr
		}
	}
}

func sumOf(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)) }

// parseSums reads what Close writes: lines with a sum and a name.
func parseSums(data []byte) (map[string]string, error) {
	sums := map[string]string{}
	for line := range strings.Lines(string(data)) {
		sum, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		if !ok || !isSum(sum) || sums[name] != "" {
			return nil, errdefs.Invalidf("the checksums of the stream have an invalid line: %.100q", line)
		}
		sums[name] = sum
	}
	return sums, nil
}

func isSum(s string) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == sha256.Size
}
