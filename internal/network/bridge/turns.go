package bridge

import (
	"sync"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/network/host"
)

// turns lets only one caller at a time create or remove links of a network. The kernel has one lock for all links, so waiting
// here loses nothing. A sysctl write that finds that lock taken retries again and again, which took longer than the rest of
// creating a tap. The caller whose turn it is removes all the queued links.
type turns struct {
	mu sync.Mutex

	queue   sync.Mutex
	removed []*removal // queued for removal
}

type removal struct {
	link netlink.Link
	err  error // valid once the caller of remove has had its turn
}

// make calls fn, which creates or changes a link.
func (t *turns) make(fn func() error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fn()
}

// remove removes a link. It is no error if the link is already gone.
func (t *turns) remove(l netlink.Link) error {
	r := &removal{link: l}
	t.queue.Lock()
	t.removed = append(t.removed, r)
	t.queue.Unlock()

	t.mu.Lock()
	defer t.mu.Unlock()
	t.queue.Lock()
	todo := t.removed // empty if another caller removed ours too
	t.removed = nil
	t.queue.Unlock()
	var links []netlink.Link
	for _, other := range todo {
		links = append(links, other.link)
	}
	for i, err := range host.RemoveLinks(links) {
		todo[i].err = err
	}
	return r.err
}
