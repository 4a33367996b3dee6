package capsulectl

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulectl/manifest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/textui"
)

const (
	mib      = 1 << 20
	pollTime = 500 * time.Millisecond
)

type application struct {
	files  []string
	dryRun bool
	wait   bool
	limit  time.Duration
}

func (a *app) applyCommand() *cobra.Command {
	var o application
	cmd := &cobra.Command{
		Use: "apply -f FILE", Short: "Create or change workloads and volumes as files describe them", Args: cobra.NoArgs,
		Long: `Create or change workloads and volumes as files describe them. A file has one or more documents, separated by ---, each with
name, kind (Container, MicroVM or Volume) and what belongs to the kind. All of them are read before the first is applied; volumes come
first. Applying the same again changes nothing.

--dry-run asks the machine what would change, and changes nothing. --wait waits until the workloads are ready, or have completed.`,
		Example: "  capsulectl apply -f web.yaml --dry-run\n  capsulectl apply -f web.yaml --wait\n  generate | capsulectl apply -f -",
		RunE: a.calling(func(ctx context.Context, c *client, _ []string) error {
			return a.apply(ctx, c, o)
		}),
	}
	f := cmd.Flags()
	f.StringArrayVarP(&o.files, "filename", "f", nil, "`FILE` with manifests, - for standard input; may be repeated")
	f.BoolVar(&o.dryRun, "dry-run", false, "show what would change")
	f.BoolVar(&o.wait, "wait", false, "wait until the workloads are ready")
	f.DurationVar(&o.limit, "timeout", 5*time.Minute, "how long to wait")
	_ = cmd.MarkFlagRequired("filename")
	cmd.MarkFlagsMutuallyExclusive("dry-run", "wait")
	return cmd
}

func (a *app) apply(ctx context.Context, c *client, o application) error {
	var all []manifest.Object
	for _, name := range o.files {
		data, err := a.readFile(name)
		if err != nil {
			return err
		}
		objects, err := manifest.Parse(data)
		if err != nil {
			return fmt.Errorf("%s:\n%w", name, err)
		}
		all = append(all, objects...)
	}
	slices.SortStableFunc(all, func(x, y manifest.Object) int { return order(x) - order(y) })
	var workloads []*capsulev1.Workload
	var coming []string // volumes that a dry run does not make
	for _, object := range all {
		what := object.Kind() + " " + object.Name()
		if v := object.Volume; v != nil {
			if err := a.applyVolume(ctx, c, v, o.dryRun); err != nil {
				return fmt.Errorf("apply %s: %w", what, err)
			}
			if o.dryRun {
				coming = append(coming, object.Name())
			}
			continue
		}
		answer, err := c.workloads().Apply(ctx, &capsulev1.WorkloadApplyRequest{Workload: object.Workload, DryRun: o.dryRun, ComingVolumes: coming})
		if err != nil {
			return fmt.Errorf("apply %s: %w", what, err)
		}
		a.printApplied(what, answer, o.dryRun)
		workloads = append(workloads, answer.GetWorkload())
	}
	if !o.wait {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, o.limit)
	defer cancel()
	for _, w := range workloads {
		if err := a.settled(ctx, c, w); err != nil {
			return err
		}
	}
	return nil
}

// order puts volumes before what uses them.
func order(o manifest.Object) int {
	if o.Volume != nil {
		return 0
	}
	return 1
}

// readFile reads a file, or standard input for -.
func (a *app) readFile(name string) ([]byte, error) {
	r := a.Stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, errdefs.New(errdefs.InvalidArgument, "read the manifest: %w", err)
		}
		defer f.Close()
		r = f
	}
	data, err := io.ReadAll(io.LimitReader(r, manifest.MaxSize+1))
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "read the manifest %s: %w", name, err)
	}
	return data, nil
}

func (a *app) printApplied(what string, answer *capsulev1.WorkloadApplyResponse, dryRun bool) {
	action := "applied" // by a server that does not say more
	switch answer.GetAction() {
	case capsulev1.ApplyAction_APPLY_ACTION_CREATED:
		action = "created"
	case capsulev1.ApplyAction_APPLY_ACTION_CHANGED:
		action = "changed"
	case capsulev1.ApplyAction_APPLY_ACTION_UNCHANGED:
		action = "unchanged"
	default:
	}
	a.printAction(what, action, dryRun)
	if answer.GetAction() == capsulev1.ApplyAction_APPLY_ACTION_CREATED {
		return
	}
	for _, change := range answer.GetChanges() {
		a.printf("  %s: %s -> %s\n", textui.Cell(change.GetPath()), orUnset(change.GetOld()), orUnset(change.GetNew()))
	}
}

func (a *app) printAction(what, action string, dryRun bool) {
	if dryRun {
		action += " (dry run)"
	}
	a.printf("%s: %s\n", what, action)
}

func orUnset(value string) string {
	if value == "" {
		return "(unset)"
	}
	return textui.Cell(value)
}

// applyVolume creates a volume, or grows it.
func (a *app) applyVolume(ctx context.Context, c *client, v *manifest.Volume, dryRun bool) error {
	what := "Volume " + v.Name
	now, err := c.volumes().Get(ctx, &capsulev1.VolumeGetRequest{Name: v.Name})
	switch {
	case errdefs.IsNotFound(err):
		if !dryRun {
			if _, err = c.volumes().Create(ctx, &capsulev1.VolumeCreateRequest{Name: v.Name, SizeMib: v.SizeMiB}); err != nil {
				return err
			}
		}
		a.printAction(what, "created", dryRun)
		return nil
	case err != nil:
		return err
	}
	has := now.GetSizeBytes() / mib
	switch {
	case v.SizeMiB == 0 || v.SizeMiB == has:
		a.printAction(what, "unchanged", dryRun)
		return nil
	case v.SizeMiB < has:
		return errdefs.Invalidf("it has %s already, and volumes do not shrink; write that, or leave the size out", size(now.GetSizeBytes()))
	case !dryRun:
		if _, err := c.volumes().Resize(ctx, &capsulev1.VolumeResizeRequest{Name: v.Name, NewSizeMib: v.SizeMiB}); err != nil {
			return err
		}
	}
	a.printAction(what, "changed", dryRun)
	a.printf("  size: %s -> %s\n", size(now.GetSizeBytes()), size(v.SizeMiB*mib))
	return nil
}

// settled waits until a workload is ready or has completed, as far as it was applied.
func (a *app) settled(ctx context.Context, c *client, applied *capsulev1.Workload) error {
	stop := textui.Waiting(ctx, a.Stderr, "waiting for "+applied.GetName())
	defer stop()
	why := "it has not begun"
	for {
		w, err := c.workloads().Get(ctx, &capsulev1.WorkloadGetRequest{Name: applied.GetName()})
		if err != nil && ctx.Err() == nil && !errdefs.Is(err, errdefs.DeadlineExceeded) {
			return fmt.Errorf("wait for %s: %w", applied.GetName(), err)
		}
		if err == nil {
			done, err := outcome(w, applied.GetGeneration())
			if done {
				return err
			}
			why = statusOf(w)
		}
		if err := a.Pause(ctx, pollTime); err != nil {
			return errdefs.New(errdefs.ClassOf(ctx.Err()), "%s is not ready: %s; `capsulectl workload logs %s` and `capsulectl workload events %s` may say why",
				applied.GetName(), why, applied.GetName(), applied.GetName())
		}
	}
}

// outcome reports whether a workload is as it was applied, or will not become so by itself.
func outcome(w *capsulev1.Workload, generation uint64) (done bool, err error) {
	s := w.GetStatus()
	if s.GetObservedGeneration() < generation {
		return false, nil
	}
	phase := s.GetPhase()
	switch {
	case s.GetReady():
		return true, nil
	case generation == 0 && phase == capsulev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING: // of a server that knows no readiness
		return true, nil
	case w.GetDesiredState() == capsulev1.DesiredState_DESIRED_STATE_STOPPED && phase == capsulev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED:
		return true, nil
	case s.GetReason() == "Completed" && phase == capsulev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED && s.GetExitCode() == 0:
		return true, nil
	case w.GetRestartPolicy() == capsulev1.RestartPolicy_RESTART_POLICY_NEVER && s.GetFinishedAtUnix() > 0 &&
		(phase == capsulev1.WorkloadPhase_WORKLOAD_PHASE_FAILED || phase == capsulev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED):
		return true, errdefs.Preconditionf("%s has ended: %s", w.GetName(), statusOf(w))
	}
	return false, nil
}

// statusOf says in a few words how a workload is.
func statusOf(w *capsulev1.Workload) string {
	s := w.GetStatus()
	text := short("WORKLOAD_PHASE_", s.GetPhase())
	if s.GetReason() != "" {
		text += ", " + textui.Cell(s.GetReason())
	}
	if s.GetMessage() != "" {
		text += ": " + textui.Cell(s.GetMessage())
	}
	return text
}
