package vkcocoon

import (
	"context"
	"log/slog"
	"time"

	"cocoonstack.io/cocoon/internal/kube/imagemapping"
)

// settleLimit is how long the first pods wait for the cluster's image mappings. Without them a name may mean another
// image; for ever, a broken API would keep pods from being deleted.
const settleLimit = 10 * time.Second

// mappings is the watcher of the cluster's image mappings; the zero value is none.
type mappings struct{ *imagemapping.Watcher }

// mappings returns the watcher if the runtime takes mappings.
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

// poke hands the mappings over again: a runtime that is back may have been restarted.
func (m mappings) poke() {
	if m.Watcher != nil {
		m.Poke()
	}
}

// settle waits for the mappings of the cluster to count.
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
		log.Warn("image mappings of the cluster are not known yet, going on without", "dur", settleLimit)
	}
}
