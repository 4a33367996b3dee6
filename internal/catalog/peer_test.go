package catalog_test

import (
	"context"
	"io"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// peer is another node with one snapshot.
type peer struct{ has snapshot.Snapshot }

func (p peer) GetSnapshot(_ context.Context, ref string) (snapshot.Snapshot, error) {
	if ref != p.has.Name {
		return snapshot.Snapshot{}, vm.Snapshots.Missing(vm.Owner{}, ref)
	}
	return p.has, nil
}

func (p peer) ExportSnapshot(_ context.Context, _ string, w io.Writer) error {
	_, err := io.WriteString(w, "content")
	return err
}

func (p peer) Close() error { return nil }

func (s *store) Import(_ context.Context, name, _ string, r io.Reader, progress func(int64)) (snapshot.Snapshot, error) {
	b, err := io.ReadAll(r)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	progress(int64(len(b)))
	s.all[name] = snapshot.Snapshot{ID: "imported-" + name, Name: name, Size: int64(len(b))}
	return s.all[name], nil
}

func TestPeersAreNamedByAddressAndSnapshot(t *testing.T) {
	c := &catalog.Snapshots{Store: newStore(), Dial: func(string) (catalog.Peer, error) { return peer{snapshot.Snapshot{Name: "one"}}, nil }}
	for from, class := range map[string]errdefs.Class{
		"cocoon://node:1/none": errdefs.NotFound,
		"cocoon://node:1":      errdefs.InvalidArgument,
		"cocoon://node:1/":     errdefs.InvalidArgument,
		"cocoon://node:1/a/b":  errdefs.InvalidArgument,
		"cocoon://host/one":    errdefs.InvalidArgument,
	} {
		if _, err := c.PullSnapshot(t.Context(), from, "x", snapshot.Auth{}, nil); errdefs.ClassOf(err) != class {
			t.Errorf("%s: %v, want %v", from, err, class)
		}
	}
	if got, err := c.PullSnapshot(t.Context(), "cocoon://node:1/one", "copy", snapshot.Auth{}, nil); err != nil || got.Name != "copy" || got.Size != int64(len("content")) {
		t.Errorf("%+v, %v", got, err)
	}
	c.Dial = nil
	if _, err := c.PullSnapshot(t.Context(), "cocoon://node:1/one", "x", snapshot.Auth{}, nil); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "peer: {ca, cert, key}") {
		t.Errorf("a node without a certificate: %v", err)
	}
}

// A snapshot that the peer does not assign to the namespace is refused, even if the name fits.
func TestAPeerSaysWhoseASnapshotIs(t *testing.T) {
	prod := vm.OnBehalf(t.Context(), vm.Owner{Namespace: "prod"})
	for name, change := range map[string]struct {
		of        vm.Owner
		published []string
		ok        bool
	}{
		"unsaid": {vm.Owner{}, nil, false}, "published-to-others": {vm.Owner{}, []string{"dev"}, false},
		"own": {vm.Owner{Namespace: "prod"}, nil, true}, "published": {vm.Owner{}, []string{"prod"}, true}, "everybodys": {vm.Owner{}, []string{vm.Everyone}, true},
	} {
		theirs := peer{snapshot.Snapshot{Name: "one", Owner: change.of, Published: change.published}}
		c := &catalog.Snapshots{Store: newStore(), Dial: func(string) (catalog.Peer, error) { return theirs, nil }}
		if _, err := c.PullSnapshot(prod, "cocoon://node:1/one", name, snapshot.Auth{}, nil); (err == nil) != change.ok || !change.ok && !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
