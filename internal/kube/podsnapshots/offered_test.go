package podsnapshots

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// listed is a Snapshots that implements only ListSnapshots.
type listed struct {
	Snapshots
	snaps map[string]snapshot.Snapshot
}

func (l listed) ListSnapshots(context.Context) ([]snapshot.Snapshot, error) {
	return slices.Collect(maps.Values(l.snaps)), nil
}

func TestOffered(t *testing.T) {
	s := listed{snaps: map[string]snapshot.Snapshot{}}
	store := New("node-1", s, Registry{}, Metrics{})
	offered := func() (names []string) {
		t.Helper()
		all, err := store.Offered(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, image := range all {
			names = append(names, image.Names...)
		}
		return names
	}
	old := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	put := func(name string, used time.Time) {
		s.snaps[name] = snapshot.Snapshot{ID: name, Name: name, Published: []string{vm.Everyone}, Size: 7, CreatedAt: old, UsedAt: used}
	}
	put("team___base:v2", time.Time{})
	put("base", time.Time{})
	put("vk-ns-vm:hibernate", old.Add(time.Hour))
	put("not:a:ref", old.Add(time.Hour))
	put("hidden", time.Time{}) // belongs to the operator and is not shared
	for name, change := range map[string]func(*snapshot.Snapshot){
		"hidden":    func(x *snapshot.Snapshot) { x.Published = nil },
		"shared":    func(x *snapshot.Snapshot) { x.Published = []string{"a", "b"} },
		"own":       func(x *snapshot.Snapshot) { x.Owner.Namespace = "a" },
		"own___:v2": func(x *snapshot.Snapshot) { x.Owner.Namespace = "a" },
	} {
		put(name, time.Time{})
		x := s.snaps[name]
		change(&x)
		s.snaps[name] = x
	}
	if got, want := offered(), []string{"a/own:latest", "a/own:v2", "a/shared:latest", "b/shared:latest", "base:latest", "team/base:v2"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for _, name := range []string{"hidden", "shared", "own", "own___:v2"} {
		delete(s.snaps, name)
	}
	// Of many snapshots, the most recently used ones are offered. A new use of one of them does not change the list.
	for i := range maxOffered + 5 {
		put(fmt.Sprintf("s-%02d", i), old.Add(time.Duration(i+1)*time.Second))
	}
	got := offered()
	if len(got) != maxOffered || got[0] != "s-05:latest" || got[maxOffered-1] != fmt.Sprintf("s-%02d:latest", maxOffered+4) {
		t.Errorf("%d: %v", len(got), got)
	}
	put("s-10", old.Add(time.Hour))
	if again := offered(); !slices.Equal(got, again) {
		t.Errorf("%v, then %v", got, again)
	}
	if none, err := New("node-1", nil, Registry{}, Metrics{}).Offered(t.Context()); len(none) != 0 || err != nil {
		t.Errorf("a node without snapshots offers %v, %v", none, err)
	}
}
