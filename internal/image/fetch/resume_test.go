package fetch

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// cutter breaks the connection after some bytes.
type cutter struct {
	http.ResponseWriter
	left int
	cut  func()
}

func (c *cutter) Write(p []byte) (int, error) {
	n := min(len(p), c.left)
	_, _ = c.ResponseWriter.Write(p[:n])
	c.left -= n
	if c.left == 0 {
		_ = http.NewResponseController(c.ResponseWriter).Flush()
		c.cut()
	}
	return n, nil
}

func drop() { panic(http.ErrAbortHandler) }

// lossy serves o; the first len(cuts) responses end after that many bytes.
func lossy(o *origin, cuts ...int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if n := len(o.asked()); n < len(cuts) {
			w = &cutter{w, cuts[n], drop}
		}
		o.ServeHTTP(w, r)
	}
}

func TestALostConnectionGoesOn(t *testing.T) {
	const k = 1 << 10
	day := time.Unix(1700000000, 0)
	for name, tc := range map[string]struct {
		etag     string
		modified time.Time
		cuts     []int
		digest   bool
	}{
		"strong ETag":                    {`"a"`, time.Time{}, []int{100 * k, 70 * k, 200 * k}, false},
		"weak ETag and date":             {`W/"a"`, day, []int{100 * k}, false},
		"date":                           {"", day, []int{100 * k}, false},
		"only a digest":                  {"", time.Time{}, []int{100 * k}, true},
		"first byte only":                {`"a"`, time.Time{}, []int{1}, false},
		"many times, with progress":      {`"a"`, time.Time{}, []int{70 * k, 70 * k, 70 * k, 70 * k, 70 * k, 70 * k, 70 * k, 70 * k}, false},
		"a few times, almost without it": {`"a"`, time.Time{}, []int{10, 10, 10}, false},
	} {
		t.Run(name, func(t *testing.T) {
			o := &origin{data: content(900 * k), etag: tc.etag, modified: tc.modified}
			r := Request{URL: serve(t, lossy(o, tc.cuts...))}
			if tc.digest {
				r.Digest = digestOf(o.data)
			}
			got, b, err := get(t, client(t, quick), r)
			if err != nil || !bytes.Equal(got, o.data) || b.Sum() != digestOf(o.data) {
				t.Fatalf("%d bytes, %v", len(got), err)
			}
			asked, off := o.asked(), 0
			if len(asked) != len(tc.cuts)+1 {
				t.Fatalf("asked %d times", len(asked))
			}
			for i, cut := range tc.cuts {
				off += cut
				if got, want := asked[i+1].Header.Get("Range"), fmt.Sprintf("bytes=%d-", off); got != want {
					t.Errorf("request %d was for %q, want %q", i+1, got, want)
				}
			}
		})
	}
}

func TestALostConnectionBeforeTheFirstByteStartsAgain(t *testing.T) {
	o := &origin{data: content(1000)} // this works without an ETag
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if len(o.asked()) == 0 {
			o.seen(r)
			w.Header().Set("Content-Length", "5")
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			drop()
		}
		o.ServeHTTP(w, r)
	})
	got, b, err := get(t, client(t, quick), Request{URL: url})
	if err != nil || !bytes.Equal(got, o.data) || b.Size() != 1000 {
		t.Errorf("%d of %d bytes, %v", len(got), b.Size(), err)
	}
}

func TestAStalledConnectionIsGivenUp(t *testing.T) {
	o := &origin{data: content(100 << 10), etag: `"a"`}
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch len(o.asked()) {
		case 0: // sends something, then nothing until the client disconnects
			w = &cutter{w, 80 << 10, func() { <-r.Context().Done(); drop() }}
		case 1: // sends no response at all
			o.seen(r)
			<-r.Context().Done()
			return
		}
		o.ServeHTTP(w, r)
	})
	opts := quick
	opts.Stall, opts.Attempts = 100*time.Millisecond, 50
	got, _, err := get(t, client(t, opts), Request{URL: url})
	if err != nil || !bytes.Equal(got, o.data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

func TestAServerThatStallsForEver(t *testing.T) {
	url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", `"a"`)
		w.Header().Set("Content-Length", "10")
		_, _ = w.Write([]byte("a"))
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	opts := quick
	opts.Stall, opts.Attempts = 50*time.Millisecond, 1
	if _, _, err := get(t, client(t, opts), Request{URL: url}); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), errStalled.Error()) {
		t.Error(err)
	}
}

func TestASlowReaderIsNoStall(t *testing.T) {
	o := &origin{data: content(8 << 20)} // without ETag: a second connection could not resume
	opts := quick
	opts.Stall = time.Second
	b, err := client(t, opts).Get(t.Context(), Request{URL: serve(t, o.ServeHTTP)})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if _, err := io.CopyN(io.Discard, b, 100); err != nil {
		t.Fatal(err)
	}
	<-time.After(1100 * time.Millisecond) // longer than Stall: the test checks that this time does not count
	if err := b.Drain(); err != nil || len(o.asked()) != 1 {
		t.Errorf("%v, asked %d times", err, len(o.asked()))
	}
}

func TestAFileThatCannotBeGoneOnWith(t *testing.T) {
	first, second := content(200<<10), bytes.Repeat([]byte("other"), 40<<10)
	for name, tc := range map[string]struct {
		next  func(w http.ResponseWriter, r *http.Request)
		etag  string
		words string
	}{
		"changed": {func(w http.ResponseWriter, r *http.Request) {
			(&origin{data: second, etag: `"b"`}).ServeHTTP(w, r)
		}, `"a"`, "changed during the fetch; try again"},
		"changed, of a server that ignores If-Range": {func(w http.ResponseWriter, r *http.Request) {
			r.Header.Del("If-Range")
			(&origin{data: second, etag: `"b"`}).ServeHTTP(w, r)
		}, `"a"`, "changed during the fetch; try again"},
		"became shorter": {func(w http.ResponseWriter, r *http.Request) {
			r.Header.Del("If-Range")
			(&origin{data: second[:10], etag: `"a"`}).ServeHTTP(w, r)
		}, `"a"`, "changed during the fetch; try again"},
		"another part than asked for": {func(w http.ResponseWriter, r *http.Request) {
			r.Header.Set("Range", "bytes=5-")
			(&origin{data: first, etag: `"a"`}).ServeHTTP(w, r)
		}, `"a"`, "changed during the fetch; try again"},
		"partial without saying of what": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(first[100<<10:])
		}, `"a"`, "changed during the fetch; try again"},
		"ignores Range": {func(w http.ResponseWriter, r *http.Request) {
			r.Header.Del("Range")
			(&origin{data: first, etag: `"a"`}).ServeHTTP(w, r)
		}, `"a"`, "cannot resume"},
		"no ETag": {nil, "", "no ETag"},
	} {
		t.Run(name, func(t *testing.T) {
			o := &origin{data: first, etag: tc.etag}
			url := serve(t, func(w http.ResponseWriter, r *http.Request) {
				if n := len(o.asked()); n > 0 {
					o.seen(r)
					tc.next(w, r)
					return
				}
				lossy(o, 100<<10)(w, r)
			})
			got, b, err := get(t, client(t, quick), Request{URL: url})
			if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), tc.words) || len(got) != 100<<10 || b.Sum() != "" {
				t.Errorf("%d bytes, %v", len(got), err)
			}
			if _, again := b.Read(make([]byte, 1)); !errors.Is(again, err) {
				t.Errorf("afterwards: %v", again)
			}
		})
	}
}

func TestATruncatedDownloadThatNeverEnds(t *testing.T) {
	o := &origin{data: content(100 << 10), etag: `"a"`}
	url := serve(t, func(w http.ResponseWriter, r *http.Request) { o.ServeHTTP(&cutter{w, 10, drop}, r) })
	got, _, err := get(t, client(t, quick), Request{URL: url})
	if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "of 102400 bytes") || len(got) == 0 || len(got) >= len(o.data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if n := len(o.asked()); n != quick.Attempts {
		t.Errorf("asked %d times", n)
	}
}

func TestAServerThatFailsWhileGoingOn(t *testing.T) {
	for status, class := range map[int]errdefs.Class{
		404: errdefs.NotFound, 403: errdefs.FailedPrecondition, 503: errdefs.Unavailable,
	} {
		o := &origin{data: content(200 << 10), etag: `"a"`}
		url := serve(t, func(w http.ResponseWriter, r *http.Request) {
			if len(o.asked()) > 0 {
				o.seen(r)
				w.WriteHeader(status)
				return
			}
			lossy(o, 100<<10)(w, r)
		})
		if _, _, err := get(t, client(t, quick), Request{URL: url}); !errdefs.Is(err, class) {
			t.Errorf("%d: %v", status, err)
		}
	}
}
