// Package local is the image store of one host: a folder with content named by SHA-256, and names that point at it.
//
// Several processes may share the folder. It does not download or translate names, and it does not know which VM uses an
// image: callers of Remove tell it.
package local

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/oci"
	"cocoonstack.io/cocoon/internal/keylock"
)

var (
	_ image.Store      = (*Store)(nil)
	_ image.FileOpener = (*Store)(nil)
)

// Config says where the store is and how much an image may use.
type Config struct {
	Dir     string       // absolute; created if missing, mode 0700
	Arch    string       // GOARCH of the guests; "" is the host's
	Mkfs    string       // path of mkfs.ext4; "" searches for it
	QemuImg string       // path of qemu-img; "" searches for it
	Limits  oci.Limits   // of container images; the zero value is oci.DefaultLimits
	Disk    int64        // bytes of one disk image, and of the disk it claims to be; 0 is 16 TiB
	Log     *slog.Logger // nil discards
}

// Store implements image.Store. Its folder:
//
//	lock                    locked exclusively for every change of names, shared while a temporary folder is created
//	data/<sha256>/          one image: image.json and disk.raw, disk.qcow2 or config.json; never changed, only removed
//	data/<sha256>/disk.raw  the same disk as disk.qcow2, made for the first VM whose disks must be raw
//	data/<sha256>/grants.json who has proved that they may have it, by repository; entries are only added
//	data/<sha256>/unclaimed mark: remove it unless a name refers to it; an import or a removal is not finished
//	data/<sha256>/used      empty; its time is the last use of the image
//	grants.key              key of the hashes in grants.json
//	links/<name>            link to ../data/<sha256>; slashes of the name are written as %
//	origins/<name>.json     where the content of the name was fetched from
//	layers/<key>/           one layer of the container images whose records name it: layer.ext4 and what restores the tar
//	templates/ext4-<bytes>  empty file systems, the backing of the writable layers of container images
//	tmp/<random>/           work in progress, locked by its owner
type Store struct {
	cfg Config

	mu     sync.Mutex
	opened bool
	// building prevents that several images build one layer at the same time. There is no deadlock: layers of an image wait only
	// for those below them, and names include what is below, so two images cannot wait for each other.
	building keylock.Locks[string]
	seen     sync.Map // path → true: unknown files that were already logged

	statfs func(path string) (diskUsage, error) // set by tests, else the kernel's
}

const defaultMaxDisk = 16 << 40

// New checks cfg. It touches nothing; the first use or Open does.
func New(cfg Config) (*Store, error) {
	if !filepath.IsAbs(cfg.Dir) {
		return nil, errdefs.Invalidf("the image folder %q must be an absolute path", cfg.Dir)
	}
	cfg.Dir = filepath.Clean(cfg.Dir)
	cfg.Arch = cmp.Or(cfg.Arch, runtime.GOARCH)
	if cfg.Limits == (oci.Limits{}) {
		cfg.Limits = oci.DefaultLimits()
	}
	cfg.Disk = cmp.Or(cfg.Disk, defaultMaxDisk)
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	return &Store{cfg: cfg, statfs: statfs}, nil
}

// Open creates the store's folders and removes the leftovers of killed processes. It does not touch the work of living
// ones. Every method calls it; a call at start only does this work earlier.
func (s *Store) Open(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.opened {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, d := range []string{s.path(), s.path("data"), s.path("links"), s.path("origins"), s.path("layers"), s.path("templates"), s.path("tmp")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return fmt.Errorf("open the image store: %w", full(err))
		}
	}
	if err := s.sweep(); err != nil {
		return fmt.Errorf("open the image store %s: %w", s.cfg.Dir, err)
	}
	s.opened = true
	return nil
}

func (s *Store) path(elem ...string) string {
	return filepath.Join(append([]string{s.cfg.Dir}, elem...)...)
}

// Get resolves name, name:tag, id, or a unique prefix of an id of at least minPrefix characters.
func (s *Store) Get(ctx context.Context, ref string) (image.Image, error) {
	if err := s.Open(ctx); err != nil {
		return image.Image{}, err
	}
	r, err := s.resolve(ref)
	if err != nil {
		return image.Image{}, err
	}
	rec, err := s.load(r.hex)
	if err != nil {
		return image.Image{}, err
	}
	return s.describe(rec, r.name), nil
}

// List returns one entry for each name.
func (s *Store) List(ctx context.Context) ([]image.Image, error) {
	if err := s.Open(ctx); err != nil {
		return nil, err
	}
	names, err := s.names()
	if err != nil {
		return nil, err
	}
	out := make([]image.Image, 0, len(names))
	for _, n := range names {
		rec, err := s.load(n.hex)
		if errdefs.IsNotFound(err) {
			continue // removed meanwhile
		}
		if err != nil {
			s.cfg.Log.Warn("image record unreadable", "image", n.name, "err", err)
			continue
		}
		out = append(out, s.describe(rec, n.name))
	}
	return out, ctx.Err()
}

// Remove removes a name, or, given an id, every name of that image. Content without a name is deleted, unless inUse says
// that something still boots from it; a later Remove or Collect then deletes it.
func (s *Store) Remove(ctx context.Context, ref string, inUse func(digest string) bool) error {
	if err := s.Open(ctx); err != nil {
		return err
	}
	if err := s.remove(ref, inUse); err != nil {
		return err
	}
	_, err := s.collect(image.GCLimits{}, inUse)
	return err
}

// remove removes names. The following collection deletes content without a name.
func (s *Store) remove(ref string, inUse func(digest string) bool) error {
	unlock, err := s.lock(exclusive)
	if err != nil {
		return err
	}
	defer unlock()
	r, err := s.resolve(ref)
	if err != nil {
		return err
	}
	all, err := s.names()
	if err != nil {
		return err
	}
	others := slices.ContainsFunc(all, func(n named) bool { return n.hex == r.hex && !r.covers(n) })
	if !others && !used(inUse, r.hex) {
		if err := s.unclaim(r.hex); err != nil { // after this, a crash leads to removal, not to content without a name
			return err
		}
	}
	for _, n := range all {
		if n.hex == r.hex && r.covers(n) {
			if err := s.forget(n.name); err != nil {
				return err
			}
		}
	}
	return s.syncNames()
}

func used(inUse func(string) bool, hex string) bool { return inUse != nil && inUse(digest(hex)) }

// reference is a resolved ref.
type reference struct {
	name string // the given name, or the first name of the given id; "" if it has none
	hex  string
	byID bool
}

// covers reports whether removing the reference removes the name n of the same image.
func (r reference) covers(n named) bool { return r.byID || n.name == r.name }

const minPrefix = 4 // hexadecimal digits

func (s *Store) resolve(ref string) (reference, error) {
	if hex, ok := strings.CutPrefix(ref, "sha256:"); ok {
		return s.byPrefix(ref, hex)
	}
	w, err := parseRef(ref)
	if err != nil {
		return reference{}, err
	}
	if w.digest != "" {
		return s.byDigest(w)
	}
	for _, key := range w.keys() {
		hex, err := s.readName(key)
		if err == nil {
			return reference{name: key, hex: hex}, nil
		}
		if !errdefs.IsNotFound(err) {
			return reference{}, err
		}
	}
	if isHexPrefix(ref) {
		return s.byPrefix(ref, ref)
	}
	return reference{}, notFound(ref)
}

// byDigest finds name@sha256:<hex>: the image that was pulled by exactly this reference, or an image of that name whose
// content or registry manifest has the digest.
func (s *Store) byDigest(w wanted) (reference, error) {
	for _, repo := range w.repos {
		key := repo + "@" + w.digest
		if hex, err := s.readName(key); err == nil {
			return reference{name: key, hex: hex}, nil
		}
	}
	all, err := s.names()
	if err != nil {
		return reference{}, err
	}
	for _, n := range all {
		if w.repository(n.name) && (digest(n.hex) == w.digest || s.origin(n.name, n.hex).Digest == w.digest) {
			return reference{name: n.name, hex: n.hex}, nil
		}
	}
	return reference{}, notFound(w.ref)
}

func (s *Store) byPrefix(ref, hex string) (reference, error) {
	if !isHexPrefix(hex) {
		return reference{}, errdefs.Invalidf("invalid image id %q; use %d to 64 hexadecimal digits after sha256:", ref, minPrefix)
	}
	dirs, err := os.ReadDir(s.path("data"))
	if err != nil {
		return reference{}, fmt.Errorf("list images: %w", err)
	}
	var hits []string
	for _, d := range dirs {
		if isHex(d.Name()) && strings.HasPrefix(d.Name(), hex) {
			hits = append(hits, d.Name())
		}
	}
	switch len(hits) {
	case 0:
		return reference{}, notFound(ref)
	case 1:
	default:
		return reference{}, errdefs.Invalidf("%q matches %d images; use more characters of the id", ref, len(hits))
	}
	r := reference{hex: hits[0], byID: true}
	names, err := s.names()
	if i := slices.IndexFunc(names, func(n named) bool { return n.hex == r.hex }); i >= 0 {
		r.name = names[i].name
	}
	return r, err
}

func notFound(ref string) error {
	return errdefs.NotFoundf("image not found: %q; `cocoon image list` shows all images", ref)
}
