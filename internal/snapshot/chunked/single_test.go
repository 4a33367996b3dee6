package chunked_test

import (
	"net/http"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// TestRegistriesThatTakeNoBlobInOneRequest: some such registries answer as the specification requires, others
// differently.
func TestRegistriesThatTakeNoBlobInOneRequest(t *testing.T) {
	here := newStore(t)
	h := here.save(t, guest{name: "s", seed: 1})
	for name, answer := range map[string]func(w http.ResponseWriter, r *http.Request) bool{
		"the digest is ignored": func(_ http.ResponseWriter, r *http.Request) bool {
			r.URL.RawQuery, r.Body = "", http.NoBody
			return false
		},
		"the request is refused": func(w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(http.StatusBadRequest)
			return true
		},
	} {
		t.Run(name, func(t *testing.T) {
			var single atomic.Int64
			ref := serve(t, before(func(w http.ResponseWriter, r *http.Request) bool {
				if r.Method != http.MethodPost || !r.URL.Query().Has("digest") {
					return false
				}
				single.Add(1)
				return answer(w, r)
			})) + "/vm:1"
			push(t, client(t, here, nil), h, ref)
			there := newStore(t)
			got, _ := pull(t, client(t, there, nil), there, ref, "x")
			same(t, h.Dir(), got.Dir())
			if n := single.Load(); n == 0 || n > 16 {
				t.Errorf("%d blobs were sent in one request: it is not remembered that this is in vain", n)
			}
		})
	}
}

func TestCheckTriesTwice(t *testing.T) {
	var asked atomic.Int64
	host := serve(t, before(func(w http.ResponseWriter, _ *http.Request) bool {
		asked.Add(1)
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	}))
	if err := client(t, newStore(t), nil).Check(t.Context(), host+"/vm:1", token); !errdefs.IsUnavailable(err) || asked.Load() != 2 {
		t.Errorf("%d requests, %v", asked.Load(), err)
	}
}
