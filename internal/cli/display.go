package cli

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeclient"
)

func (a *app) vmVNCCommand() *cobra.Command {
	var socket string
	var port uint16
	var keep bool
	cmd := &cobra.Command{
		Use:   "vnc REF",
		Short: "Let a VNC viewer connect to the screen of a VM",
		Long: `Let a VNC viewer connect to the screen, the keyboard and the mouse of a VM that was created with --graphics. The command prints the address,
waits for one viewer, and ends when the viewer leaves. It waits on a unix socket, to which only you and root can connect. With --port it waits
on a port of 127.0.0.1, for viewers that need one; every user of this machine can be that viewer then.

One person at a time can be connected: the last one, unless that one gives --preserve-session.` + refHelp,
		Example: "  cocoon vm vnc --socket ./web.vnc web & vncviewer ./web.vnc\n  cocoon vm vnc --port 5901 web & vncviewer 127.0.0.1:5901",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeVMs,
	}
	f := cmd.Flags()
	cmd.RunE = a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
		return a.vnc(ctx, c, args[0], keep, func() (net.Listener, func(), error) {
			if f.Changed("port") {
				return listenFor(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
			}
			return listenPrivately(ctx, socket)
		})
	})
	f.StringVar(&socket, "socket", "", "wait on a unix socket at `PATH`, which the command makes (default: in a folder of its own)")
	f.Uint16Var(&port, "port", 0, "wait on this port of 127.0.0.1 instead; 0 is any free one")
	f.BoolVar(&keep, "preserve-session", false, "fail if somebody is connected, instead of ending that connection")
	cmd.MarkFlagsMutuallyExclusive("socket", "port")
	return cmd
}

func (a *app) vnc(ctx context.Context, c *nodeclient.Client, ref string, keep bool, listen func() (net.Listener, func(), error)) error {
	screen, err := c.Display(ctx, ref, keep)
	if err != nil {
		return err
	}
	defer screen.Close()
	l, done, err := listen()
	if err != nil {
		return err
	}
	defer done()
	defer l.Close()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	a.printf("%s\n", l.Addr())
	viewer, err := l.Accept()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return errdefs.Unavailablef("wait for a viewer: %w", err)
	}
	l.Close()
	defer viewer.Close()
	defer context.AfterFunc(ctx, func() { viewer.Close() })()
	left := make(chan struct{})
	go func() { // ends when one of the two is closed
		defer close(left)
		_, _ = io.Copy(screen, viewer)
		screen.Close()
	}()
	_, err = io.Copy(viewer, screen)
	select {
	case <-left:
		return ctx.Err()
	default:
		return err
	}
}

// listenPrivately listens on a unix socket to which only its owner can connect; with "" in a folder of its own, which done removes.
func listenPrivately(ctx context.Context, socket string) (l net.Listener, done func(), err error) {
	if socket != "" {
		defer syscall.Umask(syscall.Umask(0o177))
		return listenFor(ctx, "unix", socket)
	}
	dir, err := os.MkdirTemp("", "cocoon-vnc-")
	if err != nil {
		return nil, nil, errdefs.Preconditionf("make a folder for the socket of a viewer: %w; give --socket", err)
	}
	done = func() { _ = os.RemoveAll(dir) }
	if l, _, err = listenFor(ctx, "unix", filepath.Join(dir, "vnc")); err != nil {
		done()
	}
	return l, done, err
}

func listenFor(ctx context.Context, network, address string) (net.Listener, func(), error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, network, address)
	if err != nil {
		return nil, nil, errdefs.Preconditionf("wait for a viewer: %w", err)
	}
	return l, func() {}, nil
}

func (a *app) vmScreenshotCommand() *cobra.Command {
	var path string
	var wake bool
	cmd := &cobra.Command{
		Use:     "screenshot REF",
		Short:   "Save what the screen of a VM shows",
		Long:    `Save what the screen of a VM shows as a PNG. The VM must have been created with --graphics. Nobody who is connected is disturbed.` + refHelp,
		Example: "  cocoon vm screenshot -o web.png web",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeVMs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.writable(path, "a picture", "cocoon vm screenshot -o FILE "+args[0]); err != nil {
				return err
			}
			return a.withClient(func(c *nodeclient.Client) error {
				png, err := c.Screenshot(cmd.Context(), args[0], wake)
				if err != nil {
					return err
				}
				return a.exportTo(path, args[0], int64(len(png)), func(w io.Writer) error {
					if _, err := w.Write(png); err != nil {
						return fmt.Errorf("write the picture: %w", err)
					}
					return nil
				})
			})
		},
	}
	cmd.Flags().StringVarP(&path, "output", "o", "-", "`FILE` to write, or - for standard output")
	cmd.Flags().BoolVar(&wake, "wake", false, "move the mouse before, so that the guest switches its screen on")
	return cmd
}
