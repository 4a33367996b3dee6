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

	"cocoonstack.io/cocoon/deploy/manager"
	"cocoonstack.io/cocoon/internal/atomicfile"
)

// What can run beside the control plane and the nodes, in the order of their start.
const (
	partEpoch         = "epoch"          // the registry, known to every node
	partManager       = "manager"        // the controllers
	partScheduler     = "scheduler"      // cocoon-scheduler in place of the control plane's own
	partMetricsServer = "metrics-server" // kubectl top, autoscaling
)

var parts = []string{partEpoch, partManager, partScheduler, partMetricsServer}

// part is one of them.
type part struct {
	child
	prepare func() error // writes its files; idempotent
	install [][]byte     // manifests that it needs
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
	case partManager:
		return in.manager()
	case partScheduler:
		return in.scheduler()
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

func (in *instance) manager() part {
	probe := fmt.Sprintf("%s:%d", nodeIP, in.settings.ManagerPort)
	kubeconfig := in.config("manager.kubeconfig")
	args := []string{"--kubeconfig", kubeconfig, "--leader-elect=false", "--metrics-addr", "0", "--probe-addr", probe}
	if in.settings.with(partEpoch) {
		args = append(args, "--epoch-url", in.settings.epochURL(), "--epoch-token-file", in.epochTokens())
	}
	return part{
		child:   child{name: partManager, path: in.opts.Assets.Manager, log: in.layout.log(partManager), stop: stopPart, args: args},
		prepare: func() error { return writeKubeconfig(kubeconfig, in.pki, in.settings, partManager) },
		install: [][]byte{manager.Rights, []byte(managerBinding)},
		ready:   func(ctx context.Context) bool { return answers(ctx, "http://"+probe+"/readyz") },
	}
}

// managerBinding gives the manager of an instance, who is known by a certificate, its rights. It has not the name of the one
// in deploy/, which may be installed beside it.
const managerBinding = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: cocoon-up:cocoon-manager
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: cocoon-manager
subjects:
  - apiGroup: rbac.authorization.k8s.io
    kind: User
    name: cocoon-manager
`

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
