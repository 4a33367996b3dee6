package controlplane

import (
	"context"
	"fmt"

	"k8s.io/client-go/tools/cache"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
	"k8s.io/kubernetes/pkg/scheduler/framework/runtime"

	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/config"
	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/promptbinding"
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
	c, sched, err := app.Setup(ctx, o, prompt(o))
	if err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	return app.Run(ctx, c, sched)
}

// prompt makes the default profile bind pods as soon as their claims are bound.
// It changes the profile that app.Setup has just completed: flags cannot name
// plugins, and a configuration file would replace the flags.
func prompt(o *options.Options) app.Option {
	return func(r runtime.Registry) error {
		for _, profile := range o.ComponentConfig.Profiles {
			promptbinding.Replace(profile.Plugins)
		}
		return r.Register(promptbinding.Name, promptbinding.New)
	}
}
