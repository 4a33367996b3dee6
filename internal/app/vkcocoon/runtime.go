package vkcocoon

import (
	"context"
	"log/slog"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/podprovider"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/nodecli"
	"cocoonstack.io/cocoon/internal/nodeclient"
)

var (
	_ podprovider.Runtime    = (*nodecli.Client)(nil)
	_ podsnapshots.Snapshots = (*nodecli.Client)(nil)
)

// Ways to reach the VMs.
const (
	runtimeAuto = "auto" // the node API if it answers, else the binary if it exists, else the node API once it answers
	runtimeAPI  = "api"
	runtimeCLI  = "cli"
)

// answerLimit is how long to wait for the node API before the binary is used: cocoond may also be starting.
const answerLimit = 5 * time.Second

// chooseRuntime opens the connection to the VMs; stop closes it.
func (o options) chooseRuntime(ctx context.Context, log *slog.Logger) (r Runtime, stop func(), err error) {
	switch o.Runtime {
	case runtimeCLI:
		c, err := o.command()
		if err != nil {
			return nil, nil, err
		}
		return c, func() { _ = c.Close() }, nil
	case runtimeAuto, runtimeAPI:
	default:
		return nil, nil, errdefs.Invalidf("runtime %q must be one of: auto, api, cli", o.Runtime)
	}
	c, err := nodeclient.Dial(o.Socket)
	if err != nil {
		return nil, nil, err
	}
	if o.Runtime == runtimeAuto {
		if cmd := o.fallback(ctx, c, log); cmd != nil {
			_ = c.Close()
			return cmd, func() { _ = cmd.Close() }, nil
		}
	}
	return c, func() { _ = c.Close() }, nil
}

// fallback is the binary, if the node API does not answer and the binary can be run.
func (o options) fallback(ctx context.Context, api *nodeclient.Client, log *slog.Logger) *nodecli.Client {
	cmd, err := o.command()
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	ask := func() (bool, error) { _, err := api.Info(ctx); return true, err }
	if _, err = backoff.Retry(ctx, ask, backoff.WithBackOff(backoff.NewConstantBackOff(100*time.Millisecond)), backoff.WithMaxElapsedTime(answerLimit)); err == nil {
		return nil
	}
	log.Warn("the node API does not answer, VMs are reached by the cocoon binary, which is slower", "op", cmd.Target(), "err", err)
	return cmd
}

// command is the binary. It gets the socket as an argument only when that is not the binary's default.
func (o options) command() (*nodecli.Client, error) {
	socket := o.Socket
	if socket == defaultSocket {
		socket = ""
	}
	return nodecli.New(o.CocoonBin, socket)
}
