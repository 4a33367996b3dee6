package identity

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
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

// replay remembers tokens until they expire, also over a restart of the daemon: each has a line in a file, which is not synced. A machine
// whose power is cut may forget those of the last seconds.
type replay struct {
	mu   sync.Mutex
	seen map[string]time.Time // when it expires, by key and id
	next time.Time            // of the next look for expired ones

	file  *os.File // nil: there is none
	lines int      // of the file
}

// openReplay reads the file at path, leaves out what has expired, and keeps the file open. "": there is no file.
func openReplay(path string, now time.Time) (*replay, error) {
	r := &replay{seen: map[string]time.Time{}}
	if path == "" {
		return r, nil
	}
	if err := atomicfile.Sweep(path); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Clean(path))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the tokens that were used: %w", err)
	}
	var left bytes.Buffer
	for line := range strings.Lines(string(text)) { // the last one may be a part
		id, at, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		seconds, err := strconv.ParseInt(at, 10, 64)
		if expires := time.Unix(seconds, 0); ok && err == nil && strings.HasSuffix(line, "\n") && !now.After(expires) && len(r.seen) < maxSeen {
			r.seen[id] = expires
			left.WriteString(line)
			r.lines++
		}
	}
	if err := atomicfile.WriteFile(path, left.Bytes(), 0o600); err != nil {
		return nil, fmt.Errorf("keep the tokens that were used: %w", err)
	}
	if r.file, err = os.OpenFile(filepath.Clean(path), os.O_WRONLY|os.O_APPEND, 0); err != nil {
		return nil, fmt.Errorf("keep the tokens that were used: %w", err)
	}
	return r, nil
}

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
		r.shorten()
	}
	id := c.Kid + " " + c.ID
	if _, ok := r.seen[id]; ok {
		return errdefs.Unauthenticatedf("the token was used before; make a new one for each call")
	}
	if len(r.seen) >= maxSeen {
		return errdefs.Exhaustedf("too many calls in a few minutes; try again in some minutes")
	}
	if r.file != nil && !strings.ContainsAny(id, "\t\n") { // the ids of our clients and of the documented ones have neither
		_, _ = fmt.Fprintf(r.file, "%s\t%d\n", id, c.Expires.Unix()+1) // a full disk must not lock out who would make room
		r.lines++
	}
	r.seen[id] = c.Expires
	return nil
}

// maxExpired is how many lines of the file may be about tokens that have expired.
const maxExpired = 10_000

// shorten writes the file anew when most of it has expired. If the daemon is killed meanwhile, some tokens are forgotten.
func (r *replay) shorten() {
	if r.file == nil || r.lines-len(r.seen) < maxExpired {
		return
	}
	var left bytes.Buffer
	for id, expires := range r.seen {
		fmt.Fprintf(&left, "%s\t%d\n", id, expires.Unix()+1)
	}
	if r.file.Truncate(0) == nil {
		_, _ = r.file.Write(left.Bytes())
		r.lines = len(r.seen)
	}
}

// close closes the file.
func (r *replay) close() error {
	if r.file == nil {
		return nil
	}
	return r.file.Close()
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
