package vkcocoon

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"cocoonstack.io/cocoon/internal/app/restconfig"
	"cocoonstack.io/cocoon/internal/app/service"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/logging"
)

const defaultSocket = "/run/cocoon/cocoond.sock"

// Main is the vk-cocoon binary: it runs until ctx ends and returns the exit code, 2 for a bad command line.
func Main(ctx context.Context, args []string, env func(string) string, stdout, stderr io.Writer) int {
	o, err := parse(args, env, stdout)
	if errors.Is(err, pflag.ErrHelp) {
		return 0
	}
	if err != nil {
		fmt.Fprintln(stderr, "vk-cocoon:", err)
		return 2
	}
	if err := serve(ctx, o, stderr); err != nil {
		fmt.Fprintln(stderr, "vk-cocoon:", err)
		if errdefs.IsInvalid(err) {
			return 2
		}
		return 1
	}
	return 0
}

func serve(ctx context.Context, o options, stderr io.Writer) error {
	log, err := logging.New(stderr, o.LogLevel, o.LogFormat)
	if err != nil {
		return err
	}
	klog.SetSlogLogger(log.With("component", "client-go"))
	if o.BootstrapKubeconfig == "" { // report missing credentials at once, not after cocoond has answered
		if _, err := restconfig.Load(o.Kubeconfig); err != nil {
			return err
		}
	}
	runtime, stop, err := o.chooseRuntime(ctx, log)
	if err != nil {
		return err
	}
	defer stop()
	n, err := New(o.Config, runtime, log)
	if err != nil {
		return err
	}
	n.service = true
	defer service.Stopping(log)
	return n.Run(ctx)
}
