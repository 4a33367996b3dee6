package cli

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
)

// interruptsToGiveUp is how many Ctrl-C in a row end the exec itself, if the command ignores them.
const interruptsToGiveUp = 3

func (a *app) vmExecCommand() *cobra.Command {
	var e guest.Exec
	var stdin bool
	var env []string
	var controlFD int
	cmd := &cobra.Command{
		Use:   "exec REF -- CMD...",
		Short: "Run a command in a guest",
		Long: `Run a command in a guest and end with its exit code.

Signals (Ctrl-C, TERM, HUP, QUIT, USR1, USR2) are passed to the command; three Ctrl-C in a row give up on it.` + refHelp,
		Example: `  cocoon vm exec web -- uname -a
  cocoon vm exec -it web -- sh
  tar c . | cocoon vm exec -i web -- tar x -C /srv`,
		Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.completeVMs,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			e.Command = args[1:]
			if e.Env, err = parseEnv(env, a.Getenv); err != nil {
				return err
			}
			return a.withClient(func(c *nodeclient.Client) error { return a.exec(cmd.Context(), c, args[0], e, stdin, controlFD) })
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&stdin, "interactive", "i", false, "pass standard input on")
	f.BoolVarP(&e.TTY, "tty", "t", false, "give the command a terminal")
	f.StringArrayVarP(&env, "env", "e", nil, "environment variable NAME=VALUE, or NAME to pass it on; may be repeated")
	f.StringVarP(&e.WorkDir, "workdir", "w", "", "working directory")
	f.StringVarP(&e.User, "user", "u", "", "user: name, uid, user:group")
	f.StringVarP(&e.Container, "container", "c", "", "in this container, where the VM has several (default: its first app)")
	f.IntVar(&controlFD, "control-fd", 0, "descriptor from which sizes and signals are read as JSON, for programs")
	f.Lookup("control-fd").Hidden = true
	cmd.SetFlagErrorFunc(hintAboutDashes)
	return cmd
}

func (a *app) exec(ctx context.Context, c *nodeclient.Client, ref string, e guest.Exec, stdin bool, controlFD int) error {
	// The command handles signals here; they must not end the exec: ctx ends with the first signal.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	s := guest.Streams{Stdout: a.Stdout, Stderr: a.Stderr}
	if stdin {
		s.Stdin = a.Stdin
	}
	if e.TTY {
		restore, err := a.rawTerminal(stdin)
		if err != nil {
			return err
		}
		defer restore()
		e.Rows, e.Cols = textui.WindowSize(a.Stdout, a.Stdin)
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH)
	defer signal.Stop(signals)
	resize, numbers := make(chan guest.WinSize, 1), make(chan int, 8)
	s.Resize, s.Signals = resize, numbers
	if controlFD > 2 {
		go control(controlFD, resize, numbers) // ends with the descriptor, at the latest with this process
	}
	done := make(chan struct{})
	go func() { defer close(done); a.relay(ctx, cancel, signals, resize, numbers, e.TTY) }()
	code, err := c.Exec(ctx, ref, e, s)
	gaveUp := ctx.Err() != nil
	cancel()
	<-done
	switch {
	case gaveUp:
		return errdefs.New(errdefs.Canceled, "gave up on the command after %d interrupts", interruptsToGiveUp)
	case err != nil:
		return err
	case code != 0:
		return textui.CommandExit(code)
	}
	return nil
}

// relay turns signals of this process into window sizes and signals for the command, until ctx ends.
func (a *app) relay(ctx context.Context, giveUp func(), signals <-chan os.Signal, resize chan guest.WinSize, numbers chan<- int, tty bool) {
	interrupts := 0
	for {
		select {
		case <-ctx.Done():
			return
		case sig := <-signals:
			if sig == syscall.SIGWINCH {
				if tty {
					rows, cols := textui.WindowSize(a.Stdout, a.Stdin)
					latest(resize, guest.WinSize{Rows: rows, Cols: cols})
				}
				continue
			}
			if sig != syscall.SIGINT {
				interrupts = 0
			} else if interrupts++; interrupts == interruptsToGiveUp {
				giveUp()
				return
			}
			select {
			case numbers <- int(sig.(syscall.Signal)):
			default: // the command has eight waiting already
			}
		}
	}
}

// latest replaces a value that nobody has taken yet. There must be only one sender.
func latest(c chan guest.WinSize, v guest.WinSize) {
	select {
	case <-c:
	default:
	}
	c <- v
}

// rawTerminal passes keys on unchanged, if this process reads them and they come from a terminal.
func (a *app) rawTerminal(reading bool) (restore func(), err error) {
	if !reading {
		return func() {}, nil
	}
	return textui.RawTerminal(a.Stdin)
}
