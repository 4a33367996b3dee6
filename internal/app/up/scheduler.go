package up

import (
	"context"
	"fmt"

	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/deploy/scheduler"
)

// scheduler is the part that replaces the control plane's own scheduler, under its name and with its rights.
func (in *instance) scheduler() part {
	config := in.config("scheduler.yaml")
	kubeconfig := in.config("scheduler.kubeconfig")
	return part{
		child: child{
			name: partScheduler, path: in.opts.Assets.ControlPlane, log: in.layout.log(partScheduler), stop: stopPart,
			args: []string{
				"cocoon-scheduler", "--config=" + config, "--leader-elect=false",
				"--authentication-kubeconfig=" + kubeconfig, "--authorization-kubeconfig=" + kubeconfig,
				"--bind-address=" + nodeIP, fmt.Sprintf("--secure-port=%d", in.settings.SchedulerPort),
				"--tls-cert-file=" + in.pki.crt("scheduler-serving"), "--tls-private-key-file=" + in.pki.key("scheduler-serving"),
			},
		},
		prepare: func() error {
			var c object
			if err := yaml.Unmarshal(scheduler.Config, &c); err != nil {
				return fmt.Errorf("read configuration of the scheduler: %w", err)
			}
			client, _ := c["clientConnection"].(object)
			client["kubeconfig"] = kubeconfig
			return writeYAML(config, c)
		},
		install: [][]byte{scheduler.Rights, []byte(schedulerBinding)},
		ready: func(ctx context.Context) bool {
			there := apiClient{base: fmt.Sprintf("https://%s:%d", nodeIP, in.settings.SchedulerPort), http: in.api.http}
			return there.get(ctx, "/readyz", nil)
		},
	}
}

// schedulerBinding gives the scheduler of an instance, which is identified by a certificate, its rights.
const schedulerBinding = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: cocoon-scheduler
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: cocoon-scheduler
subjects:
  - apiGroup: rbac.authorization.k8s.io
    kind: User
    name: system:kube-scheduler
`
