package registry_test

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/registry"
)

func TestThereAndBack(t *testing.T) {
	for name, change := range map[string]func(*registry.Config){
		"chunked":      nil,
		"uncompressed": func(c *registry.Config) { c.Uncompressed = true },
		"whole":        func(c *registry.Config) { c.Whole = true },
		"no index":     func(c *registry.Config) { c.Index = "" },
	} {
		t.Run(name, func(t *testing.T) {
			here, there := newStore(t), newStore(t)
			h := here.save(t, guest{name: "s", seed: 1})
			host := serve(t, nil)
			ref := host + "/vm/web:v1"
			digest, _ := push(t, client(t, here, change), h, ref)
			c := client(t, there, change)
			got, p := pull(t, c, there, ref, "")
			same(t, h.Dir(), got.Dir())
			s := got.Snapshot()
			if s.Name != "s" || s.Digest != digest || s.Memory != h.Snapshot().Memory || !s.Live || len(s.Disks) != 2 {
				t.Errorf("it came back as %+v", s)
			}
			if p.Done != p.Total || p.Moved == 0 {
				t.Errorf("the last progress is %+v", p)
			}
			if d, err := c.Digest(t.Context(), ref, snapshot.Auth{}); err != nil || d != digest {
				t.Errorf("digest %s, %v", d, err)
			}
			if _, err := c.Pull(t.Context(), ref, "s", snapshot.Auth{}, nil); !errdefs.IsAlreadyExists(err) {
				t.Errorf("a name that is taken: %v", err)
			}
			again, _ := pull(t, c, there, host+"/vm/web@"+digest, "by-digest")
			same(t, h.Dir(), again.Dir())
		})
	}
}

// TestSecondPushMovesAlmostNothing is the promise of at most 5 %.
func TestSecondPushMovesAlmostNothing(t *testing.T) {
	s := newStore(t)
	h := s.save(t, guest{name: "s", seed: 1})
	host := serve(t, nil)
	c := client(t, s, nil)
	first, one := push(t, c, h, host+"/vm/web:v1")
	second, two := push(t, c, h, host+"/vm/web:v2")
	if first != second {
		t.Errorf("an unchanged snapshot became another manifest: %s, %s", first, second)
	}
	if two.Moved*20 > one.Moved {
		t.Errorf("the first push moved %d bytes, the second %d", one.Moved, two.Moved)
	}
	if third, _ := push(t, client(t, s, nil), h, host+"/vm/web:v3"); third != first { // without an index
		t.Errorf("chunks depend on the index: %s, %s", first, third)
	}
	changed := s.save(t, guest{name: "later", seed: 1, dirty: 20})
	_, p := push(t, c, changed, host+"/vm/web:v4")
	if p.Moved*2 > one.Moved {
		t.Errorf("20 pages changed, and of %d bytes %d moved", one.Moved, p.Moved)
	}
}

// TestChunksOfLocalSnapshotsAreNotFetched pulls a snapshot most of which is here.
func TestChunksOfLocalSnapshotsAreNotFetched(t *testing.T) {
	s := newStore(t)
	c := client(t, s, nil)
	host := serve(t, nil)
	a, b := s.save(t, guest{name: "a", seed: 1}), s.save(t, guest{name: "b", seed: 1, dirty: 10})
	push(t, c, a, host+"/vm/web:a")
	push(t, client(t, s, nil), b, host+"/vm/web:b")
	got, p := pull(t, c, s, host+"/vm/web:b", "c")
	same(t, b.Dir(), got.Dir())
	other := newStore(t)
	_, full := pull(t, client(t, other, nil), other, host+"/vm/web:b", "c")
	if p.Moved*2 > full.Moved {
		t.Errorf("%d of %d bytes were fetched", p.Moved, full.Moved)
	}
}
