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
	"github.com/spf13/pflag"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/logging"
	"cocoonstack.io/cocoon/internal/version"
)

// Main runs cocoond with args (without the program's name) until it is done or ctx ends, and returns the exit code.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
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

Everything can be set in a YAML file, with these keys (defaults in parentheses); the environment variables
VIRTLET_DOWNLOAD_PROTOCOL and IMAGE_REGEXP_TRANSLATION win over the file, and flags over both:

  stateDir, runDir, socket, group      folders, socket and who may use it (/var/lib/cocoon, /run/cocoon, cocoon)
  listen, tls: {cert, key, clientCA}   the node API on TCP, for clients with a certificate of clientCA (off)
  peer: {ca, cert, key}                snapshots from other nodes' listen, with a certificate that their clientCA signed (off)
  metricsAddr                          Prometheus metrics on loopback (off)
  driver                               qemu, or fake for scale tests (qemu)
  guest: {kernel, initramfs}           what container images boot with (guest/ beside the binary)
  guest: {silenceSeconds}              how long a guest may not answer before calls into it end (60)
  qemu: {binary, cgroup, uidBase, uidCount, tbSize}
  network: {enabled, mode, name, instance, bridge, adopt, subnet, gateway, subnet6, ipv6Mode, netns, dns, search, routes, mtu,
    nat, masqueradeLink, isolation, closed, open, leases, cni: {confDir, binDirs, default, exclusive}}
  images: {mappings, downloadProtocol, regexpTranslation, registries: {HOST: {mirrors, ca, insecure}}, maxParallelPulls,
    stallTimeout, allow, privateRegistries, pullCredentialsVerification, gc: {interval, minAge, maxAge, maxSize, high, low}}
                                       where images come from (/etc/cocoon/images.d, https, no, none, 4, 30s) and when
                                       unused ones go (every 5m those older than 2m, when the disk is 85% full, to 80%)
  cloneDirs                            folders with exported snapshots that pods of all namespaces may clone from (none)
  virtualNode: {kubeconfig, nodeName, nodeIP, pool, bindAddress, kubeletPort, tlsCert, tlsKey, clientCA, orphans, …}
                                       a Kubernetes node in this process, as vk-cocoon is one of its own (off)
  log: {level, format}                 (info, text)
`

const examples = `  cocoond                                        # the machine's daemon
  cocoond --config /etc/cocoon/cocoond.yaml
  cocoond --state-dir /tmp/c/state --run-dir /tmp/c/run --netns test    # one of your own
  cocoond --driver fake                          # no guests, thousands of VMs`

func command(stderr io.Writer) *cobra.Command {
	var flags Config
	var path string
	root := &cobra.Command{
		Use: "cocoond", Short: "The node daemon of Cocoon", Long: long, Example: examples,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true, Version: version.Version,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.PersistentFlags().StringVar(&path, "config", "", "YAML file with the configuration")
	flags.flags(root.PersistentFlags())
	root.PersistentFlags().SortFlags = false
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return errdefs.As(errdefs.InvalidArgument, err) })

	// prepare merges file and flags and makes the daemon, which does nothing yet.
	prepare := func(cmd *cobra.Command) (*daemon, error) {
		cfg, err := load(path)
		if err != nil {
			return nil, err
		}
		cfg.environment(os.Getenv)
		if err := override(&cfg, cmd.Flags()); err != nil {
			return nil, err
		}
		if err := cfg.complete(); err != nil {
			return nil, err
		}
		log, err := logging.New(stderr, cfg.Log.Level, cfg.Log.Format)
		if err != nil {
			return nil, err
		}
		return newDaemon(cfg, log)
	}
	var older bool
	root.Flags().BoolVar(&older, "older-journal", false, "go on from a journal that is older than what is known of it, such as a backup; VMs that it does not know are kept aside")
	root.RunE = func(cmd *cobra.Command, _ []string) error {
		d, err := prepare(cmd)
		if err != nil {
			return err
		}
		d.cfg.olderJournal = older
		return d.run(cmd.Context())
	}
	root.AddCommand(shutdownCommand(prepare), recoverCommand(prepare))
	return root
}

// override parses the given flags again, into cfg: flags that were not given leave the value of the file.
func override(cfg *Config, given *pflag.FlagSet) error {
	over := pflag.NewFlagSet("", pflag.ContinueOnError)
	file := *cfg
	cfg.flags(over) // sets every bound field to its empty default
	*cfg = file
	var err error
	given.Visit(func(f *pflag.Flag) {
		if o := over.Lookup(f.Name); o != nil && err == nil {
			err = o.Value.Set(f.Value.String())
		}
	})
	return err
}

func shutdownCommand(prepare func(*cobra.Command) (*daemon, error)) *cobra.Command {
	grace := time.Duration(-1)
	cmd := &cobra.Command{
		Use:   "shutdown",
		Short: "End every VM of a cocoond that is not running, and take its network down",
		Long: `End every VM of a cocoond that is not running any more, and take its network down. Disks, images and records stay:
the VMs can be started again. Give it the same configuration as the daemon.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d, err := prepare(cmd)
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
