package capsulectl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) workloadCommand() *cobra.Command {
	calls := []*cobra.Command{a.workloadListCommand(), a.workloadGetCommand(), a.workloadLogsCommand(), a.execCommand(), a.eventsCommand()}
	for _, v := range []struct {
		use, short string
		call       func(ctx context.Context, c *client, name string) error
	}{
		{"start", "Start workloads that were stopped", func(ctx context.Context, c *client, name string) error {
			_, err := c.workloads().Start(ctx, &capsulev1.WorkloadStartRequest{Name: name})
			return err
		}},
		{"stop", "Stop workloads, until they are started; also over a reboot", func(ctx context.Context, c *client, name string) error {
			_, err := c.workloads().Stop(ctx, &capsulev1.WorkloadStopRequest{Name: name})
			return err
		}},
		{"restart", "End workloads and start them again", func(ctx context.Context, c *client, name string) error {
			_, err := c.workloads().Restart(ctx, &capsulev1.WorkloadRestartRequest{Name: name})
			return err
		}},
		{"delete", "End workloads and forget them; their volumes stay", func(ctx context.Context, c *client, name string) error {
			_, err := c.workloads().Delete(ctx, &capsulev1.WorkloadDeleteRequest{Name: name})
			return err
		}},
	} {
		cmd := &cobra.Command{
			Use: v.use + " NAME...", Short: v.short, Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeWorkloads,
			RunE: a.calling(func(ctx context.Context, c *client, names []string) error {
				return each(names, func(name string) error {
					err := v.call(ctx, c, name)
					if err == nil {
						a.printf("%s\n", name)
					}
					return err
				})
			}),
		}
		if v.use == "delete" {
			cmd.Aliases = []string{"rm"}
		}
		calls = append(calls, cmd)
	}
	return group("workload", "Containers and micro-VMs", "  capsulectl workload list\n  capsulectl workload logs -f web\n  capsulectl workload exec -t web -- sh", calls...)
}

func (a *app) workloadListCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the workloads", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			answer, err := c.workloads().List(ctx, &capsulev1.WorkloadListRequest{})
			switch {
			case err != nil:
				return err
			case out == textui.FormatJSON:
				return printMessages(a, answer.GetWorkloads())
			}
			var table [][]string
			for _, w := range answer.GetWorkloads() {
				table = append(table, workloadRow(w, time.Now()))
			}
			return textui.PrintTable(a.Stdout, []string{"NAME", "KIND", "IMAGE", "DESIRED", "PHASE", "READY", "RESTARTS", "SINCE", "MESSAGE"}, table)
		}),
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}

func workloadRow(w *capsulev1.Workload, now time.Time) []string {
	kind, image := "Container", w.GetContainer().GetImage()
	if w.GetKind() == capsulev1.WorkloadKind_WORKLOAD_KIND_MICRO_VM {
		kind, image = "MicroVM", w.GetMicroVm().GetImage()
		if image == "" {
			image = w.GetMicroVm().GetRootfsPath()
		}
	}
	desired := "running"
	if d := w.GetDesiredState(); d > capsulev1.DesiredState_DESIRED_STATE_RUNNING {
		desired = short("DESIRED_STATE_", d)
	}
	s := w.GetStatus()
	ready, since, message := "no", "", s.GetMessage()
	if s.GetReady() {
		ready = "yes"
	}
	if at := max(s.GetStartedAtUnix(), s.GetFinishedAtUnix()); at > 0 {
		since = textui.Age(now, time.Unix(at, 0))
	}
	if message == "" {
		message = s.GetReason()
	}
	return []string{w.GetName(), kind, image, desired, short("WORKLOAD_PHASE_", s.GetPhase()), ready, fmt.Sprint(s.GetRestartCount()), since, message}
}

func (a *app) workloadGetCommand() *cobra.Command {
	return &cobra.Command{
		Use: "get NAME", Short: "Print all about a workload as JSON, which apply accepts again", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeWorkloads,
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			w, err := c.workloads().Get(ctx, &capsulev1.WorkloadGetRequest{Name: args[0]})
			if err != nil {
				return err
			}
			return a.printMessage(w)
		}),
	}
}

func (a *app) workloadLogsCommand() *cobra.Command {
	var l logFlags
	var serial bool
	cmd := &cobra.Command{
		Use: "logs NAME", Short: "Print what a workload has written", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeWorkloads,
		Example: "  capsulectl workload logs -f web\n  capsulectl workload logs -n 20 web\n  capsulectl workload logs --serial vm",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			source := capsulev1.LogSource_LOG_SOURCE_PAYLOAD
			if serial {
				source = capsulev1.LogSource_LOG_SOURCE_SERIAL
			}
			s, err := c.workloads().Logs(ctx, &capsulev1.WorkloadLogsRequest{Name: args[0], Follow: l.follow, TailLines: l.tail, Source: source})
			if err != nil {
				return err
			}
			return writeAll(a.Stdout, s, (*capsulev1.WorkloadLogChunk).GetData)
		}),
	}
	l.add(cmd)
	cmd.Flags().BoolVar(&serial, "serial", false, "of the serial console of a micro-VM: its kernel, and what fails early")
	return cmd
}

func (a *app) eventsCommand() *cobra.Command {
	var follow bool
	var after int64
	var out textui.Format
	cmd := &cobra.Command{
		Use: "events [NAME]", Short: "Print what has happened to workloads, the oldest first", Args: cobra.MaximumNArgs(1), ValidArgsFunction: a.completeWorkloads,
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			s, err := c.workloads().Events(ctx, &capsulev1.WorkloadEventsRequest{Name: strings.Join(args, ""), Follow: follow, After: after})
			if err != nil {
				return err
			}
			for {
				e, err := s.Recv()
				switch {
				case errors.Is(err, io.EOF):
					return nil
				case err != nil:
					return err
				case out == textui.FormatJSON:
					err = a.printMessage(e)
				default:
					a.printf("%d  %s  %s  %s  %s\n", e.GetSequence(), stamp(e.GetTimeUnix()), textui.Cell(e.GetWorkload()), textui.Cell(e.GetReason()), textui.Cell(e.GetMessage()))
				}
				if err != nil {
					return err
				}
			}
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what happens from now on")
	cmd.Flags().Int64Var(&after, "after", 0, "only events with a greater number")
	textui.OutputFlag(cmd, &out)
	return cmd
}

// execution is a command in a workload.
type execution struct {
	name       string
	command    []string
	env        map[string]string
	tty, stdin bool
}

func (a *app) execCommand() *cobra.Command {
	var e execution
	var env []string
	var no, interactive bool
	cmd := &cobra.Command{
		Use: "exec NAME -- CMD...", Short: "Run a command in a workload, and end with its exit code", Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.completeWorkloads,
		Long: `Run a command in a workload, and end with its exit code. Standard input is passed on, unless --no-stdin is given, as it must be
in a loop that reads its own.`,
		Example: "  capsulectl workload exec -t web -- sh\n  capsulectl workload exec web -- nginx -s reload\n  tar c . | capsulectl workload exec web -- tar x -C /srv",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			e.name, e.command, e.stdin, e.env = args[0], args[1:], !no, map[string]string{}
			for _, s := range env {
				name, value, ok := strings.Cut(s, "=")
				if !ok || name == "" {
					return errdefs.Invalidf("--env %q is not NAME=VALUE", s)
				}
				e.env[name] = value
			}
			return a.exec(ctx, c, e)
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&e.tty, "tty", "t", false, "give the command a terminal")
	f.StringArrayVarP(&env, "env", "e", nil, "variable `NAME=VALUE`; may be repeated")
	f.BoolVarP(&no, "no-stdin", "n", false, "the command has no standard input")
	f.BoolVarP(&interactive, "interactive", "i", true, "pass standard input on, as by default")
	f.Lookup("interactive").Hidden = true
	cmd.SetFlagErrorFunc(hintAboutDashes)
	return cmd
}

// hintAboutDashes adds a hint: most wrong flags are meant for the command in the workload.
func hintAboutDashes(_ *cobra.Command, err error) error {
	if _, ok := errors.AsType[*pflag.NotExistError](err); ok {
		return errdefs.Invalidf("%w; if it is for the command in the workload, put -- before that command", err)
	}
	return errdefs.As(errdefs.InvalidArgument, err)
}

// exec runs e and returns a textui.CommandExit if it failed.
func (a *app) exec(ctx context.Context, c *client, e execution) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.workloads().Exec(ctx)
	if err != nil {
		return err
	}
	out := &execStream{Exec: s}
	err = out.send(&capsulev1.WorkloadExecClientMessage{Payload: &capsulev1.WorkloadExecClientMessage_Config{Config: &capsulev1.WorkloadExecConfig{
		Name: e.name, Command: e.command, Tty: e.tty, Env: e.env, Stdin: e.stdin,
	}}})
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if e.tty {
		stop, err := a.terminal(out, e.stdin)
		if err != nil {
			return err
		}
		defer stop()
	}
	if e.stdin {
		go out.input(a.Stdin, e.tty) // ends with our input, or the process
	} else if !e.tty {
		_ = out.end()
	}
	return a.output(s)
}

// output writes what the command writes until it ends.
func (a *app) output(s receiver[*capsulev1.WorkloadExecServerMessage]) error {
	for {
		m, err := s.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return errdefs.New(errdefs.Internal, "the machine ended the connection without an exit code")
		case err != nil:
			return err
		}
		switch p := m.GetPayload().(type) {
		case *capsulev1.WorkloadExecServerMessage_Stdout:
			_, err = a.Stdout.Write(p.Stdout)
		case *capsulev1.WorkloadExecServerMessage_Stderr:
			_, err = a.Stderr.Write(p.Stderr)
		case *capsulev1.WorkloadExecServerMessage_Exit:
			if p.Exit.GetExitCode() != 0 {
				return textui.CommandExit(p.Exit.GetExitCode())
			}
			return nil
		}
		if err != nil {
			return errdefs.New(errdefs.Internal, "write the output: %w", err)
		}
	}
}

// execStream lets input and window sizes be sent at the same time.
type execStream struct {
	Exec interface {
		Send(m *capsulev1.WorkloadExecClientMessage) error
		CloseSend() error
	}
	mu sync.Mutex
}

func (s *execStream) send(m *capsulev1.WorkloadExecClientMessage) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.Exec.Send(m)
}

// end says that nothing more will be sent.
func (s *execStream) end() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.Exec.CloseSend()
}

// input sends what is read. With a terminal, sizes follow the input.
func (s *execStream) input(r io.Reader, tty bool) {
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			data := append([]byte(nil), buf[:n]...)
			if s.send(&capsulev1.WorkloadExecClientMessage{Payload: &capsulev1.WorkloadExecClientMessage_Stdin{Stdin: data}}) != nil {
				return // the answer says why
			}
		}
		if err != nil {
			_ = s.send(&capsulev1.WorkloadExecClientMessage{Payload: &capsulev1.WorkloadExecClientMessage_Stdin{}})
			if !tty {
				_ = s.end()
			}
			return
		}
	}
}

// terminal passes keys and sizes of our terminal on, until stop is called.
func (a *app) terminal(s *execStream, reading bool) (stop func(), err error) {
	restore := func() {}
	if reading {
		if restore, err = textui.RawTerminal(a.Stdin); err != nil {
			return nil, err
		}
	}
	resize := func() {
		if rows, cols := textui.WindowSize(a.Stdout, a.Stdin); rows > 0 {
			_ = s.send(&capsulev1.WorkloadExecClientMessage{Payload: &capsulev1.WorkloadExecClientMessage_Resize{
				Resize: &capsulev1.WorkloadExecResize{Cols: uint32(cols), Rows: uint32(rows)},
			}})
		}
	}
	resize()
	changed, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(changed, syscall.SIGWINCH)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-changed:
				resize()
			case <-done:
				return
			}
		}
	})
	return func() {
		signal.Stop(changed)
		close(done)
		wg.Wait()
		restore()
	}, nil
}
