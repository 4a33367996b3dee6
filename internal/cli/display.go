package cli

import (
	"context"
	"fmt"
	"io"
	"net"
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
waits for one viewer, and ends when the viewer leaves. While it waits, every user of this machine can be that viewer; with --socket only
you and root can.

One person at a time can be connected: the last one, unless that one gives --preserve-session.` + refHelp,
		Example: "  cocoon vm vnc --port 5901 web & vncviewer 127.0.0.1:5901\n  cocoon vm vnc --socket /tmp/web.vnc web",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeVMs,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			return a.vnc(ctx, c, args[0], socket, port, keep)
		}),
	}
	f := cmd.Flags()
	f.StringVar(&socket, "socket", "", "wait on a unix socket at `PATH`, which the command makes")
	f.Uint16Var(&port, "port", 0, "wait on this port of 127.0.0.1 (default: any free one)")
	f.BoolVar(&keep, "preserve-session", false, "fail if somebody is connected, instead of ending that connection")
	cmd.MarkFlagsMutuallyExclusive("socket", "port")
	return cmd
}

func (a *app) vnc(ctx context.Context, c *nodeclient.Client, ref, socket string, port uint16, keep bool) error {
	screen, err := c.Display(ctx, ref, keep)
	if err != nil {
		return err
	}
	defer screen.Close()
	l, err := listenFor(ctx, socket, port)
	if err != nil {
		return err
	}
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

// listenFor listens where a viewer of this machine can connect.
func listenFor(ctx context.Context, socket string, port uint16) (net.Listener, error) {
	network, address := "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port)))
	if socket != "" {
		network, address = "unix", socket
		defer syscall.Umask(syscall.Umask(0o177)) // only its owner can connect
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, network, address)
	if err != nil {
		return nil, errdefs.Preconditionf("wait for a viewer: %w", err)
	}
	return l, nil
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
