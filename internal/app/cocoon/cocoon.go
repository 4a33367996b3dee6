// Package cocoon is the command line's composition root: the CLI with the doctor and the clusters of `cocoon up`.
//
// It only joins them; each works without the others.
package cocoon

import (
	"context"
	"io"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/app/assets"
	"cocoonstack.io/cocoon/internal/app/up"
	"cocoonstack.io/cocoon/internal/cli"
	"cocoonstack.io/cocoon/internal/doctor"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/version"
	"cocoonstack.io/cocoon/internal/volume"
)

// Main runs one command line (without the program's name) and returns the exit code.
func Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	return cli.Run(ctx, args, cli.Options{
		Stdin: stdin, Stdout: stdout, Stderr: stderr, Getenv: os.Getenv, Version: version.Version, Doctor: examine, Extra: up.Commands,
	})
}

// examine checks this host for the machine's daemon, or for an instance in dir.
func examine(ctx context.Context, dir string, fix bool) ([]nodewire.Check, error) {
	cfg := doctor.Config{StateDir: "/var/lib/cocoon", RunDir: "/run/cocoon", Group: "cocoon"}
	if dir != "" {
		cfg.StateDir, cfg.RunDir, cfg.Group = dir, filepath.Join(dir, "run"), ""
	} else {
		cfg.Kubelet = kubelet(environment)
	}
	socket := filepath.Join(cfg.RunDir, "cocoond.sock")
	// The daemon may keep its state elsewhere, as that of Cocoon OS does.
	if info, err := asking(socket, (*nodeclient.Client).Info)(ctx); dir == "" && err == nil && info.StateDir != "" {
		cfg.StateDir = info.StateDir
	}
	cfg.MappingProblems = asking(socket, (*nodeclient.Client).Problems)
	cfg.Strays = asking(socket, (*nodeclient.Client).Strays)
	cfg.Networks = asking(socket, func(c *nodeclient.Client, ctx context.Context) ([]nodewire.Network, error) {
		i, err := c.Info(ctx)
		return i.NetworkDetails, err
	})
	cfg.Drivers = asking(socket, func(c *nodeclient.Client, ctx context.Context) ([]nodewire.Driver, error) {
		i, err := c.Info(ctx)
		return i.Drivers, err
	})
	cfg.Pools = asking(socket, func(c *nodeclient.Client, ctx context.Context) ([]volume.Pool, error) {
		i, err := c.Info(ctx)
		return i.VolumePools, err
	})
	cfg.Kernel, cfg.Initrd = assets.Path("guest/vmlinux"), assets.Path("guest/initramfs")
	return doctor.Run(ctx, cfg, fix), nil
}

// asking returns a function that puts one question to the daemon at socket.
func asking[T any](socket string, ask func(*nodeclient.Client, context.Context) (T, error)) func(context.Context) (T, error) {
	return func(ctx context.Context) (answer T, err error) {
		c, err := nodeclient.Dial(socket)
		if err != nil {
			return answer, err
		}
		defer c.Close()
		return ask(c, ctx)
	}
}
