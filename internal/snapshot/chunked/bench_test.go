package chunked_test

import (
	"crypto/sha256"
	"io"
	"log"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
)

// Throughput is measured in bytes of the snapshot's files without holes. BenchmarkPlain is the baseline: a copy to the
// disk with fsync, and sha256 of the same bytes.

const benchMemory = 512 << 20

// benchGuests are a guest with typical memory, and one with incompressible memory.
var benchGuests = map[string]guest{
	"mixed":  {name: "s", seed: 1, memory: benchMemory},
	"random": {name: "s", seed: 1, memory: benchMemory, random: true},
}

// benchServers use the disk of the tests and run in this process: their CPU time counts.
func benchServers(b *testing.B) map[string]func() string {
	return map[string]func() string{
		"epoch": func() string { return epoch(b, b.TempDir()) },
		"other": func() string {
			return serve(b, func(http.Handler) http.Handler {
				return ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)), ggcr.WithBlobHandler(ggcr.NewDiskBlobHandler(b.TempDir())))
			})
		},
	}
}

var benchModes = map[string]func(*chunked.Config){
	"zstd": func(c *chunked.Config) { c.Index = "" },
	"none": func(c *chunked.Config) { c.Index = ""; c.Uncompressed = true },
}

func BenchmarkPush(b *testing.B) {
	for content, g := range benchGuests {
		s := newStore(b)
		h := s.save(b, g)
		for name, serve := range benchServers(b) {
			for mode, change := range benchModes {
				b.Run(content+"/"+name+"/"+mode, func(b *testing.B) {
					c := client(b, s, change)
					for b.Loop() {
						b.StopTimer()
						host := serve()
						b.StartTimer()
						_, p := push(b, c, h, host+"/vm:1")
						b.SetBytes(p.Total)
					}
				})
			}
		}
	}
}

func BenchmarkSecondPush(b *testing.B) {
	s := newStore(b)
	h := s.save(b, benchGuests["mixed"])
	c := client(b, s, nil)
	host := serve(b, nil)
	_, first := push(b, c, h, host+"/vm:first")
	for b.Loop() {
		_, p := push(b, c, h, host+"/vm:second")
		b.SetBytes(p.Total)
		b.ReportMetric(100*float64(p.Moved)/float64(first.Moved), "%-moved")
	}
}

func BenchmarkPull(b *testing.B) {
	for content, g := range benchGuests {
		s := newStore(b)
		h := s.save(b, g)
		for name, serve := range benchServers(b) {
			for mode, change := range benchModes {
				b.Run(content+"/"+name+"/"+mode, func(b *testing.B) {
					ref := serve() + "/vm:1"
					push(b, client(b, s, change), h, ref)
					for b.Loop() {
						b.StopTimer()
						there := newStore(b)
						b.StartTimer()
						_, p := pull(b, client(b, there, change), there, ref, "x")
						b.SetBytes(p.Total)
					}
				})
			}
		}
	}
}

func BenchmarkPlain(b *testing.B) {
	s := newStore(b)
	h := s.save(b, benchGuests["mixed"])
	_, p := push(b, client(b, s, nil), h, serve(b, nil)+"/vm:1")
	src := filepath.Join(h.Dir(), snapshot.FileMemory)
	read := func(b *testing.B, w io.Writer) {
		f, err := os.Open(src)
		if err == nil {
			_, err = io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{io.LimitReader(f, p.Total)}, make([]byte, 1<<20))
			f.Close()
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	b.Run("sha256", func(b *testing.B) {
		b.SetBytes(p.Total)
		for b.Loop() {
			read(b, sha256.New())
		}
	})
	b.Run("copy", func(b *testing.B) {
		b.SetBytes(p.Total)
		for b.Loop() {
			path := filepath.Join(b.TempDir(), "copy")
			f, err := os.Create(path)
			if err != nil {
				b.Fatal(err)
			}
			read(b, f)
			if err := f.Sync(); err != nil {
				b.Fatal(err)
			}
			f.Close()
		}
	})
}

// idleRig is a nearly idle VM in a registry: pushed once as first, and then again and again as last.
func idleRig(b *testing.B, pushes int) (host string) {
	s := newStore(b)
	host, c := epoch(b, b.TempDir()), client(b, s, nil)
	v := newIdle(b, 256<<20)
	h := v.save(b, s)
	_, first := push(b, c, h, host+"/vm:first")
	for n := range pushes {
		v.run(b, 4*idlePages)
		h = v.save(b, s)
		if _, p := push(b, c, h, host+"/vm:last"); n == 0 || n == pushes-1 {
			b.Logf("push %d moved %d of %d bytes: %.2f %%", n+2, p.Moved, first.Moved, 100*float64(p.Moved)/float64(first.Moved))
		}
	}
	return host
}

// cpuTime returns a function that reports the CPU time of this process since.
func cpuTime(b *testing.B) func() {
	used := func() time.Duration {
		var r unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
			b.Fatal(err)
		}
		return time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	before := used()
	return func() { b.ReportMetric(float64((used()-before).Milliseconds())/float64(b.N), "cpu-ms/op") }
}

// BenchmarkIdle compares, in CPU time of both ends, the pull and the download of a VM that was pushed once with those of
// the same VM that was pushed again and again.
func BenchmarkIdle(b *testing.B) {
	host := idleRig(b, 20)
	for _, tag := range []string{"first", "last"} {
		b.Run("pull/"+tag, func(b *testing.B) {
			defer cpuTime(b)()
			for b.Loop() {
				there := newStore(b)
				_, p := pull(b, client(b, there, nil), there, host+"/vm:"+tag, "x")
				b.SetBytes(p.Total)
			}
		})
		b.Run("download/"+tag, func(b *testing.B) {
			defer cpuTime(b)()
			for b.Loop() {
				req, err := http.NewRequestWithContext(b.Context(), http.MethodGet, "http://"+host+"/dl/vm?tag="+tag, nil)
				if err != nil {
					b.Fatal(err)
				}
				req.Header.Set("Authorization", "Bearer "+token.Token)
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					b.Fatal(err)
				}
				n, err := io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				if err != nil || resp.StatusCode != http.StatusOK {
					b.Fatal(resp.Status, err)
				}
				b.SetBytes(n)
			}
		})
	}
}
