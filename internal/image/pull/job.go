package pull

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/image/distribution"
	"cocoonstack.io/cocoon/internal/image/translate"
	"cocoonstack.io/cocoon/internal/vm"
)

// progressPace is the time between two reports of one phase.
const progressPace = 200 * time.Millisecond

// jobKey separates transfers that could end differently. The hash covers the secret parts.
type jobKey struct {
	key      string
	force    bool
	operator bool // on whose behalf: others must prove more and may reach less
	hash     [sha256.Size]byte
}

func keyOf(ctx context.Context, d translate.Decision, r image.PullRequest) jobKey {
	k := jobKey{key: d.Key, force: r.Force, operator: vm.Behalf(ctx).Operator()}
	h := sha256.New()
	// Encoding cannot fail: these are strings and numbers.
	_ = json.NewEncoder(h).Encode([]any{d.URL, d.Ref, d.Digest, d.SHA256, d.Checksums, plainOf(d.Transport), r.Auth})
	h.Sum(k.hash[:0])
	return k
}

// plainOf is a profile whose secrets the encoding does not hide.
func plainOf(p *translate.Profile) any {
	if p == nil {
		return nil
	}
	type plain translate.Profile
	return (*plain)(p)
}

// job is one transfer. It runs as long as somebody waits for it.
type job struct {
	cancel context.CancelFunc
	done   chan struct{} // closed when got and err are set
	got    distribution.Pulled
	err    error

	mu      sync.Mutex
	waiting map[chan struct{}]bool // each gets a signal when a phase begins
	last    image.Progress
}

// share joins a transfer, or starts it if no equal one runs. When the last caller leaves, the transfer is cancelled, and
// that caller returns after its clean-up.
func (p *Puller) share(ctx context.Context, d translate.Decision, r image.PullRequest, progress func(image.Progress)) (distribution.Pulled, error) {
	news := make(chan struct{}, 1)
	key := keyOf(ctx, d, r)
	p.mu.Lock()
	j := p.jobs[key]
	if j == nil {
		j = p.begin(ctx, key, d, r)
	}
	j.join(news)
	p.mu.Unlock()
	var told image.Progress
	tell := func() {
		if now := j.progress(); progress != nil && now != told {
			told = now
			progress(now)
		}
	}
	pace := time.NewTicker(progressPace)
	defer pace.Stop()
	for {
		select {
		case <-j.done:
			p.leave(key, j, news)
			return j.got, j.err
		case <-ctx.Done():
			if p.leave(key, j, news) {
				<-j.done
			}
			return distribution.Pulled{}, ctx.Err()
		case <-news:
			tell()
		case <-pace.C:
			tell()
		}
	}
}

// begin starts a transfer. Preconditions: mu is held.
func (p *Puller) begin(ctx context.Context, key jobKey, d translate.Decision, r image.PullRequest) *job {
	// The transfer belongs to all its callers. Of the first caller's context it keeps only whether the operator asks.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	j := &job{cancel: cancel, done: make(chan struct{}), waiting: map[chan struct{}]bool{}}
	p.jobs[key] = j
	go func() { // the last caller waits for its end
		defer cancel()
		j.got, j.err = p.transfer(ctx, d, r, j.report)
		p.mu.Lock()
		if p.jobs[key] == j {
			delete(p.jobs, key)
		}
		p.mu.Unlock()
		close(j.done)
	}()
	return j
}

// leave ends the wait of one caller and reports whether it was the last. The transfer is then cancelled, and nobody can
// join it any more.
func (p *Puller) leave(key jobKey, j *job, news chan struct{}) (last bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	j.mu.Lock()
	delete(j.waiting, news)
	last = len(j.waiting) == 0
	j.mu.Unlock()
	if last {
		j.cancel()
		if p.jobs[key] == j {
			delete(p.jobs, key)
		}
	}
	return last
}

func (j *job) join(news chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.waiting[news] = true
	if j.last.Phase != "" {
		news <- struct{}{} // a new channel has room
	}
}

func (j *job) progress() image.Progress {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.last
}

// report tells all waiting callers of a new phase; progress within a phase they poll themselves. It never waits for them.
func (j *job) report(pr image.Progress) {
	j.mu.Lock()
	defer j.mu.Unlock()
	begins := pr.Phase != j.last.Phase
	j.last = pr
	if !begins {
		return
	}
	for news := range j.waiting {
		select {
		case news <- struct{}{}:
		default:
		}
	}
}
