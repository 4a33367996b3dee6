package controlplane

import (
	"context"
	"fmt"

	"k8s.io/kubernetes/cmd/kube-controller-manager/app"
	"k8s.io/kubernetes/cmd/kube-controller-manager/app/options"

	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/config"
)

func newManager(c *config.Config) (*options.KubeControllerManagerOptions, error) {
	o, err := options.NewKubeControllerManagerOptions()
	if err != nil {
		return nil, fmt.Errorf("kube-controller-manager options: %w", err)
	}
	sets := o.Flags(app.KnownControllers(), app.ControllersDisabledByDefault(), app.ControllerAliases())
	if err := parse("kube-controller-manager", sets, c.ControllerManagerArgs()); err != nil {
		return nil, err
	}
	return o, nil
}

func runManager(ctx context.Context, o *options.KubeControllerManagerOptions) error {
	c, err := o.Config(ctx, app.KnownControllers(), app.ControllersDisabledByDefault(), app.ControllerAliases())
	if err != nil {
		return fmt.Errorf("apply options: %w", err)
	}
	return app.Run(ctx, c.Complete())
}
