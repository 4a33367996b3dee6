package podvolumes

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/kube/convert"
)

// logins is what a keeper knows of the logins of its guest. The guest gets them when its agent answers, and again when they change. Each agent that
// answers anew gets them: it may be that of a guest which went back to an earlier state.
type logins struct {
	mu    sync.Mutex
	ready bool // an agent answers
	known bool // it has what sent says
	sent  sum
}

// answers notes whether an agent answers in the guest. If it does so anew, poke is called. It does nothing if l is nil.
func (l *logins) answers(ready bool, poke func()) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if ready && !l.ready {
		l.known = false
		poke()
	}
	l.ready = ready
}

// lacks reports whether an agent answers that has no logins with the checksum.
func (l *logins) lacks(now sum) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ready && (!l.known || l.sent != now)
}

// has notes the checksum of the logins that the agent has. If known is false, an attempt has failed, and the agent may have some of them.
func (l *logins) has(now sum, known bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.known, l.sent = known, now
}

// setLogins sends the logins to the guest if its agent answers and they have changed. While the guest does not answer, which its pod shows
// otherwise, the error is not reported.
func (k *keeper) setLogins(ctx context.Context) error {
	if k.logins == nil {
		return nil
	}
	l, err := convert.Logins(ctx, k.of.owner.Pod(), k.of.from)
	if err == nil {
		now := loginsSum(l)
		if !k.logins.lacks(now) {
			return nil
		}
		if err = k.of.owner.SetLogins(ctx, string(k.id), l); err == nil {
			k.logins.has(now, true)
		}
	}
	if err != nil {
		k.logins.has(sum{}, false)
	}
	if ctx.Err() != nil || errdefs.IsNotFound(err) { // the VM is being removed
		return ctx.Err()
	}
	if !errdefs.IsUnavailable(err) {
		k.of.owner.LoginsSet(err)
	}
	return err
}

func loginsSum(l guest.Logins) sum {
	text, _ := json.Marshal(l) // strings always marshal, and keys of maps are in order
	return sha256.Sum256(text)
}
