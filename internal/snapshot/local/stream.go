package local

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/klauspost/compress/gzip"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/snapshot/bundle"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// flushEvery is after how many bytes an import asks the kernel to begin the write-back: otherwise the final sync would
// wait for all of it.
const flushEvery = 8 << 20

// Export implements snapshot.Store.
func (s *Store) Export(ctx context.Context, h snapshot.Held, w io.Writer) error {
	snap := h.Snapshot()
	err := snap.Portable()
	if err == nil {
		err = export(ctx, h, snap.Travels(), w)
	}
	if err != nil {
		return fmt.Errorf("export snapshot %s: %w", name(snap), err)
	}
	return nil
}

func export(ctx context.Context, h snapshot.Held, snap snapshot.Snapshot, w io.Writer) error {
	record, err := json.Marshal(snap)
	if err != nil {
		return err
	}
	b := bundle.NewWriter(w, true)
	if err := b.Header(artifact.TarHeader{Config: config(snap), Snapshot: record}); err != nil {
		return err
	}
	for _, file := range snap.Files() {
		if err := exportFile(ctx, b, h, file); err != nil {
			return err
		}
	}
	return b.Close()
}

func exportFile(ctx context.Context, b *bundle.Writer, h snapshot.Held, file string) error {
	f, err := h.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	m, err := f.Extents()
	if err != nil {
		return err
	}
	entry := bundle.File{Name: file, Size: f.Size()}
	if sparse.Data(m) < f.Size() {
		entry.Extents = append([]sparse.Extent{}, m...) // not nil, even if the whole file is a hole
	}
	return b.File(entry, interrupted{ctx, sparse.Reader(f, m)})
}

// interrupted is a reader that fails when its context ends.
type interrupted struct {
	ctx context.Context
	r   io.Reader
}

func (i interrupted) Read(p []byte) (int, error) {
	if err := i.ctx.Err(); err != nil {
		return 0, err
	}
	return i.r.Read(p)
}

func config(s snapshot.Snapshot) artifact.TarConfig {
	c := artifact.TarConfig{
		ID: s.ID, Name: s.Name, Description: s.Description, Image: s.Image, ImageDigest: s.ImageDigest, ImageType: s.ImageType,
		Hypervisor: s.Backend(), Driver: s.Hypervisor, CPU: s.CPU, Memory: s.Memory, Storage: s.Storage, NICs: s.NICs, Network: s.Network, Windows: s.Windows,
	}
	for _, id := range s.ImageBlobIDs {
		if c.ImageBlobIDs == nil {
			c.ImageBlobIDs = map[string]struct{}{}
		}
		c.ImageBlobIDs[id] = struct{}{}
	}
	return c
}

// Import implements snapshot.Store. progress gets the number of data bytes received so far. The snapshot gets a new id.
func (s *Store) Import(ctx context.Context, name, description string, r io.Reader, progress func(bytes int64)) (snapshot.Snapshot, error) {
	if err := s.Open(ctx); err != nil {
		return snapshot.Snapshot{}, err
	}
	if name != "" { // before a byte is read
		if err := checkName(name); err != nil {
			return snapshot.Snapshot{}, err
		}
	}
	snap, err := s.importStream(ctx, name, description, interrupted{ctx, r}, progress)
	if err != nil {
		return snapshot.Snapshot{}, fmt.Errorf("import a snapshot: %w", full(err))
	}
	return snap, nil
}

func (s *Store) importStream(ctx context.Context, name, description string, r io.Reader, progress func(int64)) (_ snapshot.Snapshot, err error) {
	plain, err := unpacked(r)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	b := bundle.NewReader(plain)
	h, err := b.Header()
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	snap, err := described(h)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	d, err := s.begin(ctx, &snap, name, description)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	defer func() { err = errors.Join(err, d.Discard()) }()
	if err := d.fetch(b, snap, progress); err != nil {
		return snapshot.Snapshot{}, err
	}
	return d.Commit(ctx, snap)
}

// begin makes the draft of a snapshot that comes from elsewhere, and leaves in snap what is valid here.
func (s *Store) begin(ctx context.Context, snap *snapshot.Snapshot, name, description string) (*draft, error) {
	if name != "" {
		snap.Name = name
	}
	if description != "" {
		snap.Description = description
	}
	heir, err := snap.Heir(vm.Behalf(ctx))
	if err != nil {
		return nil, err
	}
	*snap = heir
	return s.create(vm.OnBehalf(ctx, heir.Owner), heir.Name)
}

// described returns the record in the header of a stream.
func described(h artifact.TarHeader) (snapshot.Snapshot, error) {
	c := h.Config
	if _, ok := artifact.IsRecord(h.Snapshot, c.ID); !ok {
		return snapshot.Snapshot{}, artifact.Foreign(c.Hypervisor)
	}
	snap, err := parse(h.Snapshot)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	if !snap.TakenBy(c.Hypervisor, c.Driver) || c.CPU != snap.CPU || c.Memory != snap.Memory || c.Storage != snap.Storage || c.NICs != snap.NICs || c.ImageDigest != snap.ImageDigest {
		return snapshot.Snapshot{}, errdefs.Invalidf("snapshot %s: its description and its record at the beginning of the stream contradict each other", snap.Name)
	}
	return snap, nil
}

// fetch writes the files of a stream into the draft's folder.
func (d *draft) fetch(b *bundle.Reader, snap snapshot.Snapshot, progress func(int64)) error {
	wanted := map[string]bool{}
	for _, file := range snap.Files() {
		wanted[file] = true
	}
	var total int64
	for {
		f, err := b.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if !wanted[f.Name] {
			return errdefs.Invalidf("the stream has a file %s, which the record of snapshot %s does not list", f.Name, snap.Name)
		}
		delete(wanted, f.Name)
		if err := checkSize(snap, f.Name, f.Size); err != nil {
			return err
		}
		if room, err := d.store.room(); err != nil {
			return err
		} else if f.Data() > room {
			return errdefs.Exhaustedf("%s of snapshot %s has %d bytes, and the disk of the snapshot store has room for %d; `cocoon snapshot rm` frees some", f.Name, snap.Name, f.Data(), room)
		}
		if err := d.take(b, f, &total, progress); err != nil {
			return err
		}
	}
	for file := range wanted {
		return errdefs.DataLossf("the stream lacks %s of snapshot %s; fetch it again", file, snap.Name)
	}
	return nil
}

// take writes one file of a stream.
func (d *draft) take(b *bundle.Reader, f bundle.File, total *int64, progress func(int64)) (err error) {
	out, err := os.OpenFile(filepath.Join(d.Dir(), f.Name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if err := out.Truncate(f.Size); err != nil {
		return err
	}
	var since, from int64
	_, err = b.CopyTo(out, func(off, n int64) error {
		if *total += n; progress != nil {
			progress(*total)
		}
		if since += n; since >= flushEvery {
			sparse.Flush(out, from, off+n-from)
			since, from = 0, off+n
		}
		return nil
	})
	return err
}

// unpacked returns the content of r, decompressed if it is gzip.
func unpacked(r io.Reader) (io.Reader, error) {
	src := &remembered{r: r}
	in := bufio.NewReaderSize(src, 1<<16)
	if magic, _ := in.Peek(2); !bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		return in, nil
	}
	z, err := gzip.NewReader(in)
	if err != nil {
		return nil, src.blame(err)
	}
	return blamed{z, src}, nil
}

// remembered records the error of its reader, so that it is not mistaken for damaged data.
type remembered struct {
	r   io.Reader
	err error
}

func (m *remembered) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		m.err = err
	}
	return n, err
}

func (m *remembered) blame(err error) error {
	switch {
	case m.err != nil:
		return m.err
	case errors.Is(err, io.ErrUnexpectedEOF):
		return errdefs.DataLossf("the gzip stream is truncated (%w); fetch it again", err)
	}
	return errdefs.DataLossf("the gzip stream is damaged (%w); fetch it again", err)
}

type blamed struct {
	r   io.Reader
	src *remembered
}

func (b blamed) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = b.src.blame(err)
	}
	return n, err
}
