// Package objects is the contract of a registry's storage: objects under keys, in a folder or an S3 bucket.
//
// It knows no repositories, digests or rights; package content does. Implementations are in the folders below this one
// and pass the suite of package objectstest.
package objects

import (
	"context"
	"errors"
	"io"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Info describes an object.
type Info struct {
	Size     int64
	Modified time.Time
}

// Entry is one name in a listing.
type Entry struct {
	Name string // the last part of the key
	Dir  bool   // keys begin with this name and "/"; Info is then empty
	Info
}

// Store keeps objects. Keys are parts joined by "/"; a part is not empty and does not begin with '.'. No key is the
// folder of another key. An object exists completely or not at all, even if the process dies or, except with a Flusher,
// the power fails. All methods are safe for concurrent use.
type Store interface {
	// Stat describes an object; NotFound if it does not exist.
	Stat(ctx context.Context, key string) (Info, error)

	// Open opens an object for reading. The reader's Seek is cheap: it reads nothing. NotFound if the object does not
	// exist.
	Open(ctx context.Context, key string) (io.ReadSeekCloser, Info, error)

	// Write replaces a small object.
	Write(ctx context.Context, key string, data []byte) error

	// Take makes the file at path the object and removes the file. The file must be in Staging.
	Take(ctx context.Context, key, path string) error

	// Move gives an object another key.
	Move(ctx context.Context, from, to string) error

	// Remove deletes an object; idempotent: a missing one is no error.
	Remove(ctx context.Context, key string) error

	// List returns the entries directly below a prefix, in ascending order of names; an empty result is no error. The
	// prefix is a key without its last part.
	List(ctx context.Context, prefix string) ([]Entry, error)

	// Sync makes the names of everything written, taken and moved so far survive a power cut. Their bytes are durable
	// already, except with a Flusher.
	Sync(ctx context.Context) error

	// Staging returns a local folder for files that Take will use.
	Staging() string
}

// Flusher is a Store whose Take does not wait for the disk: before Flush, a power cut may damage the bytes of a taken
// object.
type Flusher interface {
	// Flush makes the bytes of a taken object survive a power cut; its name also needs Sync. NotFound if the object
	// does not exist.
	Flush(ctx context.Context, key string) error
}

// Tidier is a Store in which a killed process may leave other files beside the objects.
type Tidier interface {
	// Tidy removes such files below a prefix. Preconditions: nobody writes there.
	Tidy(ctx context.Context, prefix string) error
}

// Read returns a whole object, if it has at most limit bytes.
func Read(ctx context.Context, s Store, key string, limit int64) ([]byte, Info, error) {
	f, info, err := s.Open(ctx, key)
	if err != nil {
		return nil, info, err
	}
	defer f.Close()
	if info.Size > limit {
		return nil, info, errdefs.DataLossf("object %s has %d bytes; at most %d are expected", key, info.Size, limit)
	}
	data := make([]byte, info.Size)
	_, err = io.ReadFull(f, data)
	return data, info, err
}

// DiskFull turns the errors of a full disk into ResourceExhausted.
func DiskFull(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errdefs.Exhaustedf("the registry's disk is full; free space or delete images and run epoch gc: %w", err)
	}
	return err
}
