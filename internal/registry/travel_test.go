package registry_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
	"cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/snapshot/snapshottest"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func snapshots(t *testing.T) *local.Store {
	t.Helper()
	s, err := local.New(local.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func hold(t *testing.T, s snapshot.Store, ref string) snapshot.Held {
	t.Helper()
	h, err := s.Hold(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Release)
	return h
}

// same checks that two snapshots have the same files.
func same(t *testing.T, a, b snapshot.Held) {
	t.Helper()
	for _, name := range a.Snapshot().Files() {
		x, err := os.ReadFile(filepath.Join(a.Dir(), name))
		if err != nil {
			t.Fatal(err)
		}
		y, err := os.ReadFile(filepath.Join(b.Dir(), name))
		if err != nil || !bytes.Equal(x, y) {
			t.Errorf("%s differs: %d and %d bytes, %v", name, len(x), len(y), err)
		}
	}
}

// Nodes push to this registry, other nodes pull, and anybody can download a stream that an import accepts; the second
// push sends almost nothing.
func TestSnapshotsTravel(t *testing.T) {
	for _, whole := range []bool{false, true} {
		r := newRig(t, registry.Config{}, content.Config{})
		from := snapshots(t)
		snapshottest.Save(t, from, snapshottest.NewGuest(t), "dev")
		source := hold(t, from, "dev")
		client := chunked.New(chunked.Config{Index: t.TempDir(), Whole: whole}, from)
		ref := r.url + "/vms/dev:hibernate"
		digest, err := client.Push(t.Context(), source, ref, snapshot.Auth{Token: allToken}, nil)
		if err != nil {
			t.Fatal(err)
		}
		before := r.content.Usage()
		again, err := client.Push(t.Context(), source, ref, snapshot.Auth{Token: allToken}, nil)
		if err != nil || again != digest || r.content.Usage() != before {
			t.Errorf("the second push: %s after %s, %v, usage %s", again, digest, err, diff.Of(before, r.content.Usage()))
		}

		pulled := snapshots(t)
		if _, err := chunked.New(chunked.Config{}, pulled).Pull(t.Context(), ref, "copy", snapshot.Auth{Token: allToken}, nil); err != nil {
			t.Fatal(err)
		}
		same(t, source, hold(t, pulled, "copy"))

		got := r.want(r.do("GET", "/dl/vms/dev?tag=hibernate", nil), 200)
		imported := snapshots(t)
		if _, err := imported.Import(t.Context(), "", "", bytes.NewReader(got.body), nil); err != nil {
			t.Fatalf("whole %v: %v", whole, err)
		}
		same(t, source, hold(t, imported, "dev"))

		if _, err := client.Push(t.Context(), source, ref, snapshot.Auth{Token: oldToken}, nil); err == nil || strings.Contains(err.Error(), oldToken) {
			t.Errorf("with an expired token: %v", err)
		}
		if err := client.Delete(t.Context(), ref, snapshot.Auth{Token: allToken}); err != nil {
			t.Error(err)
		}
		r.want(r.do("GET", "/dl/vms/dev?tag=hibernate", nil), 404)
	}
}

// A full registry is not a lack of rights: the client is told to free space, not to find another token.
func TestPushToAFullRegistry(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{Quota: 1 << 10})
	from := snapshots(t)
	snapshottest.Save(t, from, snapshottest.NewGuest(t), "dev")
	_, err := chunked.New(chunked.Config{}, from).Push(t.Context(), hold(t, from, "dev"), r.url+"/vms/dev:1", snapshot.Auth{Token: allToken}, nil)
	if !errdefs.Is(err, errdefs.ResourceExhausted) || !strings.Contains(err.Error(), "quota") {
		t.Errorf("%v", err)
	}
}
