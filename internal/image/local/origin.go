package local

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

// originFile is origins/<name>.json. It is written before its name moves, so it describes both the new and the old content
// of the name: whichever a crash leaves, its origin is known. Entries of other content are ignored.
type originFile struct {
	Version int `json:"version"`
	originOf
	Previous *originOf `json:"previous,omitempty"`
}

type originOf struct {
	ID string `json:"id"` // of the content
	image.Origin
}

const originVersion = 1

func (s *Store) originPath(key string) string { return s.path("origins", escape(key)+".json") }

// Origin returns the image of exactly this key, and where it came from: the zero image.Origin when it was imported here.
// Errors: NotFound when the key does not exist.
func (s *Store) Origin(ctx context.Context, key string) (image.Origin, image.Image, error) {
	if err := s.Open(ctx); err != nil {
		return image.Origin{}, image.Image{}, err
	}
	if err := CheckKey(key); err != nil {
		return image.Origin{}, image.Image{}, err
	}
	hex, err := s.readName(key)
	if err != nil {
		return image.Origin{}, image.Image{}, err
	}
	rec, err := s.load(hex)
	if err != nil {
		return image.Origin{}, image.Image{}, err
	}
	return s.origin(key, hex), s.describe(rec, key), nil
}

// origin returns the known origin of a name's content. An unreadable file must not lose the image: at worst it is fetched
// again.
func (s *Store) origin(key, hex string) image.Origin {
	if key == "" {
		return image.Origin{}
	}
	data, err := os.ReadFile(s.originPath(key))
	if err != nil {
		return image.Origin{}
	}
	var f originFile
	if err := json.Unmarshal(data, &f); err != nil || f.Version != originVersion {
		return image.Origin{}
	}
	switch {
	case f.ID == digest(hex):
		return f.Origin
	case f.Previous != nil && f.Previous.ID == digest(hex):
		return f.Previous.Origin
	}
	return image.Origin{}
}

// setOrigin records where the content came from, before a name points at it.
// Preconditions: the exclusive lock is held.
func (s *Store) setOrigin(work *workdir, key, hex string, o image.Origin) error {
	f := originFile{Version: originVersion, originOf: originOf{ID: digest(hex), Origin: o}}
	if was, err := s.readName(key); err == nil && was != hex {
		if old := s.origin(key, was); !old.IsZero() {
			f.Previous = &originOf{ID: digest(was), Origin: old}
		}
	}
	data, err := json.Marshal(f)
	if err != nil {
		return fmt.Errorf("encode the origin of image %s: %w", key, err)
	}
	tmp := work.join("origin")
	if err := atomicfile.WriteFile(tmp, append(data, '\n'), 0o600); err != nil {
		return err
	}
	return atomicfile.Rename(tmp, s.originPath(key))
}

func (s *Store) dropOrigin(key string) error {
	if err := os.Remove(s.originPath(key)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget the origin of image %s: %w", key, err)
	}
	return nil
}

// Touch records that the image was used now. It does not sync: a lost record only makes an image look longer unused than
// it is.
func (s *Store) Touch(id string) {
	hex, ok := hexOf(id)
	if !ok {
		return
	}
	now := time.Now()
	path := s.path("data", hex, usedFile)
	if err := os.Chtimes(path, now, now); errors.Is(err, fs.ErrNotExist) {
		if f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600); err == nil {
			f.Close()
		}
	}
}

// usedAt is when content was last touched, or created.
func (s *Store) usedAt(rec record) time.Time {
	hex, _ := hexOf(rec.ID)
	if info, err := os.Stat(s.path("data", hex, usedFile)); err == nil {
		return info.ModTime().UTC().Truncate(time.Millisecond)
	}
	return rec.CreatedAt
}

// describe returns the image of a record under one of its names.
func (s *Store) describe(rec record, name string) image.Image {
	hex, _ := hexOf(rec.ID)
	o := s.origin(name, hex)
	return image.Image{
		ID: rec.ID, Name: name, Type: rec.Type, Size: rec.Size, CreatedAt: rec.CreatedAt, Config: rec.Process, Arch: rec.Arch,
		Digest: o.Digest, Source: o.URL, UsedAt: s.usedAt(rec),
	}
}

// Link adds another name to content in the store, or changes the origin of a name that it has.
// Errors: NotFound when the store does not have the content (any more).
func (s *Store) Link(ctx context.Context, key, id string, o image.Origin) (img image.Image, err error) {
	if err := CheckKey(key); err != nil {
		return image.Image{}, err
	}
	hex, ok := hexOf(id)
	if !ok {
		return image.Image{}, errdefs.Invalidf("invalid image id %q; use sha256: and 64 hexadecimal digits", id)
	}
	if err := s.Open(ctx); err != nil {
		return image.Image{}, err
	}
	work, err := s.newWork()
	if err != nil {
		return image.Image{}, err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	rec, err := s.place(work, filepath.Join(work.path, "out"), false, target{key: key, origin: o}, hex)
	if err != nil {
		return image.Image{}, fmt.Errorf("name image %s: %w", key, full(err))
	}
	return s.describe(rec, key), nil
}
