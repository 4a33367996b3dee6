package podprovider

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/snapshot"
)

func TestOffered(t *testing.T) {
	s := &shelf{snaps: map[string]snapshot.Snapshot{}}
	p := &Provider{}
	p.Snapshots = s
	offered := func() (names []string) {
		t.Helper()
		all, err := p.Offered(t.Context())
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
		s.snaps[name] = snapshot.Snapshot{ID: name, Name: name, Size: 7, CreatedAt: old, UsedAt: used}
	}
	put("team___base:v2", time.Time{})
	put("base", time.Time{})
	put("vk-ns-vm:hibernate", old.Add(time.Hour))
	put("not:a:ref", old.Add(time.Hour))
	if got, want := offered(), []string{"base:latest", "team/base:v2"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	// Of many, those that were used last; which was used very last is no change.
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
	if none, err := (&Provider{}).Offered(t.Context()); len(none) != 0 || err != nil {
		t.Errorf("a node without snapshots offers %v, %v", none, err)
	}
}
