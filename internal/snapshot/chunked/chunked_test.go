package chunked_test

import (
	"net/http"
	"strconv"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
)

func TestThereAndBack(t *testing.T) {
	for name, serve := range map[string]func() string{
		"epoch":                  func() string { return epoch(t, t.TempDir()) },
		"another implementation": func() string { return serve(t, nil) },
	} {
		for kind, change := range map[string]func(*chunked.Config){
			"chunked":      nil,
			"uncompressed": func(c *chunked.Config) { c.Uncompressed = true },
			"whole":        func(c *chunked.Config) { c.Whole = true },
			"no index":     func(c *chunked.Config) { c.Index = "" },
		} {
			if name != "epoch" && (kind == "no index" || kind == "uncompressed") {
				continue // these do not depend on the registry
			}
			t.Run(name+"/"+kind, func(t *testing.T) { thereAndBack(t, serve(), change) })
		}
	}
}

func thereAndBack(t *testing.T, host string, change func(*chunked.Config)) {
	here, there := newStore(t), newStore(t)
	h := here.save(t, guest{name: "s", seed: 1})
	ref := host + "/vm/web:v1"
	pusher := client(t, here, change)
	digest, _ := push(t, pusher, h, ref)
	c := client(t, there, change)
	got, p := pull(t, c, there, ref, "")
	same(t, h.Dir(), got.Dir())
	s := got.Snapshot()
	if s.Name != "s" || s.Digest != digest || s.Memory != h.Snapshot().Memory || !s.Live || len(s.Disks) != 2 || !s.CreatedAt.Equal(h.Snapshot().CreatedAt) {
		t.Errorf("it came back as %+v", s)
	}
	if p.Done != p.Total || p.Moved == 0 {
		t.Errorf("the last progress is %+v", p)
	}
	if d, err := c.Digest(t.Context(), ref, token); err != nil || d != digest {
		t.Errorf("digest %s, %v", d, err)
	}
	if _, err := c.Pull(t.Context(), ref, "s", token, nil); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a name that is taken: %v", err)
	}
	again, _ := pull(t, c, there, host+"/vm/web@"+digest, "by-digest")
	same(t, h.Dir(), again.Dir())
	if err := check(t, c, ref, token); err != nil {
		t.Error(err)
	}
	if err := c.Delete(t.Context(), ref, token); err != nil {
		t.Error(err)
	}
	if _, err := c.Pull(t.Context(), ref, "gone", token, nil); !errdefs.IsNotFound(err) {
		t.Errorf("a tag that was deleted: %v", err)
	}
	if _, err := pusher.Push(t.Context(), h, host+"/vm/web@"+digest, token, nil); !errdefs.IsInvalid(err) {
		t.Errorf("a push to a digest: %v", err)
	}
}

// TestDownloadFromEpoch downloads the tar stream that epoch makes from the chunks.
func TestDownloadFromEpoch(t *testing.T) {
	here, there := newStore(t), newStore(t)
	h := here.save(t, guest{name: "s", seed: 1})
	host := epoch(t, t.TempDir())
	for n, change := range []func(*chunked.Config){nil, func(c *chunked.Config) { c.Whole = true }} {
		push(t, client(t, here, change), h, host+"/vm/web:latest")
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+host+"/dl/vm/web", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+token.Token)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		name := "dl" + strconv.Itoa(n)
		_, err = there.Import(t.Context(), name, "", resp.Body, nil)
		resp.Body.Close()
		if err != nil {
			t.Fatalf("%s: %v", resp.Status, err)
		}
		same(t, h.Dir(), there.hold(t, name).Dir())
	}
}

// TestSecondPushMovesAlmostNothing checks the promise of at most 5 %.
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

// TestChunksOfLocalSnapshotsAreNotFetched pulls a snapshot of which most data is local.
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
