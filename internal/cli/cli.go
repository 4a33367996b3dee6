// Package cli is the command line of Cocoon: verbs that people type, turned into calls of the node API.
//
// It is a thin client: it keeps no state, touches no file of the daemon and knows no hypervisor. The composition root
// passes in what needs more (the doctor, whole clusters).
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

// DefaultSocket is where cocoond serves by default.
const DefaultSocket = "/run/cocoon/cocoond.sock"

// Options is what the binary passes to the command line.
type Options struct {
	Stdin   io.Reader
	Stdout  io.Writer
	Stderr  io.Writer
	Getenv  func(string) string
	Version string

	// Doctor examines this host without the daemon; dir is the global --dir.
	Doctor func(ctx context.Context, dir string, fix bool) ([]nodewire.Check, error)

	// Extra returns commands that belong to other packages; dir returns the global --dir (or COCOON_DIR) once flags
	// are parsed.
	Extra func(dir func() string) []*cobra.Command
}

// Run executes one command line (without the program's name) and returns the exit code of the process.
func Run(ctx context.Context, args []string, o Options) int {
	a := &app{Options: o}
	err := a.run(ctx, args)
	a.reportTo(err)
	return textui.Report(ctx, o.Stderr, err)
}

// app is one run of the command line.
type app struct {
	Options
	dir    string
	runDir string
	socket string

	namespace string // on whose behalf; "": that of BehalfName in the environment, otherwise the operator

	errorFD int  // descriptor for failures as JSON; 0: none
	exits   bool // the connection to the daemon stays open until the process ends
	parsed  bool // flags and arguments were accepted: later failures are no usage errors
}

func (a *app) run(ctx context.Context, args []string) error {
	for i, arg := range args {
		if !utf8.ValidString(arg) {
			return errdefs.Invalidf("argument %d is not valid UTF-8", i+1)
		}
	}
	root := a.root() //nolint:contextcheck // cobra hands ctx to the commands
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil && !a.parsed && errdefs.ClassOf(err) == errdefs.Internal {
		return errdefs.As(errdefs.InvalidArgument, err) // cobra's own messages about flags, arguments and unknown commands
	}
	return err
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "cocoon",
		Short: "Virtual machines as easy as containers",
		Long: `Cocoon runs container images and cloud images as virtual machines.

cocoon talks to cocoond, the node daemon. Without --dir or --socket that is the one of the machine
(` + DefaultSocket + `); an instance made by ` + "`cocoon up --dir DIR`" + ` is reached with --dir DIR.`,
		Example: `  cocoon image import demo:latest demo.tar     # a container image or a disk
  cocoon vm run --name web demo                # boot it
  cocoon vm exec -it web -- sh                 # look inside
  cocoon snapshot save --name warm web         # keep it as it is now, running
  cocoon vm clone --name web-2 warm            # and go on from there, at once
  cocoon vm rm --force web
  cocoon doctor                                # what is this host missing?`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		// A group without a verb shows its help.
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if err := cmd.ValidateFlagGroups(); err != nil { // cobra itself checks them too late to be a usage error
				return err
			}
			a.parsed = true
			a.noteAccepted(cmd)
			return a.onBehalf(cmd)
		},
	}
	root.SetIn(a.Stdin)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	f := root.PersistentFlags()
	f.StringVar(&a.dir, "dir", a.Getenv("COCOON_DIR"), "`DIR` of an instance made by cocoon up [COCOON_DIR]")
	f.StringVar(&a.socket, "socket", a.Getenv("COCOON_SOCKET"), "`PATH` of cocoond's socket; wins over --dir [COCOON_SOCKET] (default "+DefaultSocket+")")
	f.StringVar(&a.runDir, "run-dir", "", "`DIR` of cocoond's sockets, as its own --run-dir says; wins over --dir")
	f.StringVar(&a.namespace, "namespace", "", "act for the VMs and snapshots of `NAMESPACE` of the cluster alone; without it, for all")
	f.IntVar(&a.errorFD, "error-fd", 0, "descriptor to which a failure is written as JSON, for programs")
	f.Lookup("error-fd").Hidden = true
	f.Lookup("dir").DefValue = ""
	f.Lookup("socket").DefValue = ""
	f.SortFlags = false

	root.AddGroup(&cobra.Group{ID: "vm", Title: "Virtual machines:"}, &cobra.Group{ID: "node", Title: "This machine:"})
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("vm", a.vmCommand(), a.imageCommand(), a.snapshotCommand(), a.volumeCommand())
	add("node", a.nodeCommand(), a.netCommand(), a.doctorCommand(), a.recoverCommand(), a.gcCommand("cocoon gc"))
	if a.Extra != nil {
		root.AddGroup(&cobra.Group{ID: "cluster", Title: "Clusters:"})
		add("cluster", a.Extra(func() string { return a.dir })...)
	}
	root.AddCommand(a.versionCommand(), exitCodesTopic())
	a.accept(root)
	return root
}

// onBehalf makes the calls of cmd on behalf of the owner that the flag or the environment names.
func (a *app) onBehalf(cmd *cobra.Command) error {
	who, err := nodejson.ParseBehalf(a.Getenv(nodejson.BehalfName))
	if err != nil {
		return err
	}
	if a.namespace != "" {
		who = vm.Owner{Namespace: a.namespace}
	}
	if !who.Operator() {
		cmd.SetContext(vm.OnBehalf(cmd.Context(), who))
	}
	return nil
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

// socketPath resolves --socket, --run-dir, --dir and their environment variables.
func (a *app) socketPath() string {
	switch {
	case a.socket != "":
		return a.socket
	case a.runDir != "":
		return filepath.Join(a.runDir, "cocoond.sock")
	case a.dir != "":
		return filepath.Join(a.dir, "run", "cocoond.sock")
	}
	return DefaultSocket
}

// withClient runs fn with a connection to the daemon.
func (a *app) withClient(fn func(c *nodeclient.Client) error) error {
	c, err := nodeclient.Dial(a.socketPath())
	if err != nil {
		return err
	}
	if !a.exits {
		defer c.Close()
	}
	return fn(c)
}

// calling makes a command of fn, which runs with a connection to the daemon.
func (a *app) calling(fn func(ctx context.Context, c *nodeclient.Client, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		return a.withClient(func(c *nodeclient.Client) error { return fn(cmd.Context(), c, args) })
	}
}

// removing makes a command of remove, which it calls for every argument; it prints what was removed.
func (a *app) removing(remove func(ctx context.Context, c *nodeclient.Client, ref string) error) func(*cobra.Command, []string) error {
	return a.calling(func(ctx context.Context, c *nodeclient.Client, refs []string) error {
		return each(refs, func(ref string) error {
			err := remove(ctx, c, ref)
			if err == nil {
				a.printf("%s\n", ref)
			}
			return err
		})
	})
}

// each calls fn for every reference, continues after failures and returns them together.
func each(refs []string, fn func(ref string) error) error {
	var errs []error
	for _, ref := range refs {
		errs = append(errs, fn(ref))
	}
	return errors.Join(errs...)
}

func (a *app) printf(format string, args ...any) {
	fmt.Fprintf(a.Stdout, format, args...)
}
