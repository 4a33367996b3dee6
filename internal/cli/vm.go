package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

func (a *app) vmCommand() *cobra.Command {
	return group("vm", "Run, look into and remove virtual machines",
		`  cocoon vm run --name web demo
  cocoon vm list
  cocoon vm logs -f web
  cocoon vm hibernate web && cocoon vm wake web
  cocoon vm stop web && cocoon vm rm web`,
		a.vmRunCommand(), a.vmCreateCommand(), a.vmCloneCommand(), a.vmHibernateCommand(), a.vmWakeCommand(), a.vmRestoreCommand(), a.vmStartCommand(), a.vmStopCommand(), a.vmRestartCommand(), a.vmRebootCommand(), a.vmPauseCommand(), a.vmUnpauseCommand(), a.vmRmCommand(),
		a.vmInspectCommand(), a.vmListCommand(), a.vmStatusCommand(), a.vmExecCommand(), a.vmAttachCommand(), a.vmForwardCommand(), a.vmLogsCommand(), a.vmConsoleCommand(), a.vmVNCCommand(), a.vmScreenshotCommand(),
		a.vmStatsCommand(), a.vmGuestInfoCommand(), a.vmDebugCommand(), a.vmVolumeCommand(), a.vmReleaseCommand(), a.vmAddContainerCommand(), a.vmStartContainerCommand(), a.vmRemoveContainerCommand(), a.vmResizeContainersCommand(), a.vmResizeCommand(),
		a.vmAttachVolumeCommand(), a.vmDetachVolumeCommand(), a.vmAttachNICCommand(), a.vmDetachNICCommand(), a.vmSetLinkCommand(), a.vmDumpMemoryCommand(), a.vmFirmwareCommand())
}

// A REF is a VM's name, its id, or a prefix of the id.
const refHelp = "\n\nREF is the name of a VM, its id, or the beginning of its id (three characters or more)."

func (a *app) vmStartCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "start REF...", Short: "Start VMs that do not run", Long: "Start VMs that do not run." + refHelp,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVMs,
	}
	textui.OutputFlag(cmd, &out)
	cmd.RunE = a.eachVM(&out, (*nodeclient.Client).Start)
	return cmd
}

func (a *app) vmStopCommand() *cobra.Command {
	return a.stopping("stop", "Stop VMs: ask the guest, wait for its grace period, then pull the plug", (*nodeclient.Client).Stop)
}

func (a *app) vmRestartCommand() *cobra.Command {
	var container string
	var run int
	cmd := a.stopping("restart", "Stop VMs, or one container of them, and start them again",
		func(c *nodeclient.Client, ctx context.Context, ref string, grace time.Duration) (vm.Record, error) {
			switch {
			case container == "" && run != 0:
				return vm.Record{}, errdefs.Invalidf("--run is of a container; name it with --container")
			case container == "":
				return c.Restart(ctx, ref, grace)
			}
			if err := c.KillContainer(ctx, ref, container, run, grace); err != nil {
				return vm.Record{}, err
			}
			return c.Inspect(ctx, ref)
		})
	cmd.Example += "\n  cocoon vm restart --container proxy web"
	cmd.Flags().StringVarP(&container, "container", "c", "", "restart this one of several containers alone, as the VM's restart policy and the back-off say")
	cmd.Flags().IntVar(&run, "run", 0, "only when the container is in this run, counted from 1")
	cmd.Flags().Lookup("run").Hidden = true
	return cmd
}

func (a *app) vmRebootCommand() *cobra.Command {
	var out textui.Format
	var hard bool
	cmd := &cobra.Command{
		Use: "reboot REF...", Short: "Have guests that boot themselves start again",
		Long: `Have guests that boot themselves start again, in the same process and with the same disks. A guest shuts down in order first. With --hard
it is reset at once and loses what it has not written. The command ends when that has begun. The guest of a container image is for "cocoon vm restart".` + refHelp,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVMs,
	}
	cmd.Flags().BoolVar(&hard, "hard", false, "do not ask, reset")
	textui.OutputFlag(cmd, &out)
	cmd.RunE = a.eachVM(&out, func(c *nodeclient.Client, ctx context.Context, ref string) (vm.Record, error) {
		return c.Reboot(ctx, ref, hard)
	})
	return cmd
}

func (a *app) vmPauseCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "pause REF...", Short: "Stop the CPUs of VMs until they are unpaused",
		Long: `Stop the CPUs of VMs until they are unpaused, also when cocoond restarts. A paused VM keeps its memory, disks and addresses.
Its guest answers nothing: exec is refused, and so are snapshots and hibernation. It can be stopped.` + refHelp,
		Example: "  cocoon vm pause web\n  cocoon vm unpause web",
		Args:    cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVMs,
	}
	textui.OutputFlag(cmd, &out)
	cmd.RunE = a.eachVM(&out, (*nodeclient.Client).Pause)
	return cmd
}

func (a *app) vmUnpauseCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "unpause REF...", Short: "Let paused VMs continue", Long: "Let paused VMs continue, or begin if they were started paused." + refHelp,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVMs,
	}
	textui.OutputFlag(cmd, &out)
	cmd.RunE = a.eachVM(&out, (*nodeclient.Client).Unpause)
	return cmd
}

func (a *app) stopping(verb, short string, op func(*nodeclient.Client, context.Context, string, time.Duration) (vm.Record, error)) *cobra.Command {
	var out textui.Format
	var grace time.Duration
	var now bool
	cmd := &cobra.Command{
		Use: verb + " REF...", Short: short, Long: short + "." + refHelp,
		Example: fmt.Sprintf("  cocoon vm %[1]s web\n  cocoon vm %[1]s --grace 5s web db\n  cocoon vm %[1]s --now web", verb),
		Args:    cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVMs,
	}
	cmd.Flags().DurationVar(&grace, "grace", 0, "time for the guest to stop (default: what the VM was created with)")
	cmd.Flags().Var((*textui.Seconds)(&grace), "timeout", "the same as --grace; a number without a unit is in seconds")
	cmd.Flags().BoolVar(&now, "now", false, "do not ask, kill")
	cmd.Flags().BoolVar(&now, "force", false, "the same as --now")
	cmd.MarkFlagsMutuallyExclusive("grace", "timeout", "now", "force")
	textui.OutputFlag(cmd, &out)
	cmd.RunE = func(cmd *cobra.Command, refs []string) error {
		if grace < 0 {
			return errdefs.Invalidf("--grace %s is negative", grace)
		}
		g := grace
		if !now && !cmd.Flags().Changed("grace") && !cmd.Flags().Changed("timeout") {
			g = -1
		}
		if now {
			g = 0
		}
		return a.eachVM(&out, func(c *nodeclient.Client, ctx context.Context, ref string) (vm.Record, error) {
			return op(c, ctx, ref, g)
		})(cmd, refs)
	}
	return cmd
}

// eachVM makes a RunE that calls op with every reference and prints the name, or the record, of each.
func (a *app) eachVM(out *textui.Format, op func(*nodeclient.Client, context.Context, string) (vm.Record, error)) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, refs []string) error {
		return a.withClient(func(c *nodeclient.Client) error {
			return each(refs, func(ref string) error {
				r, err := op(c, cmd.Context(), ref)
				if err != nil {
					return err
				}
				if *out == textui.FormatJSON {
					return textui.PrintJSON(a.Stdout, nodejson.FromRecord(r))
				}
				a.printf("%s\n", r.Spec.Name)
				return nil
			})
		})
	}
}

func (a *app) vmRmCommand() *cobra.Command {
	var out textui.Format
	var force bool
	cmd := &cobra.Command{
		Use: "rm REF...", Aliases: []string{"remove"}, Short: "Remove VMs with their disks",
		Long: "Remove VMs with their disks. A VM that runs is refused unless --force is given, which kills it.\n" +
			"With -o json what is printed of a VM is what it was before." + refHelp,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVMs,
		RunE: func(cmd *cobra.Command, refs []string) error {
			a.exits = true
			if out == textui.FormatJSON {
				return a.eachVM(&out, func(c *nodeclient.Client, ctx context.Context, ref string) (vm.Record, error) {
					r, err := c.Inspect(ctx, ref)
					if err != nil {
						return r, err
					}
					return r, c.RemoveThenExit(ctx, string(r.ID), force)
				})(cmd, refs)
			}
			return a.removing(func(ctx context.Context, c *nodeclient.Client, ref string) error {
				return c.RemoveThenExit(ctx, ref, force)
			})(cmd, refs)
		},
	}
	textui.OutputFlag(cmd, &out)
	cmd.Flags().BoolVarP(&force, "force", "f", false, "remove running VMs too")
	return cmd
}

func (a *app) vmInspectCommand() *cobra.Command {
	return &cobra.Command{
		Use: "inspect REF", Short: "Print everything known of one VM as JSON", Long: "Print everything known of one VM as JSON." + refHelp,
		Example: "  cocoon vm inspect web | jq -r .network_configs[0].address.ip",
		Args:    cobra.ExactArgs(1), ValidArgsFunction: a.completeVMs,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			r, err := c.Inspect(ctx, args[0])
			if err != nil {
				return err
			}
			return textui.PrintJSON(a.Stdout, nodejson.FromRecord(r))
		}),
	}
}

func (a *app) vmListCommand() *cobra.Command {
	var out textui.Format
	var quiet bool
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls", "ps"}, Short: "List VMs", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.list(cmd.Context(), nil, out, quiet) },
	}
	textui.OutputFlag(cmd, &out)
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "ids only")
	return cmd
}

// list prints the VMs of refs, or all if there are none.
func (a *app) list(ctx context.Context, refs []string, out textui.Format, quiet bool) error {
	return a.withClient(func(c *nodeclient.Client) error {
		all, err := records(ctx, c, refs)
		switch {
		case err != nil:
			return err
		case quiet:
			for _, r := range all {
				a.printf("%s\n", r.ID)
			}
			return nil
		case out == textui.FormatJSON:
			list := make([]nodejson.VM, len(all)) // prints [] when empty, never null
			for i, r := range all {
				list[i] = nodejson.FromRecord(r)
			}
			return textui.PrintJSON(a.Stdout, list)
		}
		return a.printVMs(all)
	})
}

// records returns the VMs of refs, or all if there are none.
func records(ctx context.Context, c *nodeclient.Client, refs []string) (all []vm.Record, err error) {
	if len(refs) == 0 {
		return c.List(ctx)
	}
	err = each(refs, func(ref string) error {
		r, err := c.Inspect(ctx, ref)
		all = append(all, r)
		return err
	})
	return all, err
}

func (a *app) printVMs(all []vm.Record) error {
	now := time.Now()
	rows := make([][]string, len(all))
	for i, r := range all {
		rows[i] = []string{
			r.Owner.Qualify(r.Spec.Name), string(r.ID)[:min(12, len(r.ID))], stateWord(r), r.Spec.Image,
			strconv.Itoa(r.Spec.CPUs), textui.FormatSize(r.Spec.Memory), addresses(r), textui.Age(now, r.CreatedAt),
		}
	}
	return textui.PrintTable(a.Stdout, []string{"NAME", "ID", "STATE", "IMAGE", "CPU", "MEMORY", "IP", "AGE"}, rows)
}

// stateWord returns the state with its most important detail.
func stateWord(r vm.Record) string {
	switch {
	case r.State == vm.StateRunning && r.Paused != "":
		return "running (paused)"
	case r.State == vm.StateRunning && nodejson.Resuming(r):
		return "running (resuming)"
	case r.State == vm.StateRunning && r.ImageType == vm.ImageOCI && !r.AgentReady:
		return "running (booting)"
	case r.State == vm.StateStopped && r.ExitCode != nil:
		return fmt.Sprintf("stopped (%d)", *r.ExitCode)
	case r.State == vm.StateStopped && r.Reason == vm.ReasonCrashed:
		return "stopped (crashed)"
	}
	return string(r.State)
}

func addresses(r vm.Record) string {
	var ips []string
	for _, n := range r.NICs {
		if n.IP != "" {
			ips = append(ips, n.IP)
		}
	}
	return strings.Join(ips, ",")
}

func (a *app) vmStatusCommand() *cobra.Command {
	var out textui.Format
	var events bool
	var after int64
	cmd := &cobra.Command{
		Use: "status [REF...]", Short: "List VMs, or follow what happens to them",
		Long: `List VMs, or with --event follow what happens to them, until interrupted. Without REF: all VMs.

First comes every VM there is as ADDED, then each change. With --format json every event is one line:
{"event":"ADDED|MODIFIED|DELETED","vm":{...},"revision":N}. To go on after an interruption without missing anything,
give the last revision seen to --after. A REF of --event may be of a VM to come.` + refHelp,
		Example:           "  cocoon vm status --event --format json\n  cocoon vm status web db",
		ValidArgsFunction: a.completeVMs,
		RunE: func(cmd *cobra.Command, refs []string) error {
			if events {
				return a.events(cmd.Context(), refs, out, after)
			}
			return a.list(cmd.Context(), refs, out, false)
		},
	}
	textui.OutputFlag(cmd, &out)
	cmd.Flags().BoolVar(&events, "event", false, "follow changes")
	cmd.Flags().Int64Var(&after, "after", -1, "with --event: only changes after this revision")
	return cmd
}

func (a *app) events(ctx context.Context, refs []string, out textui.Format, after int64) error {
	return a.withClient(func(c *nodeclient.Client) error {
		enc := json.NewEncoder(a.Stdout)
		enc.SetEscapeHTML(false)
		return c.Watch(ctx, after, func(e vm.Event) error {
			r := e.Record
			if len(refs) > 0 && !slices.ContainsFunc(refs, vm.Named{ID: r.ID, Name: r.Spec.Name, Owner: r.Owner}.Is) {
				return nil
			}
			if out == textui.FormatJSON {
				return enc.Encode(nodejson.Event{Event: e.Type, VM: nodejson.FromRecord(r), Revision: e.Revision})
			}
			a.printf("%s  %-8s  %-30s  %-20s  %s\n", r.UpdatedAt.Local().Format(time.TimeOnly), e.Type, r.Spec.Name, stateWord(r), r.Message)
			return nil
		})
	})
}

func (a *app) vmStatsCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "stats [REF...]", Short: "Show what guests use", Long: "Show what guests use, as their own kernels see it. Without REF: of every VM whose agent answers." + refHelp,
		ValidArgsFunction: a.completeVMs,
		RunE:              func(cmd *cobra.Command, refs []string) error { return a.stats(cmd.Context(), refs, out) },
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) stats(ctx context.Context, refs []string, out textui.Format) error {
	return a.withClient(func(c *nodeclient.Client) error {
		if len(refs) == 0 {
			all, err := c.List(ctx)
			if err != nil {
				return err
			}
			for _, r := range all {
				if r.State == vm.StateRunning && r.AgentReady {
					refs = append(refs, r.Spec.Name)
				}
			}
		}
		list := []nodejson.Stats{}
		err := each(refs, func(ref string) error {
			s, err := c.Stats(ctx, ref)
			if err == nil {
				list = append(list, nodejson.FromStats(ref, s))
			}
			return err
		})
		if err != nil {
			return err
		}
		if out == textui.FormatJSON {
			return textui.PrintJSON(a.Stdout, list)
		}
		rows := make([][]string, len(list))
		for i, s := range list {
			rows[i] = []string{
				s.Name, strconv.FormatFloat(s.CPUSeconds, 'f', 1, 64) + "s", strconv.FormatFloat(s.LoadAverage1, 'f', 2, 64),
				textui.FormatSize(s.MemoryUsed) + " / " + textui.FormatSize(s.MemoryTotal), textui.FormatSize(s.DiskUsed) + " / " + textui.FormatSize(s.DiskTotal),
				textui.FormatSize(s.NetworkRxBytes) + " / " + textui.FormatSize(s.NetworkTxBytes), strconv.Itoa(s.Processes),
			}
		}
		return textui.PrintTable(a.Stdout, []string{"NAME", "CPU TIME", "LOAD", "MEMORY", "DISK", "NET RX/TX", "PROCESSES"}, rows)
	})
}
