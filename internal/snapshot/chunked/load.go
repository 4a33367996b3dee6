package chunked

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sort"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filling"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/sparse"
)

// LoadCommand is the first argument of a program that loads the memory of a snapshot, see Load.
const LoadCommand = "load-memory-1"

// Descriptors of that process. Its standard input is a loadJob; what follows keeps it alive while no guest does.
const (
	loadMemory = 3 + iota
	loadFeed   // listening socket
	loadSaying // pipe, for lines of loadSays
)

// loadJob is secret.
type loadJob struct {
	Ref    string
	Auth   snapshot.Auth
	HTTP   ociclient.Config
	Size   int64 // of the file
	Chunks []loadChunk
}

// loadChunk is a chunk that is not in the file yet.
type loadChunk struct {
	Layer  ociclient.Descriptor
	Length int64 // uncompressed
	Parts  artifact.Ranges
}

// loadSays is what the process says: that all is loaded, that it waits for the registry or for space on the disk, or why it gives up.
type loadSays struct {
	Whole, Waits bool   `json:",omitempty"`
	Class        string `json:",omitempty"`
	Error        string `json:",omitempty"`
}

// IsLoad reports whether a program with these arguments, after its name, loads the memory of a snapshot.
func IsLoad(args []string) bool { return len(args) == 1 && args[0] == LoadCommand }

// Load is the process that loads the memory of a snapshot, with what guests wait for first. Every chunk is verified before a guest gets it. Load returns the exit code
// of the process when nobody needs it any longer: neither the process that started it, nor a guest. While a guest waits, Load tries again after the registry did not answer,
// and after the disk was full.
func Load(ctx context.Context, stdin *os.File) int {
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0) // other processes of the same user cannot read the credentials
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	say := os.NewFile(loadSaying, "saying")
	l := &loader{memory: os.NewFile(loadMemory, "memory"), socket: loadFeed, tell: func(s loadSays) { _ = json.NewEncoder(say).Encode(s) }}
	in := json.NewDecoder(stdin)
	if err := in.Decode(&l.job); err != nil {
		return 2
	}
	l.begin()
	_, _ = unix.SetNonblock(l.socket, true), unix.SetNonblock(int(stdin.Fd()), false)
	alone := make(chan struct{})
	go func() {
		defer close(alone)
		l.accept(ctx, int(stdin.Fd()))
		l.feed.Alone(ctx)
		cancel()
	}()
	code := 0
	if err := l.run(ctx); err != nil {
		l.feed.Fail(err)
		l.tell(loadSays{Class: errdefs.ClassOf(err).String(), Error: err.Error()})
		code = 1
	} else {
		l.tell(loadSays{Whole: true})
	}
	<-alone
	return code
}

// accept takes readers until stdin ends. All that have connected before are taken then.
func (l *loader) accept(ctx context.Context, stdin int) {
	fds := []unix.PollFd{{Fd: int32(l.socket), Events: unix.POLLIN}, {Fd: int32(stdin), Events: unix.POLLIN}}
	for over := false; !over; {
		if _, err := unix.Poll(fds, -1); err != nil {
			continue // it was interrupted
		}
		if fds[1].Revents != 0 {
			n, err := unix.Read(stdin, make([]byte, 512))
			over = n <= 0 && !errors.Is(err, unix.EINTR)
		}
		l.admit(ctx)
	}
}

// admit takes all readers that have connected. It waits for nobody.
func (l *loader) admit(ctx context.Context) {
	l.admitting.Lock()
	defer l.admitting.Unlock()
	for {
		fd, _, err := unix.Accept4(l.socket, unix.SOCK_CLOEXEC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return
		}
		f := os.NewFile(uintptr(fd), "reader")
		conn, err := net.FileConn(f)
		_ = f.Close()
		if err == nil {
			l.feed.Take(ctx, conn)
		}
	}
}

// needed reports whether a guest waits.
func (l *loader) needed(ctx context.Context) bool {
	l.admit(ctx) // one may have connected just now
	return l.feed.Readers() > 0
}

// loader loads a file.
type loader struct {
	job    loadJob
	memory *os.File
	socket int // non-blocking; readers connect to it
	feed   *filling.Writer
	tell   func(loadSays)

	admitting sync.Mutex

	mu    sync.Mutex
	next  int          // the first chunk that may not have begun
	begun []bool       // chunks
	parts []loadedPart // sorted
}

// loadedPart is a part of the file, and the chunk that it is in.
type loadedPart struct {
	sparse.Extent
	chunk int
}

func (l *loader) begin() {
	var missing []sparse.Extent
	for n, c := range l.job.Chunks {
		for _, r := range c.Parts {
			l.parts = append(l.parts, loadedPart{sparse.Extent{Offset: r.Offset, Length: r.Length}, n})
		}
	}
	slices.SortFunc(l.parts, func(a, b loadedPart) int { return int(a.Offset/page - b.Offset/page) })
	for _, p := range l.parts {
		missing = append(missing, p.Extent)
	}
	l.begun = make([]bool, len(l.job.Chunks))
	l.feed = filling.NewWriter(l.job.Size, missing)
}

// take returns the chunk to load next: one that a guest waits for, or else the first one; -1 if there is none.
func (l *loader) take() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := l.wanted(); n >= 0 {
		return n
	}
	for ; l.next < len(l.begun); l.next++ {
		if !l.begun[l.next] {
			l.begun[l.next] = true
			return l.next
		}
	}
	return -1
}

// takeWanted is take for a goroutine that loads only what a guest waits for. It waits until there is such a chunk; -1 if rest is closed, because all have begun.
func (l *loader) takeWanted(ctx context.Context, rest <-chan struct{}) int {
	for {
		l.mu.Lock()
		n := l.wanted()
		l.mu.Unlock()
		if n >= 0 {
			return n
		}
		select {
		case <-l.feed.Wants():
		case <-rest:
			return -1
		case <-ctx.Done():
			return -1
		}
	}
}

// wanted begins a chunk that a guest waits for; -1 if there is none. Preconditions: l.mu is held.
func (l *loader) wanted() int {
	for at, ok := l.feed.Wanted(); ok; at, ok = l.feed.Wanted() {
		n := sort.Search(len(l.parts), func(i int) bool { return l.parts[i].End() > at })
		if n < len(l.parts) && l.parts[n].Offset <= at && !l.begun[l.parts[n].chunk] {
			l.begun[l.parts[n].chunk] = true
			return l.parts[n].chunk
		}
	}
	return -1
}

// back returns a chunk that could not be loaded.
func (l *loader) back(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begun[n] = false
	l.next = min(l.next, n)
}

// again has all chunks loaded once more.
func (l *loader) again() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.begun)
	l.next = 0
}

// retryFirst and retryMost bound how long the registry is left alone that did not answer, and the disk that was full.
const retryFirst, retryMost = time.Second, 30 * time.Second

// run loads all. While guests wait, neither a registry that does not answer nor a full disk is a reason to give up.
func (l *loader) run(ctx context.Context) error {
	for pause := retryFirst; ; pause = min(2*pause, retryMost) {
		err := l.load(ctx)
		passes := errdefs.IsUnavailable(err) || errdefs.Is(err, errdefs.DeadlineExceeded) || errdefs.Is(err, errdefs.ResourceExhausted)
		if err == nil || ctx.Err() != nil || !passes || !l.needed(ctx) {
			return err
		}
		l.tell(loadSays{Waits: true, Error: err.Error()})
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		}
	}
}

// urgent is how many of the pullers load only what guests wait for, so that such a chunk need not wait for another one.
const urgent = 2

// load loads what is missing, until all is there or something fails.
func (l *loader) load(ctx context.Context) error {
	r, err := ociclient.ParseRef(l.job.Ref)
	if err != nil {
		return err
	}
	auth := l.job.Auth
	s, err := ociclient.Open(ctx, r, ociclient.Auth{Token: auth.Token, Username: auth.Username, Password: auth.Password, CA: auth.CA}, ociclient.Pull, l.job.HTTP)
	if err != nil {
		return fmt.Errorf("reach %s: %w", r.Host, err)
	}
	defer s.Close()
	p := &pull{s: s, room: semaphore.NewWeighted(budget)}
	g, ctx := errgroup.WithContext(ctx)
	rest := make(chan struct{})
	begun := sync.OnceFunc(func() { close(rest) })
	for i := range pullers {
		take := func() int { return l.takeWanted(ctx, rest) }
		if i >= urgent {
			take = func() int {
				n := l.take()
				if n < 0 {
					begun()
				}
				return n
			}
		}
		g.Go(func() error {
			dec, err := newDecoder()
			if err != nil {
				return err
			}
			defer dec.close()
			w := &worker{p: p, dec: dec}
			for n := take(); n >= 0; n = take() {
				if err := l.fetch(ctx, w, l.job.Chunks[n]); err != nil {
					l.back(n)
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if err := l.memory.Sync(); err != nil {
		l.again() // the kernel may have dropped what it could not write, and says so once
		return full(err)
	}
	return nil
}

// fetch loads a chunk.
func (l *loader) fetch(ctx context.Context, w *worker, c loadChunk) error {
	need := min(c.Length+c.Layer.Size, budget)
	if err := w.p.room.Acquire(ctx, need); err != nil {
		return err
	}
	defer func() {
		w.trim()
		w.p.room.Release(need)
	}()
	data, err := w.fetch(ctx, task{layer: c.Layer, length: c.Length})
	if err != nil {
		return err
	}
	for _, r := range c.Parts {
		if err := sparse.WriteAt(l.memory, data[r.From:r.From+r.Length], r.Offset); err != nil {
			return full(err)
		}
	}
	for _, r := range c.Parts {
		l.feed.Put(sparse.Extent{Offset: r.Offset, Length: r.Length})
	}
	return nil
}
