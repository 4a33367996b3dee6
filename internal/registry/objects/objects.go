// Package objects is the contract of where a registry keeps its bytes: objects under keys, a folder or an S3 bucket.
//
// It knows no repositories, digests or rights; package content does. Implementations are in the folders below and pass
// the suite of objectstest.
package objects

import (
	"context"
	"io"
	"time"
)

// Info is what a store tells about an object.
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

// Store keeps objects. Keys are parts joined by "/"; a part is not empty and does not begin with '.'. No key is another
// one's folder. An object is wholly there or not at all, whatever happens to the process or, but for Flusher, the power.
// All methods may be called at the same time.
type Store interface {
	// Stat describes an object; NotFound without it.
	Stat(ctx context.Context, key string) (Info, error)

	// Open reads an object. The reader's Seek is cheap: nothing is read for it. NotFound without the object.
	Open(ctx context.Context, key string) (io.ReadSeekCloser, Info, error)

	// Write replaces a small object.
	Write(ctx context.Context, key string, data []byte) error

	// Take makes the file at path the object and removes it there. The file is in Staging.
	Take(ctx context.Context, key, path string) error

	// Move gives an object another key.
	Move(ctx context.Context, from, to string) error

	// Remove deletes an object; one that is not there is no error.
	Remove(ctx context.Context, key string) error

	// List returns what is directly below a prefix, in ascending order of names; nothing is no error. The prefix is a
	// key without its last part.
	List(ctx context.Context, prefix string) ([]Entry, error)

	// Sync makes the names of everything written, taken and moved so far survive a power cut. Their bytes do already, but
	// for Flusher.
	Sync(ctx context.Context) error

	// Staging is a local folder for files that are to be taken.
	Staging() string
}

// Flusher is a Store whose Take does not wait for the disk: until Flush, a power cut may leave a taken object with other
// bytes.
type Flusher interface {
	// Flush makes the bytes of a taken object survive a power cut; its name needs Sync. NotFound without the object.
	Flush(ctx context.Context, key string) error
}

// Tidier is a Store in which a killed process may leave something beside the objects.
type Tidier interface {
	// Tidy removes that below a prefix. Nobody else may be writing there.
	Tidy(ctx context.Context, prefix string) error
}

// Read returns a whole object, if it is not larger than limit bytes.
func Read(ctx context.Context, s Store, key string, limit int64) ([]byte, Info, error) {
	f, info, err := s.Open(ctx, key)
	if err != nil {
		return nil, info, err
	}
	defer f.Close()
	if info.Size > limit {
		return nil, info, tooLarge(key, info.Size, limit)
	}
	data := make([]byte, info.Size)
	_, err = io.ReadFull(f, data)
	return data, info, err
}
