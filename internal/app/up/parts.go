package up

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
)

// What can run beside the control plane and the nodes, in the order of their start.
const (
	partEpoch         = "epoch"          // the registry, known to every node
	partMetricsServer = "metrics-server" // kubectl top, autoscaling
)

var parts = []string{partEpoch, partMetricsServer}

// part is one of them.
type part struct {
	child
	prepare func() error // writes its files; idempotent
	ready   func(context.Context) bool
	late    bool // it needs a node
}

const stopPart = 10 * time.Second

// part returns the one called name. Preconditions: name is in parts.
func (in *instance) part(name string) part {
	switch name {
	case partEpoch:
		return in.epoch()
	case partMetricsServer:
		return in.metricsServer()
	}
	panic("no part is called " + name)
}

func (in *instance) epoch() part {
	addr := fmt.Sprintf("%s:%d", nodeIP, in.settings.EpochPort)
	return part{
		child: child{
			name: partEpoch, path: in.opts.Assets.Epoch, log: in.layout.log(partEpoch), stop: stopPart,
			args: []string{"serve", "--addr", addr, "--data", in.join("epoch"), "--token-file", in.epochTokens()},
		},
		prepare: func() error {
			if _, err := os.Stat(in.epochTokens()); !errors.Is(err, fs.ErrNotExist) {
				return err // the user may have put more tokens there
			}
			return atomicfile.WriteFile(in.epochTokens(), []byte(rand.Text()+"\n"), 0o600)
		},
		ready: func(ctx context.Context) bool { return answers(ctx, "http://"+addr+"/healthz") },
	}
}

// answers asks a URL on loopback whether it is fine.
func answers(ctx context.Context, url string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}
