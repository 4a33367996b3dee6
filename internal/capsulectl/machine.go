package capsulectl

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/textui"
)

const (
	updatePoll = 5 * time.Second
	updateWait = 15 * time.Minute // for the machine to come back
	skewShown  = 5 * time.Second  // a smaller difference of the clocks is not worth a word
	debugName  = "capsule-debug"
	debugWait  = 5 * time.Minute
	policyAuto = "auto"
	policyBoth = "both"
	debugImage = "docker.io/library/alpine:3.20"
)

func (a *app) capsuleCommand() *cobra.Command {
	update := group("update", "Replace the system of the machine", "  capsulectl capsule update push system.tar --auto-confirm=60", a.updatePushCommand(), a.updateConfirmCommand())
	return group("capsule", "The machine itself", "  capsulectl capsule info\n  capsulectl capsule logs -f",
		a.infoCommand(), a.capsuleLogsCommand(), a.auditCommand(), a.rebootCommand(), a.growDiskCommand(), update, a.debugCommand())
}

func (a *app) infoCommand() *cobra.Command {
	var out textui.Format
	cmd := &cobra.Command{
		Use: "info", Short: "Describe the machine", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			i, err := c.capsule().GetInfo(ctx, &capsulev1.GetInfoRequest{})
			switch {
			case err != nil:
				return err
			case out == textui.FormatJSON:
				return a.printMessage(i)
			}
			a.printInfo(c, i, time.Now())
			return nil
		}),
	}
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) printInfo(c *client, i *capsulev1.GetInfoResponse, now time.Time) {
	line := func(name, value string) {
		if value != "" {
			a.printf("%-16s %s\n", name, textui.Cell(value))
		}
	}
	part := func(used, total uint64) string {
		if total == 0 {
			return ""
		}
		return fmt.Sprintf("%s of %s used (%d%%)", size(used), size(total), int(100*float64(used)/float64(total)))
	}
	line("context", c.name)
	line("address", c.addr)
	line("hostname", i.GetHostname())
	line("short id", i.GetShortId())
	line("capsule id", i.GetCapsuleId())
	line("version", i.GetCapsuleVersion())
	line("active slot", i.GetActiveSlot())
	line("rolled back", i.GetRolledBackBecause())
	for text := range strings.Lines(i.GetRolledBackLog()) {
		line("", strings.TrimSuffix(text, "\n"))
	}
	if i.GetPendingSlot() != "" {
		left := time.Duration(i.GetPendingDeadlineUnix()-i.GetLocalTimeUnix()) * time.Second // both by the clock of the machine
		line("pending slot", fmt.Sprintf("%s, goes back in %s %s", i.GetPendingSlot(), max(left, 0), unless(i.GetPendingPolicy())))
		line("not yet", i.GetPendingFailing())
	}
	line("last version", i.GetLastVersion())
	line("kernel", i.GetKernelRelease()+" "+i.GetArchitecture())
	line("up", (time.Duration(min(i.GetUptimeSeconds(), 1<<31)) * time.Second).String()) //nolint:gosec // bounded
	if local := i.GetLocalTimeUnix(); local != 0 {
		text := stamp(local)
		if skew := time.Unix(local, 0).Sub(now).Round(time.Second); skew > skewShown || skew < -skewShown {
			text += fmt.Sprintf(" (%+d s from here)", int(skew.Seconds()))
		}
		line("time", text)
	}
	if i.GetCpuCores() > 0 {
		line("cpu", fmt.Sprintf("%d x %s", i.GetCpuCores(), i.GetCpuModel()))
	}
	line("micro-VMs", i.GetMicroVmsRun())
	line("memory", part(i.GetMemoryTotalBytes()-min(i.GetMemoryAvailableBytes(), i.GetMemoryTotalBytes()), i.GetMemoryTotalBytes()))
	if i.GetDiskTotalBytes() > 0 {
		text := size(i.GetDiskTotalBytes()) + " " + i.GetBootDisk()
		if more := i.GetDiskGrowableBytes(); more > 0 {
			text += fmt.Sprintf(", of which %s are not used: `capsulectl capsule grow-disk`", size(more))
		}
		line("disk", text)
	}
	line("state", part(i.GetPermUsedBytes(), i.GetPermTotalBytes()))
	line("volumes", part(i.GetThinpoolUsedBytes(), i.GetThinpoolTotalBytes()))
	line("volumes fault", i.GetVolumesFault())
	line("certificate", i.GetTlsFingerprintSha256())
}

// unless says what keeps an update that is on trial.
func unless(policy string) string {
	const confirm = "`capsulectl capsule update confirm`"
	switch policy {
	case policyAuto:
		return "unless everything works before"
	case policyBoth:
		return "without " + confirm + ", which works when everything does"
	}
	return "without " + confirm
}

// logFlags are those of both kinds of logs.
type logFlags struct {
	follow bool
	tail   int32
}

func (l *logFlags) add(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&l.follow, "follow", "f", false, "go on with what is written from now on")
	cmd.Flags().Int32VarP(&l.tail, "tail", "n", 0, "only so many of the last lines (default: all that are kept)")
}

func (a *app) capsuleLogsCommand() *cobra.Command {
	var l logFlags
	cmd := &cobra.Command{
		Use: "logs", Short: "Print the log of the machine's daemon", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			s, err := c.capsule().StreamLogs(ctx, &capsulev1.CapsuleLogsRequest{Follow: l.follow, TailLines: l.tail})
			if err != nil {
				return err
			}
			return writeAll(a.Stdout, s, (*capsulev1.CapsuleLogChunk).GetData)
		}),
	}
	l.add(cmd)
	return cmd
}

func (a *app) auditCommand() *cobra.Command {
	var tail int32
	var out textui.Format
	cmd := &cobra.Command{
		Use: "audit", Short: "List who changed what on the machine", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			answer, err := c.identity().Audit(ctx, &capsulev1.AuditRequest{Tail: tail})
			switch {
			case err != nil:
				return err
			case out == textui.FormatJSON:
				return printMessages(a, answer.GetEntries())
			}
			var table [][]string
			for _, e := range answer.GetEntries() {
				table = append(table, []string{stamp(e.GetTimeUnix()), e.GetName(), e.GetPeer(), e.GetMethod(), e.GetObject(), e.GetCode()})
			}
			return textui.PrintTable(a.Stdout, []string{"TIME", "OPERATOR", "FROM", "METHOD", "OBJECT", "RESULT"}, table)
		}),
	}
	cmd.Flags().Int32VarP(&tail, "tail", "n", 0, "only so many of the last entries (default: all that are kept)")
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) rebootCommand() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "reboot", Short: "Reboot the machine into the same slot", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			if !yes && textui.IsTerminal(a.Stdin) {
				if err := a.confirmed("All workloads of " + c.name + " stop while it reboots."); err != nil {
					return err
				}
			}
			answer, err := c.capsule().RebootNode(ctx, &capsulev1.RebootNodeRequest{})
			if err != nil {
				return err
			}
			a.printf("%s: %s\n", c.name, textui.Cell(answer.GetMessage()))
			return nil
		}),
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return cmd
}

func (a *app) growDiskCommand() *cobra.Command {
	var yes bool
	var out textui.Format
	cmd := &cobra.Command{
		Use: "grow-disk", Short: "Use the room that the machine's disk has behind its data", Args: cobra.NoArgs,
		Long: `Use the room that the machine's disk has behind its data, because the disk became larger or the system was copied to a larger
one: the last partition, the state and the pool of volumes grow. Workloads go on. It cannot be undone. When the machine
stops in between, its next start goes on with it.`,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			i, err := c.capsule().GetInfo(ctx, &capsulev1.GetInfoRequest{})
			if err != nil {
				return err
			}
			if more := i.GetDiskGrowableBytes(); more > 0 && !yes && textui.IsTerminal(a.Stdin) {
				if err := a.confirmed(fmt.Sprintf("The data of %s gets the last %s of %s for good. Whatever else is there will be lost.", c.name, size(more), textui.Cell(i.GetBootDisk()))); err != nil {
					return err
				}
			}
			answer, err := c.capsule().GrowDisk(ctx, &capsulev1.GrowDiskRequest{})
			switch {
			case err != nil:
				return fmt.Errorf("grow the disk of %s: %w", c.name, err)
			case out == textui.FormatJSON:
				return a.printMessage(answer)
			}
			a.printf("%s: %s more; the state has %s and the pool of volumes %s\n", c.name, size(answer.GetGrownBytes()), size(answer.GetPermTotalBytes()), size(answer.GetThinpoolTotalBytes()))
			return nil
		}),
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	textui.OutputFlag(cmd, &out)
	return cmd
}

func (a *app) updatePushCommand() *cobra.Command {
	var soak int
	var deadline time.Duration
	var about capsulev1.UpdateOSMetadata
	cmd := &cobra.Command{
		Use: "push BUNDLE", Short: "Write an update to the other slot, and boot it for a trial", Args: cobra.ExactArgs(1),
		Long: `Write an update to the slot that is not in use, and boot it for a trial. Without a confirmation the machine goes back to the
slot in use now. --auto-confirm waits until the machine is back, watches it for so many seconds, and confirms.

By the policy auto the machine confirms by itself, once its state, containerd, network and API work, and all workloads run that ran before. By the policy both
it takes your confirmation only then.`,
		Example: "  capsulectl capsule update push system.tar\n  capsulectl capsule update push system.tar --auto-confirm=60\n  capsulectl capsule update push system.tar --policy=auto --deadline=3m",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			if soak < 0 {
				return errdefs.Invalidf("--auto-confirm is a number of seconds")
			}
			if soak > 0 && about.Policy == policyAuto {
				return errdefs.Invalidf("--auto-confirm and --policy=auto exclude each other: with the policy, the machine confirms by itself")
			}
			about.DeadlineSeconds = uint32(deadline / time.Second) //nolint:gosec // the machine checks it
			answer, err := a.push(ctx, c, args[0], &about)
			if err != nil {
				return fmt.Errorf("update %s: %w", c.name, err)
			}
			a.printf("%s boots %s from %s.\n", c.name, textui.Cell(answer.GetNextVersion()), textui.Cell(answer.GetNextSlot()))
			if about.Policy == policyAuto {
				a.printf("It keeps that when everything works there, and goes back otherwise; `capsulectl --capsule %s capsule info` tells.\n", c.name)
				return nil
			}
			if soak == 0 {
				a.printf("Look at it, then run `capsulectl --capsule %s capsule update confirm`; otherwise it goes back.\n", c.name)
				return nil
			}
			if err := a.trial(ctx, c, answer.GetNextSlot(), soak); err != nil {
				return fmt.Errorf("update %s: %w", c.name, err)
			}
			return a.confirm(ctx, c)
		}),
	}
	cmd.Flags().StringVar(&about.Policy, "policy", "manual", "who keeps the update: manual, auto or both")
	cmd.Flags().DurationVar(&deadline, "deadline", 10*time.Minute, "when the machine goes back, after the start of the new system, at most and by default 10m")
	cmd.Flags().BoolVar(&about.AllowDowngrade, "allow-downgrade", false, "take a version that is older than the one that runs")
	cmd.Flags().IntVar(&soak, "auto-confirm", 0, "confirm when it has been up for so many `SECONDS`")
	return cmd
}

// push sends a bundle.
func (a *app) push(ctx context.Context, c *client, name string, about *capsulev1.UpdateOSMetadata) (*capsulev1.UpdateOSResponse, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "read the bundle: %w", err)
	}
	defer f.Close()
	hash := sha256.New()
	total, err := io.Copy(hash, f)
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "read the bundle: %w", err)
	}
	s, err := c.capsule().UpdateOS(ctx)
	if err != nil {
		return nil, err
	}
	about.TotalBytes, about.Sha256Hex = uint64(total), hex.EncodeToString(hash.Sum(nil)) //nolint:gosec // the length of a file
	err = s.Send(&capsulev1.UpdateOSRequest{Msg: &capsulev1.UpdateOSRequest_Metadata{Metadata: about}})
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	bar := textui.NewBar(a.Stderr, name, false)
	defer bar.Clear()
	counted := io.TeeReader(f, &textui.Counter{To: io.Discard, Seen: bar.Counter("sending", total)})
	err = sendAll(s, counted, func(b []byte) *capsulev1.UpdateOSRequest {
		return &capsulev1.UpdateOSRequest{Msg: &capsulev1.UpdateOSRequest_Chunk{Chunk: b}}
	})
	if err != nil {
		return nil, err
	}
	return s.CloseAndRecv()
}

// trial waits until the machine has booted the slot, and has been up for so many seconds.
func (a *app) trial(ctx context.Context, c *client, slot string, soak int) error {
	stop := textui.Waiting(ctx, a.Stderr, "waiting for "+c.name+" in "+slot)
	defer stop()
	back := 0
	for waited := time.Duration(0); ; waited += updatePoll {
		i, err := c.capsule().GetInfo(ctx, &capsulev1.GetInfoRequest{})
		if err == nil && i.GetActiveSlot() == slot {
			break
		}
		if err == nil && i.GetPendingSlot() == "" {
			back++ // it is up, and nothing is on trial
		}
		switch {
		case errdefs.Is(err, errdefs.Unauthenticated), errdefs.Is(err, errdefs.PermissionDenied):
			return err
		case back > 1:
			return errdefs.Preconditionf("it is in %s and no trial is open: the new system did not come up, and it went back; `capsulectl capsule logs` may say why",
				textui.Cell(i.GetActiveSlot()))
		case waited >= updateWait:
			return errdefs.New(errdefs.DeadlineExceeded, "it did not come back in %s within %v", slot, updateWait)
		}
		if err := a.Pause(ctx, updatePoll); err != nil {
			return err
		}
	}
	for watched := time.Duration(0); watched < time.Duration(soak)*time.Second; watched += updatePoll {
		if err := a.Pause(ctx, min(updatePoll, time.Duration(soak)*time.Second-watched)); err != nil {
			return err
		}
		i, err := c.capsule().GetInfo(ctx, &capsulev1.GetInfoRequest{})
		switch {
		case err != nil:
			return fmt.Errorf("the new system stopped answering, and is not confirmed: %w", err)
		case i.GetActiveSlot() != slot:
			return errdefs.Preconditionf("it left the new system for %s, which is not confirmed", textui.Cell(i.GetActiveSlot()))
		}
	}
	return nil
}

func (a *app) updateConfirmCommand() *cobra.Command {
	return &cobra.Command{
		Use: "confirm", Short: "Keep the system that is on trial, or that was started instead of the good one", Args: cobra.NoArgs,
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error { return a.confirm(ctx, c) }),
	}
}

func (a *app) confirm(ctx context.Context, c *client) error {
	answer, err := c.capsule().UpdateConfirm(ctx, &capsulev1.UpdateConfirmRequest{})
	if err != nil {
		return fmt.Errorf("confirm the system of %s: %w", c.name, err)
	}
	a.printf("%s keeps %s in %s.\n", c.name, textui.Cell(answer.GetCommittedVersion()), textui.Cell(answer.GetCommittedSlot()))
	return nil
}

func (a *app) debugCommand() *cobra.Command {
	var image string
	var keep bool
	cmd := &cobra.Command{
		Use: "debug [-- CMD...]", Short: "Open a shell on the machine, in a privileged container",
		Long: `Open a shell on the machine, in a privileged container called ` + debugName + `: it has the machine's network, processes and
devices, and the machine's root is at /host. It is deleted at the end, unless --keep is given.`,
		Example: "  capsulectl capsule debug\n  capsulectl capsule debug -- chroot /host dmesg",
		RunE: a.calling(func(ctx context.Context, c *client, args []string) error {
			if len(args) == 0 {
				args = []string{"/bin/sh"}
			}
			return a.debug(ctx, c, image, keep, args)
		}),
	}
	cmd.Flags().StringVarP(&image, "image", "i", debugImage, "image with the tools")
	cmd.Flags().BoolVar(&keep, "keep", false, "leave the container")
	return cmd
}

func (a *app) debug(ctx context.Context, c *client, image string, keep bool, command []string) (err error) {
	answer, err := c.workloads().Apply(ctx, &capsulev1.WorkloadApplyRequest{Workload: &capsulev1.Workload{
		Name: debugName, Kind: capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER,
		Container: &capsulev1.ContainerSpec{
			Image: image, Command: []string{"/bin/sh", "-c"}, Args: []string{"trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"},
			NetworkMode: capsulev1.NetworkMode_NETWORK_MODE_HOST, Privileged: true, HostPid: true, HostMount: true,
		},
	}})
	if err != nil {
		return fmt.Errorf("start the container %s: %w", debugName, err)
	}
	if !keep {
		defer func() {
			// The operator may have interrupted us.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTime)
			defer cancel()
			if _, gone := c.workloads().Delete(ctx, &capsulev1.WorkloadDeleteRequest{Name: debugName}); gone != nil {
				a.note("The container is still there; run `capsulectl workload delete %s`: %v", debugName, gone)
			}
		}()
	}
	wctx, cancel := context.WithTimeout(ctx, debugWait)
	defer cancel()
	if err := a.settled(wctx, c, answer.GetWorkload()); err != nil {
		return err
	}
	return a.exec(ctx, c, execution{name: debugName, command: command, tty: textui.IsTerminal(a.Stdin), stdin: true})
}
