// Package cocoond is the node daemon: configuration, construction and the run group of everything it serves.
//
// It only wires and makes no decisions: the engine handles VMs, the doors handle clients.
package cocoond

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/logging"
	"cocoonstack.io/cocoon/internal/settings"
	"cocoonstack.io/cocoon/internal/version"
)

// Main runs cocoond with args (without the program's name) until it is done or ctx ends, and returns the exit code.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if isInit(os.Args[0], args) {
		return runInit(stderr) //nolint:contextcheck // its work ends with the machine
	}
	if code, ok := helper(args); ok { //nolint:contextcheck // it outlives its daemon, and so the signals to it
		return code
	}
	cmd := command(stderr) //nolint:contextcheck // cobra hands ctx to the commands
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	err := cmd.ExecuteContext(ctx)
	switch {
	case err == nil:
		return 0
	case errdefs.IsInvalid(err):
		fmt.Fprintf(stderr, "Error: %v\n", err)
		return 2
	}
	fmt.Fprintf(stderr, "Error: %v\n", err)
	return 1
}

const long = `cocoond owns the virtual machines of this host and serves the node API that cocoon talks to.

It needs root. VMs are processes of their own: stopping, killing or upgrading cocoond does not touch them; the next
cocoond takes them up again. "cocoond shutdown" ends them and takes the network down.

Each setting is a flag, an environment variable or a key of the YAML file given by --config. A flag wins over the
variable, and the variable over the file. A dot in a key leads into a group: log.level is {log: {level: …}}. Only the
file has these:

`

// recentLog is the number of bytes of the log that are kept for operators of an appliance.
const recentLog = 1 << 20

const examples = `  cocoond                                        # the machine's daemon
  cocoond --config /etc/cocoon/cocoond.yaml
  cocoond --state-dir /tmp/c/state --run-dir /tmp/c/run --netns test    # one of your own
  cocoond --driver fake                          # no guests, thousands of VMs`

func command(stderr io.Writer) *cobra.Command {
	var cfg Config
	all := cfg.settings()
	set := settings.New("cocoond", "COCOOND_CONFIG", all)
	root := &cobra.Command{
		Use: "cocoond", Short: "The node daemon of Cocoon", Long: long + settings.Unflagged(all), Example: examples,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true, Version: version.Version,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	set.Flags(root.PersistentFlags())
	root.Flags().SortFlags = false
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return errdefs.As(errdefs.InvalidArgument, err) })

	// prepare reads the settings and makes the daemon, which does nothing yet.
	prepare := func() (*daemon, error) {
		if err := set.Read(os.Getenv); err != nil {
			return nil, err
		}
		if err := cfg.complete(); err != nil {
			return nil, err
		}
		cfg.recent = logging.NewRing(recentLog)
		log, err := logging.New(io.MultiWriter(stderr, cfg.recent), cfg.Log.Level, cfg.Log.Format)
		if err != nil {
			return nil, err
		}
		return newDaemon(cfg, log)
	}
	var older bool
	root.Flags().BoolVar(&older, "older-journal", false, "go on from a journal that is older than what is known of it, such as a backup; VMs that it does not know are kept aside")
	root.RunE = func(cmd *cobra.Command, _ []string) error {
		d, err := prepare()
		if err != nil {
			return err
		}
		d.cfg.olderJournal = older
		return d.run(cmd.Context())
	}
	root.AddCommand(shutdownCommand(prepare), recoverCommand(prepare), installCommand(stderr))
	return root
}

func shutdownCommand(prepare func() (*daemon, error)) *cobra.Command {
	grace := time.Duration(-1)
	cmd := &cobra.Command{
		Use:   "shutdown",
		Short: "End every VM of a cocoond that is not running, and take its network down",
		Long: `End every VM of a cocoond that is not running any more, and take its network down. CSI drivers unmount the volumes of pods.
Disks, images and records stay: the VMs can be started again. Give it the same configuration as the daemon.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d, err := prepare()
			if err != nil {
				return err
			}
			return d.shutdown(cmd.Context(), grace)
		},
	}
	cmd.Flags().DurationVar(&grace, "grace", 10*time.Second, "time for each guest to stop before it is killed")
	return cmd
}

// logFailure logs an error that cannot be returned any more.
func logFailure(log *slog.Logger, msg string, err error) {
	if err != nil {
		log.Error(msg, "err", err) //nolint:sloglint // msg is a constant of every caller
	}
}
