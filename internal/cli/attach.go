package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) vmAttachCommand() *cobra.Command {
	var at guest.Attach
	var stdin, tty bool
	var controlFD int
	cmd := &cobra.Command{
		Use:   "attach REF",
		Short: "Join the main process of a guest",
		Long: `Show what the main process of a guest writes from now on, and with --interactive write to its standard input, if it was
started with one (vm run --interactive). It ends with the process, or with our input; the process goes on.` + refHelp,
		Example: "  cocoon vm attach web\n  cocoon vm attach -it shell              # leave with Ctrl-]\n  echo reload | cocoon vm attach -i web",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeVMs,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			return a.attach(ctx, c, args[0], at, stdin, tty, controlFD)
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&stdin, "interactive", "i", false, "pass standard input on")
	f.BoolVarP(&tty, "tty", "t", false, "the process has a terminal: send it the terminal size and every key")
	f.StringVarP(&at.Container, "container", "c", "", "of this container, where the VM has several (default: its first app)")
	f.IntVar(&controlFD, "control-fd", 0, "descriptor from which sizes are read as JSON, for programs")
	f.Lookup("control-fd").Hidden = true
	return cmd
}

// leaveKey is Ctrl-], which ends our input; every other key goes to the process.
const leaveKey = 0x1d

func (a *app) attach(ctx context.Context, c *nodeclient.Client, ref string, at guest.Attach, stdin, tty bool, controlFD int) error {
	s := guest.Streams{Stdout: a.Stdout, Stderr: a.Stderr}
	if stdin {
		s.Stdin = a.Stdin
	}
	resize := make(chan guest.WinSize, 1)
	s.Resize = resize
	if tty {
		at.Rows, at.Cols = textui.WindowSize(a.Stdout, a.Stdin)
		if stdin {
			s.Stdin = &until{Reader: a.Stdin, key: leaveKey}
			fmt.Fprintf(a.Stderr, "Attached to %s; Ctrl-] leaves it.\r\n", ref)
		}
		restore, err := a.rawTerminal(stdin)
		if err != nil {
			return err
		}
		defer restore()
		changed := make(chan os.Signal, 1)
		signal.Notify(changed, syscall.SIGWINCH)
		defer signal.Stop(changed)
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		go a.relay(ctx, cancel, changed, resize, nil, true)
	}
	if controlFD > 2 {
		go control(controlFD, resize, nil) // ends with the descriptor, at the latest with this process
	}
	return c.Attach(ctx, ref, at, s)
}

// until is a reader that ends at a key.
type until struct {
	io.Reader
	key   byte
	ended bool
}

func (u *until) Read(p []byte) (int, error) {
	if u.ended {
		return 0, io.EOF
	}
	n, err := u.Reader.Read(p)
	if i := bytes.IndexByte(p[:n], u.key); i >= 0 {
		u.ended = true
		return i, io.EOF
	}
	return n, err
}

func (a *app) vmForwardCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "forward REF PORT",
		Short: "Connect standard input and output to a TCP port in a guest",
		Long: `Connect standard input and output to a TCP port in a guest, from inside it: programs that listen on the guest's loopback
are reached too. Only guests of container images have the agent that this needs; connect to others at their address.` + refHelp,
		Example: "  printf 'GET / HTTP/1.0\\r\\n\\r\\n' | cocoon vm forward web 80\n  ssh -o ProxyCommand='cocoon vm forward web 22' root@web",
		Args:    cobra.ExactArgs(2), ValidArgsFunction: a.completeVMs,
		RunE: func(cmd *cobra.Command, args []string) error {
			port, err := strconv.ParseUint(args[1], 10, 16)
			if err != nil || port == 0 {
				return errdefs.Invalidf("%q is not a TCP port", args[1])
			}
			return a.withClient(func(c *nodeclient.Client) error {
				return c.Forward(cmd.Context(), args[0], int(port), guest.Streams{Stdin: a.Stdin, Stdout: a.Stdout})
			})
		},
	}
}
