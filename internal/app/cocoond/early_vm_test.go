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

// inTurn is how many chunks a pull asks for at once that nobody waits for.
const inTurn = 6

// slowRegistry keeps back as many chunks of its list as are asked for in their turn, so that others are given: those for which a guest waits.
type slowRegistry struct {
	next http.Handler

	mu     sync.Mutex
	change sync.Cond
	memory map[string]bool // digests
	closed bool
	kept   int // chunks
	turns  int // how many were ever kept
	let    int // how many of those may go
	given  int
}

func (s *slowRegistry) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, digest, _ := strings.Cut(r.URL.Path, "/blobs/")
	s.mu.Lock()
	if r.Method == http.MethodGet && s.memory[digest] {
		if s.closed && s.kept < inTurn {
			turn := s.turns
			for s.kept, s.turns = s.kept+1, turn+1; s.closed && turn >= s.let; { // the oldest goes first
				s.change.Wait()
			}
			s.kept--
		}
		s.given++
	}
	s.mu.Unlock()
	s.next.ServeHTTP(w, r)
}

// set says whether chunks are kept back.
func (s *slowRegistry) set(closed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed, s.given, s.turns, s.let = closed, 0, 0, 0
	s.change.Broadcast()
}

// stir lets a chunk go when none was given since the last call: a guest may wait for one that was asked for in its turn. It returns how many were given.
func (s *slowRegistry) stir(last int) (given int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.given == last && s.kept > 0 {
		s.let++
		s.change.Broadcast()
	}
	return s.given
}

// TestVMHypervisorsEarly clones a snapshot in a registry in Firecracker before its memory is here, on a node that is killed meanwhile.
func TestVMHypervisorsEarly(t *testing.T) {
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
	n.sh("web", "head -c 64000000 /dev/urandom >/dev/shm/data; md5sum </dev/shm/data >/dev/shm/sum")
	if _, err := n.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	registry := &slowRegistry{next: ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0))), memory: map[string]bool{}}
	registry.change.L = &registry.mu
	server := httptest.NewServer(registry)
	t.Cleanup(server.Close)
	t.Cleanup(func() { registry.set(false) })
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
		// Random bytes are sent as they are, and the guest reads them only when it is asked to.
		if l.Annotations[artifact.AnnotationTitle] == snapshot.FileMemory && !strings.HasSuffix(l.MediaType, artifact.SuffixZstd) {
			registry.memory[l.Digest] = true
		}
	}
	total := len(registry.memory)
	for _, remove := range []error{n.Remove(ctx, "web", true), n.RemoveSnapshot(ctx, "gold")} {
		if remove != nil {
			t.Fatal(remove)
		}
	}

	// early starts a clone, and returns when it is ready. Only what it needs comes.
	early := func(name string) {
		t.Helper()
		registry.set(true)
		if s, err := n.PullSnapshotEarly(ctx, ref, name, snapshot.Auth{}, nil); err != nil || !s.Arriving {
			t.Fatalf("%s arrives: %v, %v", name, s.Arriving, err)
		}
		over, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			tick := time.NewTicker(2 * time.Second)
			defer tick.Stop()
			for given := 0; ; {
				select {
				case <-tick.C:
					given = registry.stir(given)
				case <-over:
					return
				}
			}
		}()
		_, err := n.Clone(ctx, vm.CloneSpec{Snapshot: name, Name: name})
		if err == nil {
			n.ready(name) //nolint:contextcheck // it has that of the test
		}
		close(over)
		<-stopped
		given := registry.stir(-1)
		x, gerr := n.GetSnapshot(ctx, name)
		t.Logf("the clone is ready with %d of %d chunks that it does not need", given, total)
		if err != nil || gerr != nil || !x.Arriving || given > total-inTurn {
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
	registry.set(false)
	same("killed")
	n.until("what loads the memory and gives it has ended", func() bool { return len(helpers(t)) == 0 })
	if err := n.Remove(ctx, "killed", true); err != nil {
		t.Error(err)
	}

	early("early")
	registry.set(false)
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
