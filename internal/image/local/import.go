package local

import (
	"bufio"
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
	"cocoonstack.io/cocoon/internal/image/disk"
	"cocoonstack.io/cocoon/internal/image/oci"
)

// Import reads an image from r, recognises it, and makes it durable under name before it returns.
func (s *Store) Import(ctx context.Context, name string, r io.Reader, progress func(int64)) (image.Image, error) {
	ref, err := ParseName(name)
	if err != nil {
		return image.Image{}, err
	}
	if err := s.Open(ctx); err != nil {
		return image.Image{}, err
	}
	src := &source{ctx: ctx, r: r, progress: progress}
	rec, err := s.take(ctx, ref, src)
	switch {
	case src.failed != nil: // what the parsers made of the missing bytes does not matter
		return image.Image{}, fmt.Errorf("import image %s: read it: %w", ref, src.failed)
	case err != nil:
		return image.Image{}, fmt.Errorf("import image %s: %w", ref, full(err))
	}
	return rec.image(ref), nil
}

// source counts what is read and remembers an error of the reader itself, so that it is not mistaken for bad content.
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

// take does the work of an import in a temporary folder and publishes the result.
func (s *Store) take(ctx context.Context, name string, src io.Reader) (rec record, err error) {
	work, err := s.newWork()
	if err != nil {
		return record{}, err
	}
	defer func() { err = errors.Join(err, work.close()) }()
	plain, err := oci.Decompress(bufio.NewReaderSize(src, 1<<18))
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
	room, err := s.room()
	if err != nil {
		return record{}, err
	}
	var b builder
	if oci.IsArchive(head) {
		b, err = s.readArchive(ctx, work, name, in, s.archiveLimits(room))
	} else {
		b, err = s.readDisk(work, append([]byte(nil), head...), in, room)
	}
	if err == nil {
		rec, err = s.publish(ctx, work, name, b)
	}
	if errdefs.Is(err, errdefs.ResourceExhausted) {
		err = fmt.Errorf("%w (the disk of the image store had room for %s)", err, human(room))
	}
	return rec, err
}

// archiveLimits are the configured ones, and never so large that an import could fill the disk on which VMs write: while
// one is read, it lies there twice.
func (s *Store) archiveLimits(room int64) oci.Limits {
	lim := s.cfg.Limits
	lim.Archive, lim.Unpacked = min(lim.Archive, room/2), min(lim.Unpacked, room/2)
	return lim
}

func badCompression(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		return errdefs.DataLossf("the compressed file is truncated; fetch it again")
	}
	return errdefs.DataLossf("the compressed file is damaged (%w); fetch it again", err)
}

// builder is content that was read and identified.
type builder struct {
	hex   string
	build func(ctx context.Context, dir string) (record, error) // makes the files in dir, synced, once
}

// publish makes content and name visible, durable, in an order that a crash at any point leaves either all or, after
// the next sweep, nothing.
func (s *Store) publish(ctx context.Context, work *workdir, name string, b builder) (record, error) {
	for try := 0; ; try++ {
		out := work.join("out")
		built := try > 0 || !s.intact(b.hex)
		if built {
			if err := s.buildInto(ctx, out, b); err != nil {
				return record{}, err
			}
		}
		rec, err := s.place(work, out, built, name, b.hex)
		if try == 0 && !built && errdefs.IsNotFound(err) {
			continue // removed between looking and locking
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
	info, err := os.Stat(filepath.Join(out, rec.File))
	if err != nil {
		return fmt.Errorf("build image: %w", err)
	}
	rec.Length, rec.Size = info.Size(), occupied(info)
	if err := atomicfile.WriteFile(filepath.Join(out, unclaimedFile), nil, 0o600); err != nil {
		return err
	}
	return rec.write(out)
}

func (s *Store) place(work *workdir, out string, built bool, name, hex string) (record, error) {
	unlock, err := s.lock(exclusive)
	if err != nil {
		return record{}, err
	}
	defer unlock()
	dir := s.path("images", hex)
	if !s.intact(hex) {
		if !built {
			return record{}, notFound(digest(hex))
		}
		if _, err := os.Stat(dir); err == nil { // damaged: replace it
			if err := s.discard(dir); err != nil {
				return record{}, err
			}
		} else if !errors.Is(err, fs.ErrNotExist) {
			return record{}, fmt.Errorf("place image: %w", err)
		}
		if err := atomicfile.Rename(out, dir); err != nil {
			return record{}, err
		}
	}
	if err := s.setName(work.path, name, hex); err != nil {
		return record{}, err
	}
	if err := s.claim(hex); err != nil {
		return record{}, err
	}
	return s.load(hex)
}
