package nodeapi_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodeapi"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// A front end may use the client, or the engine and a catalog.
var (
	_ nodeapi.Snapshots = (*nodeclient.Client)(nil)
	_ nodeapi.Snapshots = (*catalog.Snapshots)(nil)
	_ catalog.Peer      = (*nodeclient.Client)(nil)
)

// memory is a snapshot store and a registry of byte strings, in memory.
type memory struct {
	snapshot.Store  // panics for what is not written here
	snapshot.Remote // the same

	mu    sync.Mutex
	held  int
	all   map[string]snapshot.Snapshot
	bytes map[string][]byte // by id, and in the registry by reference
	auth  snapshot.Auth     // credentials of the last registry call
	drop  bool              // an export is cut off in the middle
	began chan struct{}     // if not nil: an import reports here that it reads
	ended chan error        // … and here its result
}

func newMemory(names ...string) *memory {
	s := &memory{all: map[string]snapshot.Snapshot{}, bytes: map[string][]byte{}}
	for i, n := range names {
		snap := snapshot.Snapshot{ID: fmt.Sprintf("id%d", i), Name: n, Image: "demo:1", ImageDigest: "sha256:here", Size: 9}
		s.all[n], s.bytes[snap.ID] = snap, []byte("content of "+n)
	}
	return s
}

func (s *memory) Get(_ context.Context, ref string) (snapshot.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, snap := range s.all {
		if snap.Name == ref || snap.ID == ref {
			return snap, nil
		}
	}
	return snapshot.Snapshot{}, vm.Snapshots.Missing(vm.Owner{}, ref)
}

func (s *memory) List(context.Context) (all []snapshot.Snapshot, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, snap := range s.all {
		all = append(all, snap)
	}
	return all, nil
}

type held struct {
	snapshot.Held
	s    *memory
	snap snapshot.Snapshot
}

func (h held) Snapshot() snapshot.Snapshot { return h.snap }
func (h held) Release()                    { h.s.mu.Lock(); h.s.held--; h.s.mu.Unlock() }

func (s *memory) Hold(ctx context.Context, ref string) (snapshot.Held, error) {
	snap, err := s.Get(ctx, ref)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	s.held++
	s.mu.Unlock()
	return held{s: s, snap: snap}, nil
}

func (s *memory) Export(_ context.Context, h snapshot.Held, w io.Writer) error {
	if s.drop {
		_, _ = io.WriteString(w, "cont")
		return errdefs.Unavailablef("the disk went away")
	}
	_, err := w.Write(s.bytes[h.Snapshot().ID])
	return err
}

func (s *memory) ExportDir(_ context.Context, _ snapshot.Held, dir string) error {
	return errdefs.Preconditionf("would write to %s", dir)
}

func (s *memory) ImportDir(_ context.Context, name, description, dir string) (snapshot.Snapshot, error) {
	return snapshot.Snapshot{Name: name, Description: description, Digest: dir}, nil
}

func (s *memory) Import(_ context.Context, name, description string, r io.Reader, progress func(int64)) (snapshot.Snapshot, error) {
	if s.began != nil {
		s.began <- struct{}{}
	}
	b, err := io.ReadAll(r)
	if s.ended != nil {
		s.ended <- err
	}
	if err != nil {
		return snapshot.Snapshot{}, errdefs.New(errdefs.DataLoss, "the stream is cut: %w", err)
	}
	progress(int64(len(b)))
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, taken := s.all[name]; taken {
		return snapshot.Snapshot{}, errdefs.Existsf("the name %s is taken", name)
	}
	snap := snapshot.Snapshot{ID: "imported-" + name, Name: name, Description: description, Size: int64(len(b))}
	s.all[name], s.bytes[snap.ID] = snap, b
	return snap, nil
}

func (s *memory) Update(_ context.Context, ref string, change func(*snapshot.Snapshot)) (snapshot.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, snap := range s.all {
		if snap.ID == ref {
			change(&snap)
			s.all[name] = snap
			return snap, nil
		}
	}
	return snapshot.Snapshot{}, errdefs.NotFoundf("no snapshot %s", ref)
}

func (s *memory) Push(_ context.Context, h snapshot.Held, ref string, auth snapshot.Auth, progress func(snapshot.Progress)) (string, error) {
	s.auth = auth
	for i := range int64(1000) { // more than a client needs
		progress(snapshot.Progress{Phase: "sending", Done: i + 1, Total: 1000, Moved: i})
	}
	s.bytes[ref] = s.bytes[h.Snapshot().ID]
	return "sha256:pushed", nil
}

func (s *memory) Pull(ctx context.Context, ref, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	s.auth = auth
	b, ok := s.bytes[ref]
	if !ok {
		return snapshot.Snapshot{}, errdefs.NotFoundf("%s is not in the registry", ref)
	}
	if string(b) == "endless" {
		s.began <- struct{}{}
		<-ctx.Done()
		s.ended <- ctx.Err()
		return snapshot.Snapshot{}, ctx.Err()
	}
	return s.Import(ctx, name, "", bytes.NewReader(b), func(n int64) { progress(snapshot.Progress{Phase: "fetching", Done: n, Total: -1}) })
}

func (s *memory) Digest(_ context.Context, ref string, _ snapshot.Auth) (string, error) {
	return "sha256:of-" + ref, nil
}

func (s *memory) Delete(_ context.Context, ref string, _ snapshot.Auth) error {
	return errdefs.Preconditionf("%s is locked", ref)
}

func (s *memory) Check(_ context.Context, _ string, a snapshot.Auth) error {
	if a.Token != "good" {
		return errdefs.Preconditionf("the registry refused the credentials")
	}
	return nil
}

func (s *scripted) Clone(_ context.Context, spec vm.CloneSpec) (vm.Record, error) {
	s.cloned = spec
	return vm.Record{ID: "clone", Spec: vm.Spec{Name: spec.Name}}, nil
}

func (s *scripted) SaveSnapshot(_ context.Context, ref string, spec vm.SaveSpec) (snapshot.Snapshot, error) {
	return snapshot.Snapshot{Name: spec.Name, Description: spec.Description, Quiesced: spec.Quiesce, Labels: spec.Labels, Source: snapshot.Source{VMName: ref}, Pause: time.Second}, nil
}

func (s *scripted) RemoveSnapshot(_ context.Context, ref string) error {
	return errdefs.Preconditionf("VM web is in snapshot %s; wake it first", ref)
}

func (s *scripted) Restore(_ context.Context, ref, snap string) (vm.Record, error) {
	return vm.Record{ID: vm.ID(ref), Snapshot: snap}, nil
}

func (s *scripted) Hibernate(_ context.Context, ref, name string) (vm.Record, error) {
	return vm.Record{ID: vm.ID(ref), Snapshot: name, State: vm.StateHibernated}, nil
}

func (s *scripted) Wake(_ context.Context, ref string) (vm.Record, error) {
	return vm.Record{ID: vm.ID(ref), State: vm.StateRunning, Resume: &vm.Resume{MACs: []string{"m"}}, Cloned: true, SnapshotIDs: []string{"a"}}, nil
}

// serveCatalog runs a server with snapshots.
func serveCatalog(t *testing.T, s *scripted, sh *memory, more func(*catalog.Snapshots)) *nodeclient.Client {
	t.Helper()
	s.snapshots = &catalog.Snapshots{Cloner: s, Store: sh, Remote: sh}
	if more != nil {
		more(s.snapshots)
	}
	c, _ := serve(t, s, nodeapi.Config{})
	return c
}

func TestSnapshotVerbs(t *testing.T) {
	sh := newMemory("one")
	c, ctx := serveCatalog(t, &scripted{}, sh, nil), t.Context()
	spec := vm.SaveSpec{Name: "s", Description: "d", Quiesce: true, Labels: map[string]string{"a": "b"}}
	want := snapshot.Snapshot{Name: "s", Description: "d", Quiesced: true, Labels: spec.Labels, Source: snapshot.Source{VMName: "web"}, Pause: time.Second}
	saved, err := c.SaveSnapshot(ctx, "web", spec)
	if d := diff.Of(want, saved); err != nil || d != "" {
		t.Errorf("save: %v, %s", err, d)
	}
	if got, err := c.GetSnapshot(ctx, "one"); err != nil || got.ID != "id0" || got.Size != 9 {
		t.Errorf("inspect: %+v, %v", got, err)
	}
	if _, err := c.GetSnapshot(ctx, "two"); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), `"two"`) {
		t.Errorf("inspect of none: %v", err)
	}
	if got, err := c.ListSnapshots(ctx); err != nil || len(got) != 1 {
		t.Errorf("list: %+v, %v", got, err)
	}
	if err := c.RemoveSnapshot(ctx, "one"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("remove: %v", err)
	}
	if r, err := c.Restore(ctx, "web", "one"); err != nil || r.ID != "web" || r.Snapshot != "one" {
		t.Errorf("restore: %+v, %v", r, err)
	}
	if r, err := c.Hibernate(ctx, "web", "h"); err != nil || r.State != vm.StateHibernated || r.Snapshot != "h" {
		t.Errorf("hibernate: %+v, %v", r, err)
	}
	r, err := c.Wake(ctx, "web")
	if d := diff.Of(&vm.Resume{MACs: []string{"m"}}, r.Resume); err != nil || d != "" || !r.Cloned {
		t.Errorf("wake: cloned %v, %v, %s", r.Cloned, err, d)
	}
}

func TestExportAndImport(t *testing.T) {
	sh := newMemory("one")
	sh.bytes["id0"] = bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	c, ctx := serveCatalog(t, &scripted{}, sh, nil), t.Context()
	var out bytes.Buffer
	if err := c.ExportSnapshot(ctx, "one", &out); err != nil || !bytes.Equal(out.Bytes(), sh.bytes["id0"]) {
		t.Fatalf("export: %d bytes, %v", out.Len(), err)
	}
	var reported int64
	got, err := c.ImportSnapshot(ctx, "two", "why", &out, func(n int64) { reported = n })
	if err != nil || got.Name != "two" || got.Description != "why" || reported != got.Size || !bytes.Equal(sh.bytes[got.ID], sh.bytes["id0"]) {
		t.Fatalf("import: %+v, %v, reported %d", got, err, reported)
	}
	if _, err := c.ImportSnapshot(ctx, "two", "", strings.NewReader("x"), nil); !errdefs.Is(err, errdefs.AlreadyExists) {
		t.Errorf("import under a name that is taken: %v", err)
	}
	if got, err := c.ImportSnapshotDir(ctx, "three", "d", "/srv/x"); err != nil || got.Digest != "/srv/x" || got.Description != "d" {
		t.Errorf("import of a folder: %+v, %v", got, err)
	}
	if err := c.ExportSnapshotDir(ctx, "one", "/srv/x"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("export to a folder: %v", err)
	}
	for name, err := range map[string]error{
		"export": c.ExportSnapshotDir(ctx, "one", "x"),
		"import": func() error { _, err := c.ImportSnapshotDir(ctx, "n", "", "./x"); return err }(),
		"clone":  func() error { _, err := c.Clone(ctx, vm.CloneSpec{FromDir: "x"}); return err }(),
		"both":   func() error { _, err := c.Clone(ctx, vm.CloneSpec{FromDir: "/x", Snapshot: "y"}); return err }(),
		"none":   func() error { _, err := c.Clone(ctx, vm.CloneSpec{}); return err }(),
	} {
		if !errdefs.IsInvalid(err) {
			t.Errorf("%s with a bad folder: %v", name, err)
		}
	}
	sh.drop = true
	if err := c.ExportSnapshot(ctx, "one", io.Discard); !errdefs.IsUnavailable(err) {
		t.Errorf("half an export: %v", err)
	}
	if sh.held != 0 {
		t.Errorf("%d snapshots are still held", sh.held)
	}
}

// Neither a source that fails nor a client that goes away looks like the end of a snapshot.
func TestHalfAnImportIsNone(t *testing.T) {
	sh := newMemory()
	sh.began, sh.ended = make(chan struct{}, 2), make(chan error, 1)
	c := serveCatalog(t, &scripted{}, sh, nil)
	broken := errdefs.New(errdefs.DataLoss, "disk on fire")
	_, err := c.ImportSnapshot(t.Context(), "x", "", io.MultiReader(strings.NewReader("half"), reader(func([]byte) (int, error) {
		<-sh.began
		return 0, broken
	})), nil)
	if !errors.Is(err, broken) {
		t.Errorf("the caller got %v", err)
	}
	if err := <-sh.ended; err == nil {
		t.Error("the store took half a snapshot for a whole one")
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-sh.began; cancel() }()
	_, err = c.ImportSnapshot(ctx, "x", "", reader(func(p []byte) (int, error) { <-ctx.Done(); return 0, ctx.Err() }), nil)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("the caller got %v", err)
	}
	if err := <-sh.ended; err == nil {
		t.Error("the store took half a snapshot for a whole one")
	}
}

func TestPushAndPull(t *testing.T) {
	sh := newMemory("one")
	c, ctx := serveCatalog(t, &scripted{}, sh, nil), t.Context()
	auth := snapshot.Auth{Token: "secret", CA: []byte("pem")}
	var reports []snapshot.Progress
	got, err := c.PushSnapshot(ctx, "one", "reg.example/one:v1", auth, func(p snapshot.Progress) { reports = append(reports, p) })
	if d := diff.Of(auth, sh.auth); err != nil || got.Digest != "sha256:pushed" || sh.all["one"].Digest != "sha256:pushed" || d != "" {
		t.Fatalf("push: %+v, %v, credentials %s", got, err, d)
	}
	if n := len(reports); n < 2 || n > 500 || reports[n-1].Done != 1000 || reports[n-1].Moved != 999 {
		t.Errorf("%d reports, the last %+v", n, reports[max(n-1, 0)])
	}
	if got, err = c.PullSnapshot(ctx, "reg.example/one:v1", "two", auth, nil); err != nil || string(sh.bytes[got.ID]) != "content of one" {
		t.Errorf("pull: %+v, %v", got, err)
	}
	if _, err = c.PullSnapshot(ctx, "reg.example/none", "x", auth, nil); !errdefs.IsNotFound(err) {
		t.Errorf("pull of none: %v", err)
	}
	if d, err := c.TagDigest(ctx, "r:t", auth); err != nil || d != "sha256:of-r:t" {
		t.Errorf("digest: %q, %v", d, err)
	}
	if err := c.DeleteTag(ctx, "r:t", auth); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("delete: %v", err)
	}
	if err := c.CheckRegistry(ctx, "r", snapshot.Auth{Token: "good"}); err != nil {
		t.Errorf("check: %v", err)
	}
	if err := c.CheckRegistry(ctx, "r", auth); !errdefs.IsFailedPrecondition(err) || strings.Contains(err.Error(), "secret") {
		t.Errorf("check with bad credentials: %v", err)
	}
}

func TestPullEndsWithItsClient(t *testing.T) {
	sh := newMemory()
	sh.began, sh.ended, sh.bytes["r"] = make(chan struct{}, 1), make(chan error, 1), []byte("endless")
	c := serveCatalog(t, &scripted{}, sh, nil)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-sh.began; cancel() }()
	if _, err := c.PullSnapshot(ctx, "r", "x", snapshot.Auth{}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("the caller got %v", err)
	}
	if err := <-sh.ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the transfer ended with %v", err)
	}
}

// One node fetches a snapshot from another one over TCP; each proves its identity.
func TestPullFromAPeer(t *testing.T) {
	ca, caKey := certificate(t, nil, nil)
	files := tlsFiles(t, ca, caKey)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	theirs, ours := newMemory("one"), newMemory("taken")
	theirs.bytes["id0"] = bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	there := &scripted{snapshots: &catalog.Snapshots{Store: theirs}}
	serve(t, there, nodeapi.Config{TCP: addr, TLS: files})

	roots := x509.NewCertPool()
	roots.AddCert(ca)
	cfg := &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair(t, ca, caKey)}}
	c, ctx := serveCatalog(t, &scripted{}, ours, func(s *catalog.Snapshots) {
		s.Dial = func(addr string) (catalog.Peer, error) { return nodeclient.DialTLS(addr, cfg) }
	}), t.Context()

	var last snapshot.Progress
	from := "cocoon://" + addr + "/one"
	got, err := c.PullSnapshot(ctx, from, "copy", snapshot.Auth{}, func(p snapshot.Progress) { last = p })
	if err != nil || got.Name != "copy" || !bytes.Equal(ours.bytes[got.ID], theirs.bytes["id0"]) || last.Moved != 1_600_000 {
		t.Fatalf("%+v, %v, %+v", got, err, last)
	}
	for from, class := range map[string]errdefs.Class{
		"cocoon://" + addr + "/none": errdefs.NotFound,
		"cocoon://127.0.0.1:1/one":   errdefs.Unavailable,
	} {
		if _, err := c.PullSnapshot(ctx, from, "x", snapshot.Auth{}, nil); errdefs.ClassOf(err) != class {
			t.Errorf("%s: %v, want %v", from, err, class)
		}
	}
	if _, err := c.PullSnapshot(ctx, from, "taken", snapshot.Auth{}, nil); !errdefs.Is(err, errdefs.AlreadyExists) {
		t.Errorf("a name that is taken: %v", err)
	}
	theirs.drop = true
	if _, err := c.PullSnapshot(ctx, from, "cut", snapshot.Auth{}, nil); !errdefs.IsUnavailable(err) {
		t.Errorf("a peer that breaks off: %v", err)
	}
	if _, err := c.GetSnapshot(ctx, "cut"); !errdefs.IsNotFound(err) {
		t.Errorf("half a snapshot is there: %v", err)
	}
	if theirs.held != 0 {
		t.Errorf("%d snapshots are still held", theirs.held)
	}
}

type pusher struct{ got image.PushRequest }

func (p *pusher) Push(_ context.Context, r image.PushRequest, progress func(image.Progress)) (string, error) {
	p.got = r
	progress(image.Progress{Phase: "sending", Done: 1, Total: 2})
	return "sha256:m", nil
}

func TestPushImage(t *testing.T) {
	p := &pusher{}
	c, _ := serve(t, &scripted{pusher: p}, nodeapi.Config{})
	req := image.PushRequest{Ref: "demo", To: "reg/demo:1", Username: "u", Password: "p"}
	var seen image.Progress
	img, err := c.PushImage(t.Context(), req, func(p image.Progress) { seen = p })
	if d := diff.Of(req, p.got); err != nil || img.Digest != "sha256:m" || img.Name != "demo" || seen.Total != 2 || d != "" {
		t.Errorf("%+v, %v, %+v, asked for %s", img, err, seen, d)
	}
	without, _ := serve(t, &scripted{}, nodeapi.Config{})
	if _, err := without.PushImage(t.Context(), req, nil); errdefs.ClassOf(err) != errdefs.Unsupported {
		t.Errorf("%v", err)
	}
}
