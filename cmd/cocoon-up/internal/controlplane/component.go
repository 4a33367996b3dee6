package controlplane

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
)

// component is a part that runs until it is stopped. If it returns earlier,
// it has failed, and the control plane fails with it.
type component struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{}
	err    error // valid once done is closed
}

// start runs f in a goroutine. stop waits for it. The component's context
// does not end with ctx, because components are stopped one after the other.
func start(ctx context.Context, name string, failed chan<- error, f func(context.Context) error) *component {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c := &component{name: name, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		err := f(ctx)
		if ctx.Err() != nil {
			return // it was told to stop, so its error is not a failure
		}
		if err == nil {
			err = errors.New("it ended too early")
		}
		c.err = fmt.Errorf("%s: %w", name, err)
		failed <- c.err
	}()
	return c
}

// stop ends the component and reports whether it did so in time.
func (c *component) stop(within time.Duration) bool {
	c.cancel()
	select {
	case <-c.done:
		return true
	case <-time.After(within):
		return false
	}
}

// parse sets a component's options from its flags.
func parse(component string, sets cliflag.NamedFlagSets, args []string) error {
	fs := pflag.NewFlagSet(component, pflag.ContinueOnError)
	fs.SetNormalizeFunc(cliflag.WordSepNormalizeFunc)
	fs.Usage = func() {}
	for _, set := range sets.FlagSets {
		fs.AddFlagSet(set)
	}
	if err := fs.Parse(args); err != nil {
		return fmt.Errorf("%s flags: %w", component, err)
	}
	return nil
}
