package local

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/compress"
	"cocoonstack.io/cocoon/internal/image/disk"
	"cocoonstack.io/cocoon/internal/image/oci"
	"cocoonstack.io/cocoon/internal/ociname"
	"cocoonstack.io/cocoon/internal/sparse"
)

// Import reads an image from r, recognises its format, and stores it durably under name before it returns.
func (s *Store) Import(ctx context.Context, name string, r io.Reader, progress func(int64)) (image.Image, error) {
	key, err := ParseName(name)
	if err != nil {
		return image.Image{}, err
	}
	repo, tag := ociname.SplitTag(key)
	return s.put(ctx, "import", target{key: shortRepo(repo) + ":" + tag}, &source{ctx: ctx, r: r, progress: progress})
}

// Put is Import for fetched content: it uses exactly the given key and stores the origin. Content that the store already
// has only gets the name. r is read to its end, and an error of r is returned unchanged.
func (s *Store) Put(ctx context.Context, key string, r io.Reader, o image.Fetched) (image.Image, error) {
	if err := CheckKey(key); err != nil {
		return image.Image{}, err
	}
	src := &source{ctx: ctx, r: r}
	t := target{key: key, origin: o.Origin, accept: o.Accept, total: o.Total}
	if o.Progress != nil {
		src.progress = func(n int64) { o.Progress(image.PhaseDownload, n) }
		t.phase = func(phase string) { o.Progress(phase, src.read) }
	}
	return s.put(ctx, "store", t, src)
}

// target is the destination of content.
type target struct {
	key    string
	origin image.Origin // zero: imported here
	accept func(id string) error
	phase  func(string)
	total  int64
}

func (t target) enter(phase string) {
	if t.phase != nil {
		t.phase(phase)
	}
}

func (s *Store) put(ctx context.Context, verb string, t target, src *source) (image.Image, error) {
	if err := s.Open(ctx); err != nil {
		return image.Image{}, err
	}
	rec, err := s.take(ctx, t, src)
	switch {
	case src.failed != nil: // what the parsers say about the missing bytes does not matter
		return image.Image{}, fmt.Errorf("%s image %s: read it: %w", verb, t.key, src.failed)
	case err != nil:
		return image.Image{}, fmt.Errorf("%s image %s: %w", verb, t.key, full(err))
	}
	return s.describe(rec, t.key), nil
}

// source counts the bytes read and keeps an error of the reader itself, so that it is not taken for bad content.
type source struct {
	ctx      context.Context
	r        io.Reader
	progress func(int64)
	read     int64
	failed   error
}

func (s *source) Read(p []byte) (int, error) {
	if err := s.ctx.Err(); err != nil {
		s.failed = err
		return 0, err
	}
	n, err := s.r.Read(p)
	s.read += int64(n)
	if n > 0 && s.progress != nil {
		s.progress(s.read)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		s.failed = err
	}
	return n, err
}

// take does an import in a temporary folder and publishes the result.
func (s *Store) take(ctx context.Context, t target, src *source) (rec record, err error) {
	work, err := s.newWork()
	if err != nil {
		return record{}, err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	plain, _, err := compress.Reader(bufio.NewReaderSize(src, 1<<18))
	if err != nil {
		return record{}, badCompression(err)
	}
	defer plain.Close()
	in := bufio.NewReaderSize(plain, disk.HeadSize)
	head, err := in.Peek(disk.HeadSize)
	if err != nil && !errors.Is(err, io.EOF) {
		return record{}, badCompression(err)
	}
	if len(head) == 0 {
		return record{}, errdefs.Invalidf("there is nothing to import: the input is empty")
	}
	room, err := s.roomFor(t.total)
	if err != nil {
		return record{}, err
	}
	var b builder
	if oci.IsArchive(head) {
		b, err = s.readArchive(ctx, work, t.key, in, s.archiveLimits(room))
	} else {
		b, err = s.readDisk(work, append([]byte(nil), head...), in, room)
	}
	if err == nil {
		_, err = io.Copy(io.Discard, src) // read to the end: a reader that checks a digest reports it there
	}
	if err == nil && t.accept != nil {
		err = t.accept(digest(b.hex))
	}
	if err == nil {
		t.enter(cmp.Or(b.phase, image.PhaseUnpack))
		rec, err = s.publish(ctx, work, t, b)
	}
	return rec, outOfRoom(err, room)
}

// archiveLimits are the configured limits, reduced so that an import cannot fill the disk on which VMs write: during an
// import, an archive uses its space twice.
func (s *Store) archiveLimits(room int64) oci.Limits {
	lim := s.cfg.Limits
	lim.Archive, lim.Unpacked = min(lim.Archive, room/2), min(lim.Unpacked, room/2)
	return lim
}

func badCompression(err error) error {
	if errdefs.ClassOf(err) != errdefs.Internal {
		return err // the decompressor's error is more precise
	}
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		return errdefs.DataLossf("the compressed file is truncated; fetch it again")
	}
	return errdefs.DataLossf("the compressed file is damaged (%w); fetch it again", err)
}

// builder is content that was read and identified.
type builder struct {
	hex   string
	phase string                                                // the phase that is reported while it is built; "" is image.PhaseUnpack
	build func(ctx context.Context, dir string) (record, error) // creates the files in dir, synced; called once
}

// publish makes content and name visible and durable. The order is such that a crash at any point leaves either everything
// or, after the next sweep, nothing.
func (s *Store) publish(ctx context.Context, work *workdir, t target, b builder) (record, error) {
	for try := 0; ; try++ {
		out := work.join("out")
		built := try > 0 || !s.intact(b.hex)
		if built {
			if err := s.buildInto(ctx, out, b); err != nil {
				return record{}, err
			}
		}
		rec, err := s.place(work, out, built, t, b.hex)
		if try == 0 && !built && errdefs.IsNotFound(err) {
			continue // removed between the check and the lock
		}
		return rec, err
	}
}

func (s *Store) buildInto(ctx context.Context, out string, b builder) error {
	if err := os.Mkdir(out, 0o700); err != nil {
		return fmt.Errorf("build image: %w", err)
	}
	rec, err := b.build(ctx, out)
	if err != nil {
		return err
	}
	rec.Version, rec.ID, rec.CreatedAt = recordVersion, digest(b.hex), time.Now().UTC().Truncate(time.Millisecond)
	if rec.File != "" {
		info, err := os.Stat(filepath.Join(out, rec.File))
		if err != nil {
			return fmt.Errorf("build image: %w", err)
		}
		rec.Length, rec.Size = info.Size(), sparse.Occupied(info)
	}
	if err := atomicfile.WriteFile(filepath.Join(out, unclaimedFile), nil, 0o600); err != nil {
		return err
	}
	return rec.write(out)
}

func (s *Store) place(work *workdir, out string, built bool, t target, hex string) (record, error) {
	unlock, err := s.lock(exclusive)
	if err != nil {
		return record{}, err
	}
	defer unlock()
	dir := s.path("data", hex)
	if !s.intact(hex) {
		if !built {
			return record{}, notFound(digest(hex))
		}
		if _, err := os.Stat(dir); err == nil { // damaged: replace it
			if err := s.hide(work, dir); err != nil {
				return record{}, err
			}
		} else if !errors.Is(err, fs.ErrNotExist) {
			return record{}, fmt.Errorf("place image: %w", err)
		}
		if err := atomicfile.Rename(out, dir); err != nil {
			return record{}, err
		}
	}
	// The origin comes before the name: a name without an origin would count as imported here.
	if !t.origin.IsZero() {
		if err := s.setOrigin(work, t.key, hex, t.origin); err != nil {
			return record{}, err
		}
	}
	if err := s.setName(work.path, t.key, hex); err != nil {
		return record{}, err
	}
	if t.origin.IsZero() {
		if err := s.dropOrigin(t.key); err != nil {
			return record{}, err
		}
	}
	if err := s.claim(hex); err != nil {
		return record{}, err
	}
	s.Touch(digest(hex))
	return s.load(hex)
}
