package kubelet

import (
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Pictures that may be on their way to clients. Each is in memory until its client has read it, and a client may take its time.
const (
	maxPictures    = 16
	maxPicturesPod = 2
)

// pictures counts the pictures on their way, by pod. The zero value is ready for use.
type pictures struct {
	mu  sync.Mutex
	all int
	of  map[string]int
}

// begin counts one more picture of a pod, until end is called. Errors: Exhausted.
func (p *pictures) begin(pod string) (end func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.of[pod] >= maxPicturesPod:
		return nil, errdefs.Exhaustedf("%d pictures of the screen of pod %s are on their way; read them first", maxPicturesPod, pod)
	case p.all >= maxPictures:
		return nil, errdefs.Exhaustedf("%d pictures of screens are on their way from this node; try again", maxPictures)
	}
	if p.of == nil {
		p.of = map[string]int{}
	}
	p.all++
	p.of[pod]++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.all--
		if p.of[pod]--; p.of[pod] == 0 {
			delete(p.of, pod)
		}
	}, nil
}
