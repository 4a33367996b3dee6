// Package capsulectl is the command line of the operator of an appliance: verbs that people type, turned into calls of the
// appliance's API over TLS.
//
// It runs on another machine than the appliance. It keeps contexts and the operator's key, and no other state.
package capsulectl

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"cocoonstack.io/cocoon/internal/capsulectl/config"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/mdns"
	"cocoonstack.io/cocoon/internal/textui"
)

// Options is what the binary passes to the command line.
type Options struct {
	Stdin   io.Reader
	Stdout  io.Writer
	Stderr  io.Writer
	Getenv  func(string) string
	Version string

	// Browse finds appliances on the network for some time; nil: mdns.Browse on all interfaces.
	Browse func(ctx context.Context, timeout time.Duration) ([]mdns.Entry, error)
	// Pause waits between two questions to a machine that is not ready yet; nil: in real time.
	Pause func(ctx context.Context, d time.Duration) error
	// Completion is how long the completion of a shell waits for the machine; 0: a second.
	Completion time.Duration
}

// Run executes one command line (without the program's name) and returns the exit code of the process.
func Run(ctx context.Context, args []string, o Options) int {
	a := &app{Options: o}
	if a.Browse == nil {
		a.Browse = func(ctx context.Context, timeout time.Duration) ([]mdns.Entry, error) {
			return mdns.Browse(ctx, timeout, nil)
		}
	}
	if a.Pause == nil {
		a.Pause = pause
	}
	a.Completion = cmp.Or(a.Completion, time.Second)
	return textui.Report(ctx, o.Stderr, a.run(ctx, args))
}

// app is one run of the command line.
type app struct {
	Options
	target string // --capsule
	parsed bool   // flags and arguments were accepted: later failures are no usage errors
}

func (a *app) run(ctx context.Context, args []string) error {
	for i, arg := range args {
		if !utf8.ValidString(arg) {
			return errdefs.Invalidf("argument %d is not valid UTF-8", i+1)
		}
	}
	root := a.root() //nolint:contextcheck // cobra hands ctx to the commands
	root.SetArgs(dashedLast(args))
	err := root.ExecuteContext(ctx)
	if err != nil && !a.parsed && errdefs.ClassOf(err) == errdefs.Internal {
		return errdefs.As(errdefs.InvalidArgument, err) // cobra's own messages about flags, arguments and unknown commands
	}
	return err
}

// dashedLast returns the args of "rm" with all kids that begin with "-", as one of 64 does, at the end behind "--", because they are no flags.
func dashedLast(args []string) []string {
	if slices.Contains(args, "--") || !slices.Contains(args, "rm") {
		return args
	}
	var kids, others []string
	for _, arg := range args {
		if strings.HasPrefix(arg, "-") && capsulewire.IsKid(arg) {
			kids = append(kids, arg)
		} else {
			others = append(others, arg)
		}
	}
	if kids == nil {
		return args
	}
	return slices.Concat(others, []string{"--"}, kids)
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "capsulectl",
		Short: "Containers and micro-VMs on a machine of your own",
		Long: `capsulectl operates an appliance: a machine that runs containers and micro-VMs, and nothing else.

A new machine is adopted once, which makes it a context: a name, an address, and the certificate that is expected there. Every other
verb is for the machine that --capsule names, or CAPSULE_HOST, or the current context.`,
		Example: `  capsulectl discover                             # which machines are here?
  capsulectl adopt --capsule 192.0.2.7 --name lab # the first operator of a new one
  capsulectl apply -f web.yaml --wait             # run what the file describes
  capsulectl workload list
  capsulectl workload exec -t web -- sh
  capsulectl cp ./page.html web:/usr/share/nginx/html/`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if err := errors.Join(cmd.ValidateRequiredFlags(), cmd.ValidateFlagGroups()); err != nil { // cobra itself checks them too late to be a usage error
				return err
			}
			a.parsed = true
			return nil
		},
	}
	root.SetIn(a.Stdin)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	f := root.PersistentFlags()
	f.StringVar(&a.target, "capsule", a.Getenv("CAPSULE_HOST"), "context, or its address `HOST[:PORT]` [CAPSULE_HOST] (default: the current context)")
	f.Lookup("capsule").DefValue = ""
	_ = root.RegisterFlagCompletionFunc("capsule", a.completeContexts)

	for _, g := range []struct {
		id, title string
		commands  []*cobra.Command
	}{
		{"run", "Workloads:", []*cobra.Command{a.applyCommand(), a.workloadCommand(), a.copyCommand(), a.volumeCommand(), a.imageCommand(), a.registryCommand()}},
		{"machine", "The machine:", []*cobra.Command{a.capsuleCommand(), a.networkCommand(), a.discoverCommand(), a.installCommand()}},
		{"who", "Operators:", []*cobra.Command{a.adoptCommand(), a.whoamiCommand(), a.keyCommand(), a.contextCommand()}},
	} {
		root.AddGroup(&cobra.Group{ID: g.id, Title: g.title})
		for _, c := range g.commands {
			c.GroupID = g.id
			root.AddCommand(c)
		}
	}
	root.AddCommand(a.versionCommand(), &cobra.Command{Use: "exit-codes", Short: "What the exit codes of capsulectl mean", Long: exitCodesText})
	return root
}

const exitCodesText = `capsulectl ends with

    0  success
    1  internal error of capsulectl or of the machine
    2  invalid: a mistake in the command line or a manifest, or a request that can never work
    3  the workload, volume or context does not exist
    4  the name is taken, or a concurrent change won
    5  not possible in the present state, or for this operator; the message says what must happen first
    6  the machine cannot be reached; try again later
    7  something limited is used up: disk, memory, addresses
    8  this machine, or its version, cannot do it
    9  stored data is damaged
  124  it took longer than the given time
  130  interrupted

except "workload exec" and "capsule debug", which end with the exit code of the command when it could be run at all.

Errors go to standard error as "Error: " and one sentence. Nothing else is printed then.`

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version of capsulectl", Args: cobra.NoArgs,
		Run: func(*cobra.Command, []string) { a.printf("capsulectl %s\n", a.Version) },
	}
}

// group makes a command that only holds others.
func group(use, short, example string, cmds ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{
		Use: use, Short: short, Example: example, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.AddCommand(cmds...)
	return c
}

func (a *app) printf(format string, args ...any) { fmt.Fprintf(a.Stdout, format, args...) }

// note tells the operator what happens, apart from the output.
func (a *app) note(format string, args ...any) { fmt.Fprintf(a.Stderr, format+"\n", args...) }

// configDir returns the folder of contexts and key.
func (a *app) configDir() (string, error) { return config.Dir(a.Getenv) }

// printMessage prints a message of the API as JSON.
func (a *app) printMessage(m proto.Message) error {
	text, err := marshal(m)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.Stdout, "%s\n", text)
	return err
}

// printMessages prints messages as a JSON array, [] when there are none.
func printMessages[M proto.Message](a *app, all []M) error {
	list := make([]json.RawMessage, len(all))
	for i, m := range all {
		text, err := marshal(m)
		if err != nil {
			return err
		}
		list[i] = text
	}
	return textui.PrintJSON(a.Stdout, list)
}

// marshal returns the JSON of a message, always the same for the same message.
func marshal(m proto.Message) ([]byte, error) {
	text, err := protojson.Marshal(m)
	if err != nil {
		return nil, errdefs.New(errdefs.Internal, "print the answer: %w", err)
	}
	var out bytes.Buffer
	if err := json.Indent(&out, text, "", "  "); err != nil {
		return nil, errdefs.New(errdefs.Internal, "print the answer: %w", err)
	}
	return out.Bytes(), nil
}

// each calls fn for every name, continues after failures and returns them together.
func each(names []string, fn func(name string) error) error {
	var errs []error
	for _, name := range names {
		errs = append(errs, fn(name))
	}
	return errors.Join(errs...)
}

// confirmed asks a question on the terminal, to which only "yes" agrees.
func (a *app) confirmed(question string) error {
	a.note("%s", question)
	fmt.Fprint(a.Stderr, "Type yes to go on: ")
	if strings.ToLower(strings.TrimSpace(a.line(8))) != "yes" {
		return errdefs.New(errdefs.Canceled, "nothing was changed: the answer was not yes")
	}
	return nil
}

// line reads one line that somebody types, of at most so many bytes.
func (a *app) line(limit int) string {
	answer := make([]byte, 0, limit)
	for one := make([]byte, 1); len(answer) < cap(answer); { // not a byte more than the line, which others may read on from
		n, err := a.Stdin.Read(one)
		if n == 1 && one[0] != '\n' {
			answer = append(answer, one[0])
		}
		if err != nil || n == 1 && one[0] == '\n' {
			break
		}
	}
	return string(answer)
}

// seconds of Unix time as a time in UTC; "" for none.
func stamp(unix int64) string {
	if unix == 0 {
		return ""
	}
	return time.Unix(unix, 0).UTC().Format(time.RFC3339)
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
