package controlplane

import (
	"context"
	"fmt"

	"k8s.io/client-go/tools/cache"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"

	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/config"
)

func newScheduler(c *config.Config) (*options.Options, error) {
	o := options.NewOptions()
	if err := parse("kube-scheduler", *o.Flags, c.SchedulerArgs()); err != nil {
		return nil, err
	}
	name, err := cache.NewInformerName("kube-scheduler")
	if err != nil {
		return nil, fmt.Errorf("kube-scheduler: name informers: %w", err)
	}
	o.InformerName = name
	return o, nil
}

func runScheduler(ctx context.Context, o *options.Options) error {
	c, sched, err := app.Setup(ctx, o)
	if err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	return app.Run(ctx, c, sched)
}
