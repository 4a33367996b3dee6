//go:build vm

package cocoond_test

import (
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
	"cocoonstack.io/cocoon/internal/vm"
)

// slowRegistry gives some blobs only when a test says so, each once.
type slowRegistry struct {
	next http.Handler

	mu     sync.Mutex
	change sync.Cond
	slow   map[string]bool // digests
	allow  int             // how many of them may go now
	given  int
}

func (s *slowRegistry) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, digest, _ := strings.Cut(r.URL.Path, "/blobs/")
	s.mu.Lock()
	if r.Method == http.MethodGet && s.slow[digest] {
		for s.allow == 0 && r.Context().Err() == nil {
			s.change.Wait()
		}
		s.allow--
		s.given++
	}
	s.mu.Unlock()
	s.next.ServeHTTP(w, r)
}

// set lets n more blobs go, or if n is negative, none until it is called again.
func (s *slowRegistry) set(n int) (given int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.allow += n; n < 0 {
		s.allow, s.given = 0, 0
	}
	s.change.Broadcast()
	return s.given
}

// TestVMEarly clones a snapshot in a registry in Firecracker before its memory is here, on a node that is killed meanwhile.
func TestVMEarly(t *testing.T) {
	n := otherNode(t, "firecracker", "firecracker")
	ctx := t.Context()
	_, err := n.Launch(ctx, vm.Spec{
		Name: "web", Driver: "firecracker", Image: demo, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20, NICs: []vm.NICSpec{{}},
		Process: vm.Process{Entrypoint: []string{"sh", "-c", "n=0; while :; do n=$((n+1)); echo count $n; sleep 0.5; done & exec /usr/bin/server"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	n.serves(n.ready("web"))
	n.sh("web", "head -c 24000000 /dev/urandom >/dev/shm/data; md5sum </dev/shm/data >/dev/shm/sum")
	if _, err := n.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	registry := &slowRegistry{next: ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0))), slow: map[string]bool{}}
	registry.change.L = &registry.mu
	server := httptest.NewServer(registry)
	t.Cleanup(server.Close)
	t.Cleanup(func() { registry.set(1 << 20) })
	ref := server.URL + "/vm/web:v1"
	gold, err := n.PushSnapshot(ctx, "gold", ref, snapshot.Auth{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Get(server.URL + "/v2/vm/web/manifests/" + gold.Digest) //nolint:noctx // of this process
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var m ociclient.Manifest
	if err := json.NewDecoder(resp.Body).Decode(&m); err != nil {
		t.Fatal(err)
	}
	for _, l := range m.Layers {
		if l.Annotations[artifact.AnnotationTitle] == snapshot.FileMemory {
			registry.slow[l.Digest] = true
		}
	}
	total := len(registry.slow)
	for _, remove := range []error{n.Remove(ctx, "web", true), n.RemoveSnapshot(ctx, "gold")} {
		if remove != nil {
			t.Fatal(remove)
		}
	}

	// early starts a clone, and returns when it is ready. Its memory comes piece by piece.
	early := func(name string) {
		t.Helper()
		registry.set(-1)
		s, err := n.PullSnapshotEarly(ctx, ref, name, snapshot.Auth{}, nil)
		if err != nil || !s.Arriving {
			t.Fatalf("%+v, %v", s, err)
		}
		over, stopped := make(chan struct{}), make(chan struct{})
		go func() { // the registry is that slow
			defer close(stopped)
			tick := time.NewTicker(50 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
					registry.set(1)
				case <-over:
					return
				}
			}
		}()
		_, err = n.Clone(ctx, vm.CloneSpec{Snapshot: name, Name: name})
		if err == nil {
			n.ready(name)
		}
		close(over)
		<-stopped
		given := registry.set(0)
		x, gerr := n.GetSnapshot(ctx, name)
		t.Logf("the clone is ready with %d of %d chunks of its memory", given, total)
		if err != nil || gerr != nil || !x.Arriving || given > total-9 {
			t.Fatalf("%s arrives: %v, %v; %v", name, x.Arriving, gerr, err)
		}
	}
	same := func(name string) {
		t.Helper()
		if got := n.sh(name, "md5sum </dev/shm/data | cmp - /dev/shm/sum && echo same"); got != "same" {
			t.Errorf("in %s the memory is not as it was: %q", name, got)
		}
		n.goesOn(name)
		n.serves(n.ready(name))
	}

	early("killed")
	n.crash()
	n.ready("killed")
	if _, err := n.GetSnapshot(ctx, "killed"); !errdefs.IsNotFound(err) {
		t.Errorf("a snapshot that has not arrived is there after a crash: %v", err)
	}
	registry.set(total)
	same("killed")
	n.until("what loads the memory and gives it has ended", func() bool { return len(helpers(t)) == 0 })
	if err := n.Remove(ctx, "killed", true); err != nil {
		t.Error(err)
	}

	early("early")
	registry.set(total)
	n.until("the snapshot arrives", func() bool {
		x, err := n.GetSnapshot(ctx, "early")
		if err != nil {
			t.Fatal(err)
		}
		return !x.Arriving
	})
	same("early")
	if _, err := n.Clone(ctx, vm.CloneSpec{Snapshot: "early", Name: "later"}); err != nil {
		t.Fatal(err)
	}
	n.ready("later")
	same("later")
	n.until("what loads the memory and gives it has ended", func() bool { return len(helpers(t)) == 0 })
	for _, name := range []string{"early", "later"} {
		if err := n.Remove(ctx, name, true); err != nil {
			t.Error(err)
		}
	}
}

// helpers returns the processes that load memory or give it.
func helpers(t *testing.T) (found []string) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range all {
		text, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			continue
		}
		if args := strings.Split(string(text), "\x00"); len(args) > 1 && (args[1] == chunked.LoadCommand || args[1] == "answer-page-faults-1") {
			found = append(found, path)
		}
	}
	return found
}
