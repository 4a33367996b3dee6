// Package s3 keeps a registry's objects in a bucket of an S3-compatible service.
//
// Uploads in progress are files in a local folder: the parts of S3 uploads are larger than the chunks that clients
// send, and the key, a digest, is known only at the end. The package creates no bucket, and does not prevent a second
// registry from using it.
package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/objects"
)

// Config configures the bucket.
type Config struct {
	Endpoint string // host or host:port
	Insecure bool   // plain HTTP
	Region   string
	Bucket   string
	Prefix   string // before every key, "epoch/"
	Access   string
	Secret   string
	Staging  string // local folder for uploads in progress; must exist
}

// Store is a bucket.
type Store struct {
	cfg    Config
	client *minio.Client
}

var _ objects.Store = (*Store)(nil)

// New returns the store of a bucket, which must exist.
func New(ctx context.Context, cfg Config) (*Store, error) {
	client, err := minio.New(cfg.Endpoint, &minio.Options{
		Creds: credentials.NewStaticV4(cfg.Access, cfg.Secret, ""), Secure: !cfg.Insecure, Region: cfg.Region,
	})
	if err != nil {
		return nil, errdefs.Invalidf("S3 endpoint %q: %w", cfg.Endpoint, err)
	}
	s := &Store{cfg: cfg, client: client}
	ok, err := client.BucketExists(ctx, cfg.Bucket)
	if err != nil {
		return nil, errdefs.Preconditionf("S3 bucket %s at %s: %w", cfg.Bucket, cfg.Endpoint, err)
	}
	if !ok {
		return nil, errdefs.Preconditionf("S3 bucket %s at %s does not exist: make it first", cfg.Bucket, cfg.Endpoint)
	}
	return s, nil
}

// Staging returns the local folder.
func (s *Store) Staging() string { return s.cfg.Staging }

func (s *Store) name(key string) string { return s.cfg.Prefix + key }

// fault classifies errors of the service.
func fault(what, key string, err error) error {
	if err == nil {
		return nil
	}
	switch r := minio.ToErrorResponse(err); {
	case r.StatusCode == http.StatusNotFound || r.Code == minio.NoSuchKey:
		return errdefs.NotFoundf("no object %s", key)
	case r.StatusCode == http.StatusForbidden:
		return errdefs.Preconditionf("%s %s: the S3 service refuses it: %w", what, key, err)
	case r.StatusCode == http.StatusInsufficientStorage:
		return errdefs.Exhaustedf("%s %s: the S3 service is full: %w", what, key, err)
	case r.StatusCode >= 500 || r.StatusCode == 0:
		return errdefs.Unavailablef("%s %s: the S3 service does not answer as it should: %w", what, key, err)
	}
	return fmt.Errorf("%s %s: %w", what, key, err)
}

func infoOf(o minio.ObjectInfo) objects.Info {
	return objects.Info{Size: o.Size, Modified: o.LastModified}
}

// Stat describes an object.
func (s *Store) Stat(ctx context.Context, key string) (objects.Info, error) {
	o, err := s.client.StatObject(ctx, s.cfg.Bucket, s.name(key), minio.StatObjectOptions{})
	return infoOf(o), fault("describe", key, err)
}

// Open opens an object; it requests the first byte only on the first read.
func (s *Store) Open(ctx context.Context, key string) (io.ReadSeekCloser, objects.Info, error) {
	info, err := s.Stat(ctx, key)
	if err != nil {
		return nil, info, err
	}
	return &reader{ctx: ctx, s: s, key: key, size: info.Size}, info, nil
}

// reader requests the rest of an object from the read offset. For a short forward seek, it reads and discards.
type reader struct {
	ctx  context.Context //nolint:containedctx // of the request that reads: io.Reader has no place for it
	s    *Store
	key  string
	size int64
	pos  int64
	body io.ReadCloser // its offset is at; nil: no request is open
	at   int64
}

const (
	near    = 1 << 20 // up to this many bytes, reading is cheaper than a new request
	maxCopy = 5 << 30 // of one copy within the service; larger objects are copied in parts
)

func (r *reader) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += r.pos
	case io.SeekEnd:
		offset += r.size
	}
	if offset < 0 {
		return 0, errdefs.Invalidf("offset %d is before the beginning", offset)
	}
	r.pos = offset
	return offset, nil
}

func (r *reader) Read(p []byte) (int, error) {
	if r.pos >= r.size {
		return 0, io.EOF
	}
	if len(p) == 0 {
		return 0, nil
	}
	if err := r.place(); err != nil {
		return 0, err
	}
	n, err := r.body.Read(p[:min(int64(len(p)), r.size-r.pos)])
	r.pos += int64(n)
	r.at = r.pos
	switch {
	case n > 0:
		return n, nil // the next read returns the error again
	case errors.Is(err, io.EOF):
		return 0, errdefs.Unavailablef("read %s: the S3 service ended %d bytes early", r.key, r.size-r.pos)
	}
	return 0, fault("read", r.key, err)
}

// place makes body begin at pos.
func (r *reader) place() error {
	if r.body != nil && r.pos > r.at && r.pos-r.at <= near {
		n, err := io.CopyN(io.Discard, r.body, r.pos-r.at)
		if r.at += n; err != nil {
			return fault("read", r.key, err)
		}
	}
	if r.body != nil && r.at == r.pos {
		return nil
	}
	if err := r.Close(); err != nil {
		return err
	}
	var opts minio.GetObjectOptions
	if r.pos > 0 {
		if err := opts.SetRange(r.pos, r.size-1); err != nil {
			return err
		}
	}
	body, _, _, err := minio.Core{Client: r.s.client}.GetObject(r.ctx, r.s.cfg.Bucket, r.s.name(r.key), opts)
	if err != nil {
		return fault("read", r.key, err)
	}
	r.body, r.at = body, r.pos
	return nil
}

func (r *reader) Close() error {
	if r.body == nil {
		return nil
	}
	err := r.body.Close()
	r.body = nil
	return err
}

// Write replaces a small object.
func (s *Store) Write(ctx context.Context, key string, data []byte) error {
	opts := minio.PutObjectOptions{DisableContentSha256: len(data) == 0} // some services reject a signed stream of zero bytes
	_, err := s.client.PutObject(ctx, s.cfg.Bucket, s.name(key), bytes.NewReader(data), int64(len(data)), opts)
	return fault("write", key, err)
}

// Take uploads a file; the service assembles a large one from parts at the end.
func (s *Store) Take(ctx context.Context, key, path string) error {
	if _, err := s.client.FPutObject(ctx, s.cfg.Bucket, s.name(key), path, minio.PutObjectOptions{ContentType: "application/octet-stream"}); err != nil {
		return fault("store", key, err)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("store %s: %w", key, err)
	}
	return nil
}

// Move copies within the service.
func (s *Store) Move(ctx context.Context, from, to string) error {
	info, err := s.Stat(ctx, from)
	if err != nil {
		return err
	}
	to, src := s.name(to), minio.CopySrcOptions{Bucket: s.cfg.Bucket, Object: s.name(from)}
	if info.Size <= maxCopy {
		_, err = s.client.CopyObject(ctx, minio.CopyDestOptions{Bucket: s.cfg.Bucket, Object: to}, src)
	} else {
		_, err = s.client.ComposeObject(ctx, minio.CopyDestOptions{Bucket: s.cfg.Bucket, Object: to}, src)
	}
	if err != nil {
		return fault("move", from, err)
	}
	return s.Remove(ctx, from)
}

// Remove deletes an object.
func (s *Store) Remove(ctx context.Context, key string) error {
	err := fault("remove", key, s.client.RemoveObject(ctx, s.cfg.Bucket, s.name(key), minio.RemoveObjectOptions{}))
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// List lists by prefix and delimiter.
func (s *Store) List(ctx context.Context, prefix string) ([]objects.Entry, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the listing on an early return
	var out []objects.Entry
	for o := range s.client.ListObjects(ctx, s.cfg.Bucket, minio.ListObjectsOptions{Prefix: s.name(prefix) + "/"}) {
		if o.Err != nil {
			return nil, fault("list", prefix, o.Err)
		}
		e := objects.Entry{Name: path.Base(o.Key), Dir: strings.HasSuffix(o.Key, "/")}
		if !e.Dir {
			e.Info = infoOf(o)
		}
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b objects.Entry) int { return strings.Compare(a.Name, b.Name) })
	return out, ctx.Err()
}

// Sync does nothing: what the service has confirmed is durable.
func (s *Store) Sync(context.Context) error { return nil }
