package content

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/objects"
	"cocoonstack.io/cocoon/internal/registry/reference"
)

const (
	repoSuffix = ".repo" // beside an upload's file: the repository it is for
	buffer     = 1 << 20
	writeBack  = 16 << 20 // after this many bytes the kernel is asked to begin the write-back, so that the final sync is short
)

var buffers = sync.Pool{New: func() any { b := make([]byte, buffer); return &b }}

// Upload is a blob that is being uploaded. It is a file that is hashed while it is written; after a restart, the
// registry reads the file again.
type Upload struct {
	c     *Content
	ID    string
	Repo  string
	owner string // who began it; "" if unknown
	lasts bool   // it outlives the request that began it
	path  string
	size  atomic.Int64
	used  atomic.Int64 // unix nanoseconds of the last byte

	busy sync.Mutex // held by the request that writes, finishes or cancels
	sum  hash.Hash  // of the bytes so far; nil: unknown, read the file
	over bool       // finished or cancelled
}

func uploadUnknown(id string) error {
	return code(BlobUploadUnknown, errdefs.NotFoundf("no upload %s; it was finished, cancelled or is too old: begin a new one", id))
}

// Begin starts an upload for owner that can be resumed, also after a restart.
// Errors: ResourceExhausted with the code TooManyRequests when owner or all owners together have reached the limits.
func (c *Content) Begin(repo, owner string) (*Upload, error) {
	u := c.newUpload(repo, owner)
	u.lasts = true
	if err := c.admit(u); err != nil {
		return nil, err
	}
	if err := u.create(); err != nil {
		c.forget(u)
		return nil, err
	}
	return u, nil
}

// begin starts an upload that ends with its request. The limits do not count it: it lives no longer than its
// connection.
func (c *Content) begin(repo string) (*Upload, error) {
	u := c.newUpload(repo, "")
	if err := u.create(); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sessions[u.ID] = u
	return u, nil
}

func (c *Content) newUpload(repo, owner string) *Upload {
	u := &Upload{c: c, ID: strings.ToLower(rand.Text()), Repo: repo, owner: owner, sum: digest.Canonical.Hash()}
	u.path = filepath.Join(c.store.Staging(), u.ID)
	u.used.Store(c.cfg.Now().UnixNano())
	return u
}

func (u *Upload) create() error {
	f, err := os.OpenFile(u.path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return objects.DiskFull(fmt.Errorf("begin an upload: %w", err))
	}
	f.Close()
	if !u.lasts {
		return nil
	}
	if err := os.WriteFile(u.path+repoSuffix, []byte(u.Repo+"\n"+u.owner), 0o600); err != nil {
		_ = os.Remove(u.path)
		_ = os.Remove(u.path + repoSuffix)
		return objects.DiskFull(fmt.Errorf("begin an upload: %w", err))
	}
	return nil
}

// Upload returns an upload of a repository.
func (c *Content) Upload(repo, id string) (*Upload, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	u := c.sessions[id]
	if u == nil || u.Repo != repo {
		return nil, uploadUnknown(id)
	}
	return u, nil
}

// countUploads adopts the uploads of the previous process.
func (c *Content) countUploads() error {
	all, err := os.ReadDir(c.store.Staging())
	if err != nil {
		return fmt.Errorf("load unfinished uploads: %w", err)
	}
	for _, e := range all {
		path := filepath.Join(c.store.Staging(), e.Name())
		id, isRepo := strings.CutSuffix(e.Name(), repoSuffix)
		text, err := os.ReadFile(filepath.Join(c.store.Staging(), id+repoSuffix))
		repo, owner, _ := strings.Cut(string(text), "\n") // earlier files have no owner: they count only in the total
		fi, statErr := os.Stat(filepath.Join(c.store.Staging(), id))
		if err != nil || statErr != nil || reference.Name(repo) != nil {
			// Nobody can resume it: it was not resumable, or it was killed while it began or ended.
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("remove a dead upload: %w", err)
			}
			continue
		}
		if isRepo {
			continue
		}
		u := &Upload{c: c, ID: id, Repo: repo, owner: owner, lasts: true, path: path}
		u.size.Store(fi.Size())
		u.used.Store(fi.ModTime().UnixNano())
		c.staged.Add(fi.Size())
		c.sessions[id] = u
	}
	return nil
}

// Size returns the number of bytes received so far.
func (u *Upload) Size() int64 { return u.size.Load() }

func (u *Upload) lock() error {
	if !u.busy.TryLock() {
		return code(BlobUploadInvalid, errdefs.Conflictf("another request is writing to this upload; ask for its status and go on from there"))
	}
	if u.over {
		u.busy.Unlock()
		return uploadUnknown(u.ID)
	}
	return nil
}

// ErrRange means that a chunk does not begin at the end of the bytes so far.
var ErrRange = errors.New("chunk out of order")

// Append adds the content of r. A non-negative start must equal the size so far; a non-negative length must equal the
// length of r. Bytes received before a failure are kept: the upload can resume from Size.
func (u *Upload) Append(ctx context.Context, r io.Reader, start, length int64) error {
	if err := u.lock(); err != nil {
		return err
	}
	defer u.busy.Unlock()
	if start >= 0 && start != u.Size() {
		return code(BlobUploadInvalid, errdefs.Invalidf("%w: it begins at %d, but the upload has %d bytes", ErrRange, start, u.Size()))
	}
	if err := u.rehash(ctx); err != nil {
		return err
	}
	f, err := os.OpenFile(u.path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("upload %s: %w", u.ID, err)
	}
	defer f.Close()
	before := u.Size()
	if err := u.copy(f, r); err != nil {
		return err
	}
	if n := u.Size() - before; length >= 0 && n != length {
		return code(SizeInvalid, errdefs.Invalidf("%d bytes were announced and %d arrived", length, n))
	}
	return nil
}

// copy writes and hashes in parallel. After a failed write it drops the hash: the file is authoritative.
func (u *Upload) copy(f *os.File, r io.Reader) error {
	bufs := [2]*[]byte{buffers.Get().(*[]byte), buffers.Get().(*[]byte)}
	hashed := make(chan struct{}, 1) // has an element while no hashing is in progress
	hashed <- struct{}{}
	defer func() {
		<-hashed
		buffers.Put(bufs[0])
		buffers.Put(bufs[1])
	}()
	flushed := u.Size()
	for i := 0; ; i = 1 - i {
		n, readErr := fill(r, *bufs[i])
		if n > 0 {
			p := (*bufs[i])[:n]
			if err := u.c.reserve(int64(n)); err != nil {
				return err
			}
			<-hashed
			go func() { // the next iteration and the defer wait for its end
				u.sum.Write(p)
				hashed <- struct{}{}
			}()
			if m, err := f.Write(p); err != nil {
				<-hashed
				u.sum = nil
				hashed <- struct{}{}
				u.size.Add(int64(m))
				u.c.staged.Add(int64(m - n))
				return objects.DiskFull(fmt.Errorf("upload %s: %w", u.ID, err))
			}
			u.used.Store(u.c.cfg.Now().UnixNano())
			if size := u.size.Add(int64(n)); size-flushed >= writeBack {
				_ = unix.SyncFileRange(int(f.Fd()), flushed, size-flushed, unix.SYNC_FILE_RANGE_WRITE) // only a hint
				flushed = size
			}
		}
		if errors.Is(readErr, io.EOF) {
			return nil
		}
		if readErr != nil {
			return code(BlobUploadInvalid, errdefs.Unavailablef("the body of the request broke off after %d bytes: %w", u.Size(), readErr))
		}
	}
}

// fill reads until it has enough for a write, or until r ends. It returns r's own error.
func fill(r io.Reader, buf []byte) (n int, err error) {
	const enough = 512 << 10
	for n < enough && err == nil {
		var m int
		m, err = r.Read(buf[n:])
		n += m
	}
	return n, err
}

// rehash reads the bytes from before a restart.
func (u *Upload) rehash(ctx context.Context) error {
	if u.sum != nil {
		return nil
	}
	d, n, err := hashFile(ctx, u.path, digest.Canonical)
	if err != nil {
		return fmt.Errorf("upload %s: %w", u.ID, err)
	}
	u.c.staged.Add(n - u.size.Load())
	u.size.Store(n)
	u.sum = d
	return nil
}

func hashFile(ctx context.Context, path string, alg digest.Algorithm) (hash.Hash, int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	return hashOf(ctx, f, alg)
}

func hashOf(ctx context.Context, r io.Reader, alg digest.Algorithm) (hash.Hash, int64, error) {
	h := alg.Hash()
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	n, err := io.CopyBuffer(struct{ io.Writer }{h}, reader{ctx, r}, *buf)
	return h, n, err
}

// reader is a reader that fails when its context ends.
type reader struct {
	ctx context.Context
	r   io.Reader
}

func (r reader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}

// Finish makes the upload the blob want, if its digest matches. A wrong digest ends the upload.
func (u *Upload) Finish(ctx context.Context, want digest.Digest) error {
	if err := u.lock(); err != nil {
		return err
	}
	defer u.busy.Unlock()
	if err := u.rehash(ctx); err != nil {
		return err
	}
	sum := u.sum
	if want.Algorithm() != digest.Canonical { // rare: read the file again
		var err error
		if sum, _, err = hashFile(ctx, u.path, want.Algorithm()); err != nil {
			return fmt.Errorf("upload %s: %w", u.ID, err)
		}
	}
	if got := digest.NewDigest(want.Algorithm(), sum); got != want {
		u.end()
		return code(DigestInvalid, errdefs.Invalidf("the %d bytes that arrived have the digest %s, not %s", u.Size(), got, want))
	}
	if err := u.c.take(ctx, u.Repo, want, u.path, u.Size()); err != nil {
		return err
	}
	u.end()
	return nil
}

// take makes a complete file a blob and adds it to the repository.
func (c *Content) take(ctx context.Context, repo string, d digest.Digest, path string, size int64) error {
	defer c.leases.pin(d)()
	if err := c.takeBlob(ctx, d, path, size); err != nil {
		return err
	}
	return c.store.Write(ctx, linkKey(repo, d), nil)
}

// Cancel removes the upload.
func (u *Upload) Cancel() error {
	if err := u.lock(); err != nil {
		return err
	}
	defer u.busy.Unlock()
	u.end()
	return nil
}

// end deregisters the upload and removes its files. The caller holds busy.
func (u *Upload) end() {
	u.over = true
	u.c.staged.Add(-u.size.Load())
	for _, p := range []string{u.path, u.path + repoSuffix} {
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			u.c.cfg.Log.Warn("upload not removed; the next start does it", "op", "upload", "err", err)
		}
	}
	u.c.forget(u)
}

// PutBlob stores the content of r as the blob of a digest, in one request. A negative length means unknown.
func (c *Content) PutBlob(ctx context.Context, repo string, d digest.Digest, r io.Reader, length int64) error {
	if length >= 0 && length <= small && d.Algorithm() == digest.Canonical {
		return c.putSmall(ctx, repo, d, r, int(length))
	}
	u, err := c.begin(repo)
	if err != nil {
		return err
	}
	if err := u.Append(ctx, r, 0, length); err != nil {
		_ = u.Cancel()
		return err
	}
	err = u.Finish(ctx, d)
	_ = u.Cancel() // no effect if it is finished
	return err
}

// reserve counts n bytes of an upload, if the quota allows them.
func (c *Content) reserve(n int64) error {
	if total := c.staged.Add(n) + c.used.Load(); c.cfg.Quota > 0 && total > c.cfg.Quota {
		c.staged.Add(-n)
		return code(Denied, errdefs.Exhaustedf("the registry's quota of %d bytes is used up: delete images and wait for the collection of garbage, or raise --quota", c.cfg.Quota))
	}
	return nil
}
