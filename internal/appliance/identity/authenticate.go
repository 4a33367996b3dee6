package identity

import (
	"context"
	"crypto/ed25519"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// maxSeen bounds the tokens that are remembered. Only owners of keys can fill it.
const maxSeen = 100_000

// Authenticate returns the key that has signed a token. Each token is accepted once.
// Errors: Unauthenticated, ResourceExhausted if more tokens were used in some minutes than can be remembered.
func (k *Keeper) Authenticate(token string) (Key, error) {
	now := k.cfg.Now()
	var found Key
	claims, err := capsulewire.Verify(token, k.id, now, func(kid string) (ed25519.PublicKey, bool) {
		k.mu.Lock()
		defer k.mu.Unlock()
		key, ok := k.keys[kid]
		found = key
		return key.Public, ok
	})
	if err != nil {
		return Key{}, err
	}
	return found, k.replay.see(claims, now)
}

// replay remembers tokens until they expire.
type replay struct {
	mu   sync.Mutex
	seen map[string]time.Time // when it expires, by key and id
	next time.Time            // of the next look for expired ones
}

func newReplay() *replay { return &replay{seen: map[string]time.Time{}} }

func (r *replay) see(c capsulewire.Claims, now time.Time) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.After(r.next) || len(r.seen) >= maxSeen {
		for id, expires := range r.seen {
			if now.After(expires) {
				delete(r.seen, id)
			}
		}
		r.next = now.Add(time.Minute)
	}
	id := c.Kid + " " + c.ID
	if _, ok := r.seen[id]; ok {
		return errdefs.Unauthenticatedf("the token was used before; make a new one for each call")
	}
	if len(r.seen) >= maxSeen {
		return errdefs.Exhaustedf("too many calls in a few minutes; try again in some minutes")
	}
	r.seen[id] = c.Expires
	return nil
}

type callerKey struct{}

// WithCaller returns a context of a call by the owner of key.
func WithCaller(ctx context.Context, key Key) context.Context {
	return context.WithValue(ctx, callerKey{}, key)
}

// Caller returns the key of the caller; false without one.
func Caller(ctx context.Context) (Key, bool) {
	key, ok := ctx.Value(callerKey{}).(Key)
	return key, ok
}
