package content

import (
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// leases protect digests from the collector while clients use them or have just used them: a client that was told that
// a blob exists will soon name it in a manifest.
type leases struct {
	now func() time.Time

	mu   sync.Mutex
	held map[digest.Digest]*lease
}

type lease struct {
	pins int           // current users
	used time.Time     // end of the last use
	gone chan struct{} // not nil: being removed; closed when the removal ends
}

// of returns the lease of a digest. Preconditions: mu is held.
func (l *leases) of(d digest.Digest) *lease {
	h := l.held[d]
	if h == nil {
		h = &lease{}
		l.held[d] = h
	}
	return h
}

// pin protects digests until release is called, and for the grace period after that. It waits for a removal in
// progress, so that what the caller finds afterwards stays.
func (l *leases) pin(all ...digest.Digest) (release func()) {
	for _, d := range all {
		for {
			l.mu.Lock()
			h := l.of(d)
			if h.gone == nil {
				h.pins++
				l.mu.Unlock()
				break
			}
			gone := h.gone
			l.mu.Unlock()
			<-gone
		}
	}
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, d := range all {
			h := l.held[d]
			h.pins--
			h.used = l.now()
		}
	}
}

// remove calls f unless the digest is in use or was used after the cutoff; nobody can pin it during f.
func (l *leases) remove(d digest.Digest, cutoff time.Time, f func() error) (removed bool, err error) {
	l.mu.Lock()
	h := l.of(d)
	if h.pins > 0 || h.used.After(cutoff) || h.gone != nil {
		l.mu.Unlock()
		return false, nil
	}
	gone := make(chan struct{})
	h.gone = gone
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		h.gone = nil
		l.mu.Unlock()
		close(gone)
	}()
	return true, f()
}

// forget drops leases that ended before the cutoff.
func (l *leases) forget(cutoff time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for d, h := range l.held {
		if h.pins == 0 && h.gone == nil && !h.used.After(cutoff) {
			delete(l.held, d)
		}
	}
}
