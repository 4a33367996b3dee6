package content

import (
	"sync/atomic"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// emptyTTL is how long an upload without a byte is kept: dropping it loses nothing, and the client begins again.
const emptyTTL = 10 * time.Minute

// UploadLimits bound the uploads that have begun and can be resumed. Zero values mean no limit.
type UploadLimits struct {
	PerOwner int // per token
	Total    int
}

// Refused counts uploads that the limits refused.
type Refused struct{ PerOwner, Total int64 }

// Refused returns the counts since the start.
func (c *Content) Refused() Refused {
	return Refused{PerOwner: c.refusedOwner.Load(), Total: c.refusedTotal.Load()}
}

// admit registers an upload if the limits allow it, after dropping uploads that are too old.
func (c *Content) admit(u *Upload) error {
	refused, err := c.tryAdmit(u)
	if err != nil && c.SweepUploads() > 0 {
		refused, err = c.tryAdmit(u)
	}
	if err != nil {
		refused.Add(1)
	}
	return err
}

// tryAdmit returns the matching counter together with an error.
func (c *Content) tryAdmit(u *Upload) (*atomic.Int64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	total, own := 0, 0
	for _, s := range c.sessions {
		if !s.lasts {
			continue
		}
		total++
		if s.owner == u.owner {
			own++
		}
	}
	limits := c.cfg.Uploads
	switch {
	case limits.PerOwner > 0 && own >= limits.PerOwner:
		return &c.refusedOwner, code(TooManyRequests, errdefs.Exhaustedf("the token %s has %d uploads in progress, which is the limit (--max-uploads-per-token); finish or cancel some, or try again later", u.owner, own))
	case limits.Total > 0 && total >= limits.Total:
		return &c.refusedTotal, code(TooManyRequests, errdefs.Exhaustedf("the registry has %d uploads in progress, which is the limit (--max-uploads); try again later", total))
	}
	c.sessions[u.ID] = u
	return nil, nil
}

func (c *Content) forget(u *Upload) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.sessions, u.ID)
}

// SweepUploads drops uploads that got no data for their time to live.
func (c *Content) SweepUploads() (dropped int) {
	now := c.cfg.Now()
	limit, empty := now.Add(-c.cfg.UploadTTL).UnixNano(), now.Add(-min(emptyTTL, c.cfg.UploadTTL)).UnixNano()
	c.mu.Lock()
	var old []*Upload
	for _, u := range c.sessions {
		if used := u.used.Load(); used < limit || used < empty && u.Size() == 0 {
			old = append(old, u)
		}
	}
	c.mu.Unlock()
	for _, u := range old {
		if u.Cancel() == nil { // a busy one is in use, not old
			dropped++
		}
	}
	return dropped
}
