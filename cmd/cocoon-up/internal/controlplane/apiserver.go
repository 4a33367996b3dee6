package controlplane

import (
	"context"
	"fmt"
	"net/http"
	"time"

	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"

	"cocoonstack.io/cocoon/cmd/cocoon-up/internal/config"
)

// newAPIServer parses the API server's flags. It also applies the settings of the
// whole process, feature gates and logging, so it must be called first and only once.
func newAPIServer(c *config.Config) (*options.ServerRunOptions, error) {
	o := options.NewServerRunOptions()
	if err := parse("kube-apiserver", o.Flags(), c.APIServerArgs()); err != nil {
		return nil, err
	}
	if err := o.GenericServerRunOptions.ComponentGlobalsRegistry.Set(); err != nil {
		return nil, fmt.Errorf("set feature gates: %w", err)
	}
	if err := logsapi.ValidateAndApply(o.Logs, utilfeature.DefaultFeatureGate); err != nil {
		return nil, fmt.Errorf("set up logging: %w", err)
	}
	// The components' own clients would log warnings about the old APIs that
	// they must serve and watch.
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	return o, nil
}

func runAPIServer(ctx context.Context, o *options.ServerRunOptions) error {
	completed, err := o.Complete(ctx)
	if err != nil {
		return fmt.Errorf("complete options: %w", err)
	}
	if errs := completed.Validate(); len(errs) > 0 {
		return fmt.Errorf("validate options: %w", utilerrors.NewAggregate(errs))
	}
	return app.Run(ctx, completed)
}

// waitReady returns nil once the API server reports that it is ready to the user of
// kubeconfig. It returns ctx's error if ctx ends first.
func waitReady(ctx context.Context, kubeconfig string) error {
	client, url, err := readyProbe(kubeconfig)
	if err != nil {
		return err
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !ready(ctx, client, url) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}

func readyProbe(kubeconfig string) (*http.Client, string, error) {
	conf, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, "", fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	client, err := rest.HTTPClientFor(conf)
	if err != nil {
		return nil, "", fmt.Errorf("client for %s: %w", kubeconfig, err)
	}
	client.Timeout = 5 * time.Second
	base, _, err := rest.DefaultServerUrlFor(conf)
	if err != nil {
		return nil, "", fmt.Errorf("server of %s: %w", kubeconfig, err)
	}
	return client, base.JoinPath("/readyz").String(), nil
}

func ready(ctx context.Context, client *http.Client, url string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	res, err := client.Do(req)
	if err != nil {
		return false
	}
	defer res.Body.Close()
	return res.StatusCode == http.StatusOK
}
