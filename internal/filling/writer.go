package filling

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"

	"cocoonstack.io/cocoon/internal/sparse"
)

// Writer is the side of the process that writes the file. It is safe for concurrent use.
type Writer struct {
	size int64

	mu      sync.Mutex
	changed sync.Cond // told, failed or conns
	told    []sparse.Extent
	here    sparse.Pages
	failed  string
	conns   map[net.Conn]bool
	wants   []int64 // the newest last
	wanted  chan struct{}
}

// NewWriter returns the writer of a file of size bytes, a multiple of sparse.Block, in which the missing parts are not there yet.
func NewWriter(size int64, missing []sparse.Extent) *Writer {
	w := &Writer{size: size, here: sparse.NewPages(size), conns: map[net.Conn]bool{}, wanted: make(chan struct{}, 1)}
	w.changed.L = &w.mu
	gone := sparse.NewPages(size)
	gone.Add(missing)
	for n := range size / sparse.Block {
		if !gone.Has(n) {
			w.here.Set(n)
		}
	}
	w.told = w.here.Extents(size)
	return w
}

// Put says that a part is there.
func (w *Writer) Put(e sparse.Extent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.here.Add([]sparse.Extent{e})
	w.told = append(w.told, e)
	w.changed.Broadcast()
}

// Fail says that what is not there will never be. Nothing can be put after it.
func (w *Writer) Fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failed = cmp.Or(line(err.Error()), "nobody says why")
	w.changed.Broadcast()
}

// Wanted returns an offset at which a reader waits, the last one that was asked for first; ok is false if none waits.
func (w *Writer) Wanted() (offset int64, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.wants) > 0 {
		at := w.wants[len(w.wants)-1]
		w.wants = w.wants[:len(w.wants)-1]
		if !w.here.Has(at / sparse.Block) {
			return at, true
		}
	}
	return 0, false
}

// Wants is sent to when there is something in Wanted.
func (w *Writer) Wants() <-chan struct{} { return w.wanted }

// Readers is the number of readers.
func (w *Writer) Readers() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.conns)
}

// Alone waits until there are no readers, or ctx ends.
func (w *Writer) Alone(ctx context.Context) {
	defer context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.changed.Broadcast()
	})()
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.conns) > 0 && ctx.Err() == nil {
		w.changed.Wait()
	}
}

// Serve takes readers until l is closed, and then waits until they are gone. Each reader that has been told everything stays until it hangs up. The end of ctx ends all.
func (w *Writer) Serve(ctx context.Context, l net.Listener) error {
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	defer w.Alone(ctx)
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return ctx.Err()
		}
		if err != nil {
			return err
		}
		w.Take(ctx, conn)
	}
}

// Take serves a reader, until it hangs up or ctx ends. It does not wait for that, as Alone does.
func (w *Writer) Take(ctx context.Context, conn net.Conn) {
	w.mu.Lock()
	w.conns[conn] = true
	w.mu.Unlock()
	go w.serve(ctx, conn)
}

func (w *Writer) serve(ctx context.Context, conn net.Conn) {
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		w.listen(conn)
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.conns, conn)
		w.changed.Broadcast()
	}()
	w.tell(conn)
	<-gone
	_ = conn.Close()
}

// listen reads what a reader waits for, until it hangs up.
func (w *Writer) listen(conn net.Conn) {
	for b := make([]byte, wantSize); ; {
		if _, err := io.ReadFull(conn, b); err != nil {
			return
		}
		at := binary.LittleEndian.Uint64(b)
		if at >= uint64(w.size) { // no reader of ours asks for that
			return
		}
		w.mu.Lock()
		if !w.here.Has(int64(at)/sparse.Block) && len(w.wants) < maxWants {
			w.wants = append(w.wants, int64(at))
			select {
			case w.wanted <- struct{}{}:
			default:
			}
		}
		w.mu.Unlock()
	}
}

// maxWants limits what readers may wait for at once. What is asked for beyond it comes in its turn.
const maxWants = 1 << 16

// tell sends a reader all that is there, and what comes, until it hangs up or the writer fails.
func (w *Writer) tell(conn net.Conn) {
	for told := 0; ; {
		w.mu.Lock()
		for w.conns[conn] && w.failed == "" && told == len(w.told) {
			w.changed.Wait()
		}
		news, failed, here := w.told[told:], w.failed, w.conns[conn]
		told += len(news)
		w.mu.Unlock()
		if !here {
			return
		}
		var b []byte
		for _, e := range news {
			b = append(b, encodePart(e)...)
		}
		if failed != "" {
			b = append(b, encodeReason(failed)...)
		}
		if _, err := conn.Write(b); err != nil || failed != "" {
			if c, ok := conn.(*net.UnixConn); ok {
				_ = c.CloseWrite()
			}
			return
		}
	}
}
