package vkcocoon

import (
	"context"
	"log/slog"
	"time"

	"cocoonstack.io/cocoon/internal/kube/imagemapping"
)

// settleLimit is how long the first pods wait for the cluster's image mappings. Without the mappings a name may mean
// another image. An unlimited wait would keep pods from being deleted while the API is broken.
const settleLimit = 10 * time.Second

// mappings is the watcher of the cluster's image mappings; the zero value has no watcher.
type mappings struct{ *imagemapping.Watcher }

// mappings returns the watcher if the runtime accepts mappings.
func (n *Node) mappings(c clients) (mappings, error) {
	syncer, ok := n.runtime.(imagemapping.Syncer)
	if !ok {
		return mappings{}, nil
	}
	w, err := imagemapping.New(imagemapping.Config{Client: c.custom, Syncer: syncer, Log: n.log.With("component", "image-mappings")})
	return mappings{w}, err
}

func (m mappings) run(ctx context.Context) error {
	if m.Watcher == nil {
		return nil
	}
	return m.Run(ctx)
}

// poke sends the mappings again: a runtime that has come back may have been restarted.
func (m mappings) poke() {
	if m.Watcher != nil {
		m.Poke()
	}
}

// settle waits until the mappings of the cluster are in force.
func (m mappings) settle(ctx context.Context, log *slog.Logger) {
	if m.Watcher == nil {
		return
	}
	limit := time.NewTimer(settleLimit)
	defer limit.Stop()
	select {
	case <-m.Settled():
	case <-ctx.Done():
	case <-limit.C:
		log.Warn("image mappings of the cluster not loaded yet, starting without them", "dur", settleLimit)
	}
}
