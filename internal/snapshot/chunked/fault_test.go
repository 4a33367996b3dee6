package chunked_test

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
)

// before runs f in front of a registry; f returns true if it has sent the response.
func before(f func(w http.ResponseWriter, r *http.Request) bool) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !f(w, r) {
				next.ServeHTTP(w, r)
			}
		})
	}
}

// switchable is before with a fault that can change while the registry serves.
type switchable struct {
	f atomic.Pointer[func(w http.ResponseWriter, r *http.Request) bool]
}

func (s *switchable) set(f func(w http.ResponseWriter, r *http.Request) bool) { s.f.Store(&f) }

func (s *switchable) wrap(next http.Handler) http.Handler {
	return before(func(w http.ResponseWriter, r *http.Request) bool {
		f := s.f.Load()
		return f != nil && (*f)(w, r)
	})(next)
}

func cut(w http.ResponseWriter) {
	c, _, err := w.(http.Hijacker).Hijack()
	if err == nil {
		c.Close()
	}
}

// half sends half of a response, then closes the connection.
type half struct {
	http.ResponseWriter

	left int
}

func (h *half) Write(p []byte) (int, error) {
	if len(p) > h.left {
		_, _ = h.ResponseWriter.Write(p[:h.left])
		panic(http.ErrAbortHandler)
	}
	h.left -= len(p)
	return h.ResponseWriter.Write(p)
}

func isBlob(r *http.Request) bool { return strings.Contains(r.URL.Path, "/blobs/sha256:") }

// isUpload reports whether the request's body is a blob or a manifest.
func isUpload(r *http.Request) bool {
	return r.Method == http.MethodPut || r.Method == http.MethodPost && r.URL.Query().Has("digest")
}

// TestFaultsThatPass covers faults after which a transfer continues.
func TestFaultsThatPass(t *testing.T) {
	for name, make := range map[string]func() func(http.Handler) http.Handler{
		"every eleventh request is answered 503": func() func(http.Handler) http.Handler {
			var n atomic.Int64
			return before(func(w http.ResponseWriter, _ *http.Request) bool {
				if n.Add(1)%11 != 0 {
					return false
				}
				w.WriteHeader(http.StatusServiceUnavailable)
				return true
			})
		},
		"every seventh request is answered 429 with Retry-After 0": func() func(http.Handler) http.Handler {
			var n atomic.Int64
			return before(func(w http.ResponseWriter, _ *http.Request) bool {
				if n.Add(1)%7 != 0 {
					return false
				}
				w.Header().Set("Retry-After", "0")
				w.WriteHeader(http.StatusTooManyRequests)
				return true
			})
		},
		"every seventh connection is cut before the answer": func() func(http.Handler) http.Handler {
			var n atomic.Int64
			return before(func(w http.ResponseWriter, _ *http.Request) bool {
				if n.Add(1)%7 != 0 {
					return false
				}
				cut(w)
				return true
			})
		},
		"each upload and download breaks in the middle once": func() func(http.Handler) http.Handler {
			var seen sync.Map
			return func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					digest := r.URL.Query().Get("digest")
					if isBlob(r) {
						digest = r.URL.Path
					}
					if r.Method == http.MethodHead || digest == "" {
						next.ServeHTTP(w, r)
						return
					}
					if _, again := seen.LoadOrStore(r.Method+digest, true); again {
						next.ServeHTTP(w, r)
						return
					}
					if isUpload(r) {
						_, _ = io.CopyN(io.Discard, r.Body, r.ContentLength/2)
						cut(w)
						return
					}
					next.ServeHTTP(&half{w, 5000}, r)
				})
			}
		},
		"the answer to an upload gets lost": func() func(http.Handler) http.Handler {
			var seen sync.Map
			return func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					next.ServeHTTP(w, r)
					if _, again := seen.LoadOrStore(r.URL.Query().Get("digest"), true); isUpload(r) && !again {
						panic(http.ErrAbortHandler)
					}
				})
			}
		},
		"no ranges": func() func(http.Handler) http.Handler {
			var n atomic.Int64
			return func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					r.Header.Del("Range")
					if r.Method == http.MethodGet && isBlob(r) && n.Add(1)%7 == 0 {
						w = &half{w, 5000}
					}
					next.ServeHTTP(w, r)
				})
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			here, there := newStore(t), newStore(t)
			h := here.save(t, guest{name: "s", seed: 1})
			ref := serve(t, make()) + "/vm/web:v1"
			patient := func(c *chunked.Config) { c.HTTP.Attempts = 20 } // the faults may hit one request several times
			push(t, client(t, here, patient), h, ref)
			got, _ := pull(t, client(t, there, patient), there, ref, "")
			same(t, h.Dir(), got.Dir())
		})
	}
}

// TestFaultsThatStay covers faults that end a pull: with the right error class, and without leftovers.
func TestFaultsThatStay(t *testing.T) {
	here := newStore(t)
	h := here.save(t, guest{name: "s", seed: 1})
	fault := &switchable{}
	host := serve(t, fault.wrap)
	push(t, client(t, here, nil), h, host+"/vm/web:v1")
	push(t, client(t, here, func(c *chunked.Config) { c.Whole = true }), h, host+"/vm/whole:v1")
	big := func(r *http.Request) bool { return r.Method == http.MethodGet && isBlob(r) }
	after := func(n int64, f func(w http.ResponseWriter, r *http.Request)) func(http.ResponseWriter, *http.Request) bool {
		var count atomic.Int64
		return func(w http.ResponseWriter, r *http.Request) bool {
			if !big(r) || count.Add(1) <= n {
				return false
			}
			f(w, r)
			return true
		}
	}
	body := func(change func([]byte) []byte) func(w http.ResponseWriter, r *http.Request) {
		return func(w http.ResponseWriter, r *http.Request) {
			resp, err := http.Get("http://" + host + r.URL.Path + "?direct")
			if err != nil {
				w.WriteHeader(http.StatusBadGateway)
				return
			}
			defer resp.Body.Close()
			data, _ := io.ReadAll(resp.Body)
			_, _ = w.Write(change(data))
		}
	}
	direct := func(f func(http.ResponseWriter, *http.Request) bool) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool { return r.URL.RawQuery != "direct" && f(w, r) }
	}
	flip := body(func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
	for name, test := range map[string]struct {
		fault func(http.ResponseWriter, *http.Request) bool
		class errdefs.Class
	}{
		"flipped bit":           {direct(after(4, flip)), errdefs.DataLoss},
		"flipped bit of config": {direct(after(0, flip)), errdefs.DataLoss},
		"truncated":             {direct(after(4, body(func(b []byte) []byte { return b[:len(b)-1] }))), errdefs.DataLoss},
		"longer":                {direct(after(4, body(func(b []byte) []byte { return append(b, 0) }))), errdefs.DataLoss},
		"empty":                 {direct(after(4, body(func([]byte) []byte { return nil }))), errdefs.DataLoss},
		"missing layer":         {after(4, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) }), errdefs.DataLoss},
		"registry gone":         {after(4, func(w http.ResponseWriter, _ *http.Request) { cut(w) }), errdefs.Unavailable},
		"503 for ever":          {after(4, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }), errdefs.Unavailable},
		"token expires":         {after(4, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }), errdefs.FailedPrecondition},
		"forbidden":             {after(4, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }), errdefs.FailedPrecondition},
		"no such tag": {func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, "/manifests/") {
				return false
			}
			w.WriteHeader(http.StatusNotFound)
			return true
		}, errdefs.NotFound},
	} {
		for _, repository := range []string{"/vm/web:v1", "/vm/whole:v1"} {
			t.Run(name+repository, func(t *testing.T) {
				fault.set(test.fault)
				defer fault.f.Store(nil)
				there := newStore(t)
				_, err := client(t, there, nil).Pull(t.Context(), host+repository, "x", snapshot.Auth{Token: "sesame"}, nil)
				if !errdefs.Is(err, test.class) || strings.Contains(err.Error(), "sesame") {
					t.Errorf("%v, want %v", err, test.class)
				}
				empty(t, there)
			})
			if name == "longer" || name == "truncated" { // the request counts start again
				break
			}
		}
	}
}

// TestPushThatFails: the push reports why, and the next one resumes where it stopped.
func TestPushThatFails(t *testing.T) {
	s := newStore(t)
	h := s.save(t, guest{name: "s", seed: 1})
	for name, test := range map[string]struct {
		answer func(w http.ResponseWriter)
		class  errdefs.Class
	}{
		"quota 507":   {func(w http.ResponseWriter) { w.WriteHeader(http.StatusInsufficientStorage) }, errdefs.ResourceExhausted},
		"too large":   {func(w http.ResponseWriter) { w.WriteHeader(http.StatusRequestEntityTooLarge) }, errdefs.ResourceExhausted},
		"unavailable": {func(w http.ResponseWriter) { w.WriteHeader(http.StatusServiceUnavailable) }, errdefs.Unavailable},
		"gone":        {cut, errdefs.Unavailable},
		"read only":   {func(w http.ResponseWriter) { w.WriteHeader(http.StatusForbidden) }, errdefs.FailedPrecondition},
	} {
		t.Run(name, func(t *testing.T) {
			fault := &switchable{}
			ref := serve(t, fault.wrap) + "/vm/web:v1"
			var puts atomic.Int64
			fault.set(func(w http.ResponseWriter, r *http.Request) bool {
				if !isUpload(r) || puts.Add(1) <= 30 {
					return false
				}
				test.answer(w)
				return true
			})
			c := client(t, s, nil)
			var l last
			if _, err := c.Push(t.Context(), h, ref, snapshot.Auth{}, l.tell); !errdefs.Is(err, test.class) {
				t.Fatalf("%v, want %v", err, test.class)
			}
			if _, err := c.Digest(t.Context(), ref, snapshot.Auth{}); !errdefs.IsNotFound(err) {
				t.Errorf("a push that failed left a manifest: %v", err)
			}
			puts.Store(0)
			fault.f.Store(nil)
			first := l.p.Moved
			_, p := push(t, c, h, ref)
			_, whole := push(t, client(t, s, nil), h, serve(t, nil)+"/vm/web:v1")
			if p.Moved >= whole.Moved {
				t.Errorf("%d bytes were there already, and yet %d of %d moved", first, p.Moved, whole.Moved)
			}
		})
	}
}

func TestPushOfFilesThatChange(t *testing.T) {
	s := newStore(t)
	h := s.save(t, guest{name: "s", seed: 1})
	var once sync.Once
	ref := serve(t, before(func(_ http.ResponseWriter, r *http.Request) bool {
		if isUpload(r) {
			once.Do(func() {
				f, err := os.OpenFile(filepath.Join(h.Dir(), "disk-0.1.qcow2"), os.O_WRONLY, 0)
				if err == nil {
					_, err = f.WriteAt([]byte("other"), 4096)
					f.Close()
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		return false
	})) + "/vm/web:v1"
	if _, err := client(t, s, nil).Push(t.Context(), h, ref, snapshot.Auth{}, nil); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("%v", err)
	}
	if err := os.Remove(filepath.Join(h.Dir(), snapshot.FileState)); err != nil {
		t.Fatal(err)
	}
	if _, err := client(t, s, nil).Push(t.Context(), h, ref, snapshot.Auth{}, nil); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("%v", err)
	}
}

// TestDamagedIndex shows that the index is only a cache.
func TestDamagedIndex(t *testing.T) {
	s := newStore(t)
	h := s.save(t, guest{name: "s", seed: 1})
	dir := filepath.Join(t.TempDir(), "index")
	c := client(t, s, func(c *chunked.Config) { c.Index = dir })
	want, _ := push(t, c, h, serve(t, nil)+"/vm/web:v1")
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) < 2 {
		t.Fatalf("%v, %v", entries, err)
	}
	for name, change := range map[string]func([]byte) []byte{
		"garbage":      func([]byte) []byte { return []byte("{") },
		"other digest": func(b []byte) []byte { return []byte(strings.Replace(string(b), `"d":"sha256:`, `"d":"sha256:00`, 1)) },
		"wrong digest": func(b []byte) []byte {
			var d map[string]any
			_ = json.Unmarshal(b, &d)
			if chunks, _ := d["chunks"].([]any); len(chunks) > 0 {
				chunks[0].(map[string]any)["d"] = "sha256:" + strings.Repeat("0", 64)
			}
			b, _ = json.Marshal(d)
			return b
		},
		"beyond the end": func(b []byte) []byte {
			return []byte(strings.Replace(string(b), `"o":`, `"o":9`, 1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, e := range entries {
				path := filepath.Join(dir, e.Name())
				b, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, change(b), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if got, _ := push(t, c, h, serve(t, nil)+"/vm/web:v1"); got != want {
				t.Errorf("%s, want %s", got, want)
			}
		})
	}
	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

func TestConcurrentPushesThatShareChunks(t *testing.T) {
	s := newStore(t)
	host := serve(t, nil)
	var wg sync.WaitGroup
	c := client(t, s, nil)
	all := []snapshot.Held{s.save(t, guest{name: "a", seed: 1}), s.save(t, guest{name: "b", seed: 1, dirty: 5}), s.save(t, guest{name: "c", seed: 1, dirty: 9})}
	for i, h := range all {
		wg.Go(func() {
			if _, err := c.Push(t.Context(), h, host+"/vm/web:"+strconv.Itoa(i), snapshot.Auth{}, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	there := newStore(t)
	c = client(t, there, nil)
	for i, h := range all {
		got, _ := pull(t, c, there, host+"/vm/web:"+strconv.Itoa(i), "")
		same(t, h.Dir(), got.Dir())
	}
}

func TestFullDisk(t *testing.T) {
	small := smallDisk(t, "8m")
	s := newStore(t)
	h := s.save(t, guest{name: "s", seed: 1})
	ref := serve(t, nil) + "/vm/web:v1"
	push(t, client(t, s, nil), h, ref)
	there := newStoreAt(t, small)
	c := client(t, there, nil)
	if _, err := c.Pull(t.Context(), ref, "x", snapshot.Auth{}, nil); !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("%v", err)
	}
	empty(t, there)
	// The disk fills up during the pull.
	if err := unix.Mount("", small, "", unix.MS_REMOUNT, "size=64m"); err != nil {
		t.Fatal(err)
	}
	_, err := c.Pull(t.Context(), ref, "x", snapshot.Auth{}, func(p snapshot.Progress) {
		if p.Phase == "fetching" && p.Done > 0 {
			_ = os.WriteFile(filepath.Join(small, "other"), make([]byte, 60<<20), 0o600)
		}
	})
	if !errdefs.Is(err, errdefs.ResourceExhausted) || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("%v", err)
	}
	_ = os.Remove(filepath.Join(small, "other"))
	empty(t, there)
}

// TestForeignSnapshots: such snapshots are refused before their data is fetched.
func TestForeignSnapshots(t *testing.T) {
	s := newStore(t)
	h := s.save(t, guest{name: "s", seed: 1})
	var blobs atomic.Int64
	host := serve(t, before(func(_ http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodGet && isBlob(r) {
			blobs.Add(1)
		}
		return false
	}))
	push(t, client(t, s, nil), h, host+"/vm/web:v1")
	there := newStore(t)
	_, err := client(t, there, func(c *chunked.Config) { c.Hypervisors = []string{"cloud-hypervisor"} }).Pull(t.Context(), host+"/vm/web:v1", "x", snapshot.Auth{}, nil)
	if !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), `"qemu"`) || blobs.Load() != 2 { // its configuration and its record
		t.Errorf("%v after %d blobs", err, blobs.Load())
	}
	empty(t, there)
	// A snapshot of another system: it has no record of ours.
	session, _ := pushing(t, host+"/vm/other:v1")
	config := []byte(`{"schemaVersion":1,"hypervisor":"cloud-hypervisor","cpu":1,"memory":1,"files":{}}`)
	if err := session.PutBlob(t.Context(), ociclient.Digest(config), int64(len(config)), func() io.Reader { return strings.NewReader(string(config)) }); err != nil {
		t.Fatal(err)
	}
	m, err := json.Marshal(ociclient.Manifest{SchemaVersion: 2, MediaType: ociclient.MediaManifest, ArtifactType: artifact.TypeSnapshot, Config: ociclient.Descriptor{MediaType: artifact.MediaConfig, Digest: ociclient.Digest(config), Size: int64(len(config))}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := session.PutManifest(t.Context(), "v1", ociclient.MediaManifest, m); err != nil {
		t.Fatal(err)
	}
	for _, hypervisors := range [][]string{{"qemu"}, nil} {
		_, err = client(t, there, func(c *chunked.Config) { c.Hypervisors = hypervisors }).Pull(t.Context(), host+"/vm/other:v1", "x", snapshot.Auth{}, nil)
		if !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "cloud-hypervisor") {
			t.Errorf("%v", err)
		}
	}
	// A container image.
	if _, err := session.PutManifest(t.Context(), "image", ociclient.MediaManifest, []byte(strings.ReplaceAll(string(m), "vnd.cocoonstack.snapshot", "vnd.oci.image"))); err != nil {
		t.Fatal(err)
	}
	if _, err = client(t, there, nil).Pull(t.Context(), host+"/vm/other:image", "x", snapshot.Auth{}, nil); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "not a snapshot") {
		t.Errorf("%v", err)
	}
	// An index whose entry for this machine is the snapshot.
	own, err := client(t, there, nil).Digest(t.Context(), host+"/vm/web:v1", snapshot.Auth{})
	if err != nil {
		t.Fatal(err)
	}
	web, _ := pushing(t, host+"/vm/web:v1")
	if _, err := web.PutManifest(t.Context(), "another", ociclient.MediaManifest, m); err != nil {
		t.Fatal(err)
	}
	index := `{"schemaVersion":2,"mediaType":"` + ociclient.MediaIndex + `","manifests":[
		{"mediaType":"` + ociclient.MediaManifest + `","digest":"` + ociclient.Digest(m) + `","size":1,"platform":{"os":"linux","architecture":"s390x"}},
		{"mediaType":"` + ociclient.MediaManifest + `","digest":"` + own + `","size":1,"platform":{"os":"linux","architecture":"` + runtime.GOARCH + `"}}]}`
	digest, err := web.PutManifest(t.Context(), "index", ociclient.MediaIndex, []byte(index))
	if err != nil {
		t.Fatal(err)
	}
	got, _ := pull(t, client(t, there, nil), there, host+"/vm/web:index", "x")
	same(t, h.Dir(), got.Dir())
	if got.Snapshot().Digest != digest {
		t.Errorf("the snapshot's digest is %s, and the index is %s", got.Snapshot().Digest, digest)
	}
}
