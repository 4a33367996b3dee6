package up

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"time"

	"cocoonstack.io/cocoon/deploy/manager"
	"cocoonstack.io/cocoon/deploy/snapshots"
	"cocoonstack.io/cocoon/internal/atomicfile"
)

// Parts that can run beside the control plane and the nodes, in the order of their start.
const (
	partEpoch         = "epoch"          // the registry; every node knows it
	partManager       = "manager"        // the controllers
	partScheduler     = "scheduler"      // cocoon-scheduler, replaces the control plane's own
	partMetricsServer = "metrics-server" // kubectl top, autoscaling

	partSnapshots = "snapshot-controller" // snapshots of volumes
)

var parts = []string{partEpoch, partManager, partScheduler, partMetricsServer, partSnapshots}

// usualParts run in a new instance that has nodes, unless --with says otherwise.
var usualParts = []string{partManager}

// part is one such program.
type part struct {
	child
	prepare func() error // writes its files; idempotent
	install [][]byte     // manifests that it needs
	ready   func(context.Context) bool
	late    bool // starts after a node
}

const stopPart = 10 * time.Second

// part returns the part called name. Preconditions: name is in parts.
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
	case partSnapshots:
		return in.snapshotController()
	}
	panic("unknown part " + name)
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
				return err // the user may have added tokens to the file
			}
			return atomicfile.WriteFile(in.epochTokens(), []byte(rand.Text()+"\n"), 0o600)
		},
		ready: func(ctx context.Context) bool { return answers(ctx, "http://"+addr+"/healthz") },
	}
}

func (in *instance) manager() part {
	probe := fmt.Sprintf("%s:%d", nodeIP, in.settings.ManagerPort)
	kubeconfig := in.config("manager.kubeconfig")
	args := []string{"--kubeconfig", kubeconfig, "--leader-elect=false", "--metrics-addr", "0", "--probe-addr", probe, "--webhook-addr", in.webhookAddr(), "--webhook-hosts", nodeIP}
	if in.settings.with(partEpoch) {
		args = append(args, "--epoch-url", in.settings.epochURL(), "--epoch-token-file", in.epochTokens())
	}
	args = append(args, in.kubeVirtArgs()...)
	return part{
		child:   child{name: partManager, path: in.opts.Assets.Manager, log: in.layout.log(partManager), stop: stopPart, args: args},
		prepare: func() error { return writeKubeconfig(kubeconfig, in.pki, in.settings, partManager) },
		install: append([][]byte{[]byte(managerNamespace), manager.Rights, manager.WebhookRights, []byte(managerBinding), in.webhooks()}, in.kubeVirtBase()...),
		ready:   func(ctx context.Context) bool { return answers(ctx, "http://"+probe+"/readyz") },
	}
}

// snapshotController is the controller of the API of volume snapshots. The nodes take the snapshots.
func (in *instance) snapshotController() part {
	kubeconfig := in.config("snapshot-controller.kubeconfig")
	return part{
		child: child{
			name: partSnapshots, path: in.opts.Assets.ControlPlane, log: in.layout.log(partSnapshots), stop: stopPart,
			args: []string{partSnapshots, "--kubeconfig=" + kubeconfig},
		},
		prepare: func() error { return writeKubeconfig(kubeconfig, in.pki, in.settings, partSnapshots) },
		install: [][]byte{snapshots.Snapshots, snapshots.Contents, snapshots.Classes, snapshots.Rights, snapshots.Class},
		ready:   func(ctx context.Context) bool { return in.api.get(ctx, snapshotsAPI, nil) },
	}
}

const snapshotsAPI = "/apis/snapshot.storage.k8s.io/v1"

func (in *instance) webhookAddr() string {
	return fmt.Sprintf("%s:%d", nodeIP, in.settings.WebhookPort)
}

// webhooks are the webhook configurations for a manager that runs beside the API server and not in its cluster.
func (in *instance) webhooks() []byte {
	return bytes.ReplaceAll(manager.WebhooksAt("https://"+in.webhookAddr()), []byte("\n  labels:\n"), []byte("\n  labels:\n    app.kubernetes.io/managed-by: cocoon-up\n"))
}

// unregisterWebhooks removes the registration of an earlier start with a manager: nothing would answer, so the API
// server would reject the requests that the webhooks cover.
func (in *instance) unregisterWebhooks(ctx context.Context) error {
	list, err := manifests(in.webhooks())
	if err != nil {
		return err
	}
	for _, m := range list {
		if err := in.api.remove(ctx, m.path); err != nil {
			return err
		}
	}
	return nil
}

const managerNamespace = `
apiVersion: v1
kind: Namespace
metadata:
  name: cocoon-system
`

// managerBinding gives the manager of an instance, which is identified by a certificate, its rights. Its name differs
// from the binding in deploy/, which may be installed as well.
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
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: cocoon-up:cocoon-manager-webhook
  namespace: cocoon-system
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: cocoon-manager-webhook
subjects:
  - apiGroup: rbac.authorization.k8s.io
    kind: User
    name: cocoon-manager
`

// answers reports whether a URL on loopback answers that all is well.
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
