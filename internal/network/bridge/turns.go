package bridge

import (
	"sync"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/network/host"
)

// turns has the links of a network made and removed by one caller at a time. The kernel has one lock for the links of all:
// nothing is lost by waiting here, and who finds that lock taken when writing a sysctl tries again and again, which cost
// more than the rest of making a tap. What waits to be removed goes with the first whose turn it is.
type turns struct {
	mu sync.Mutex

	queue   sync.Mutex
	removed []*removal // that wait
}

type removal struct {
	link netlink.Link
	err  error // valid after a turn of whoever asked for it
}

// make calls fn, which makes or changes a link.
func (t *turns) make(fn func() error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fn()
}

// remove removes a link. That it is gone already is no error.
func (t *turns) remove(l netlink.Link) error {
	r := &removal{link: l}
	t.queue.Lock()
	t.removed = append(t.removed, r)
	t.queue.Unlock()

	t.mu.Lock()
	defer t.mu.Unlock()
	t.queue.Lock()
	todo := t.removed // none when somebody took ours along
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
