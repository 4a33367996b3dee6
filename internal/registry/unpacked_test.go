package registry

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"

	"cocoonstack.io/cocoon/internal/registry/stream"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
)

type file struct{ *bytes.Reader }

func (file) Close() error { return nil }

func from(b []byte) stream.Source {
	return func(context.Context) (io.ReadSeekCloser, error) { return file{bytes.NewReader(b)}, nil }
}

// A download waits until there is room for the blob that it unpacks, and has the room while it reads.
func TestRoomForUnpackedBlobs(t *testing.T) {
	const size = 4096
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	packed := w.EncodeAll(make([]byte, size), nil)
	synctest.Test(t, func(t *testing.T) {
		u := newUnpacked()
		open := func(ctx context.Context, name string, from stream.Source) (io.ReadCloser, error) {
			return u.piece(blobKey{digest.FromString(name), true}, size, artifact.Range{Length: size}, from).Open(ctx, 0)
		}
		first, err := open(t.Context(), "first", from(packed))
		if err != nil {
			t.Fatal(err)
		}
		if u.room.TryAcquire(maxInUse-size+1) || !u.room.TryAcquire(maxInUse-size) {
			t.Error("the reader does not have room for its blob alone")
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		next := func() {
			r, err := open(ctx, "second", from(packed))
			if err == nil {
				err = r.Close()
			}
			done <- err
		}
		go next()
		synctest.Wait()
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("a request that ends while it waits: %v", err)
		}
		ctx = t.Context()
		go next()
		synctest.Wait()
		for range 2 {
			if err := first.Close(); err != nil {
				t.Error(err)
			}
		}
		u.room.Release(maxInUse - size)
		if err := <-done; err != nil {
			t.Error(err)
		}
		if _, err := open(t.Context(), "bad", from(packed[:8])); err == nil {
			t.Error("half a blob was read")
		}
		if !u.room.TryAcquire(maxInUse) {
			t.Error("room is lost")
		}
	})
}
