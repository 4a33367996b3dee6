package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/vm"
)

// The methods to take memory. QEMU's background-snapshot is not used, for three reasons. Its pause is not shorter than that of
// precopy. An unprivileged process may use it only if the host's vm.unprivileged_userfaultfd allows it. If its reader goes away
// in the middle (a full disk, a killed daemon), the guest hangs for ever. For emulated guests its pause would be shorter, but
// the other two reasons hold.
const (
	methodPrecopy = "precopy" // saves pages while the guest runs, changed pages again, and the last ones while it is paused
	methodStopped = "stopped" // the guest is paused until everything is saved
)

// save is one Save in progress.
type save struct {
	i    *instance
	plan hypervisor.SavePlan
	c    *qmp.Client
	ear  *ear

	running bool // the guest ran before the save
	kvm     bool
	disks   disks
	files   []*os.File // memory and state
	base    *os.File   // the memory that the new one may be a delta to; nil: none
	flow    *flow
	method  string
	pause   time.Duration
	stopped time.Time // time of a STOP event that no RESUME has followed yet
}

// abortLimit bounds the rollback to a running guest.
const abortLimit = 30 * time.Second

// Save implements hypervisor.Snapshotter.
func (i *instance) Save(ctx context.Context, p hypervisor.SavePlan) (hypervisor.Saved, error) {
	s := &save{i: i, plan: p, ear: i.listen()}
	defer i.deafen(s.ear)
	saved, err := s.run(ctx)
	if s.base != nil {
		_ = s.base.Close()
	}
	if err != nil {
		err = errors.Join(i.OrEnded(err), s.discard())
		return hypervisor.Saved{}, fmt.Errorf("save VM %s: %w", i.h.ID, err)
	}
	return saved, nil
}

func (s *save) run(ctx context.Context) (saved hypervisor.Saved, err error) {
	if s.plan.State == "" || s.plan.Memory == "" || s.plan.State == s.plan.Memory {
		return saved, errdefs.Invalidf("state and memory need separate files")
	}
	if s.c, err = s.i.connected(ctx); err != nil {
		return saved, err
	}
	if err := s.look(ctx); err != nil {
		return saved, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.abort(ctx))
		}
	}()
	s.disks = disks{pid: s.i.h.PID, c: s.c}
	for _, step := range []func(context.Context) error{s.makeFiles, s.prepare, s.take, s.finish} {
		if err := step(ctx); err != nil {
			return saved, err
		}
	}
	return s.result(), nil
}

// look checks the run state of the guest.
func (s *save) look(ctx context.Context) error {
	now, err := status(ctx, s.c)
	if err != nil {
		return err
	}
	switch now {
	case "running":
		s.running = true
	case "paused", "prelaunch":
	case "postmigrate":
		return errdefs.Preconditionf("it was saved and is still paused; resume it, or end it")
	default:
		return errdefs.Preconditionf("its state is %q; only a running or paused guest can be saved", now)
	}
	var kvm struct {
		Enabled bool `json:"enabled"`
	}
	err = s.c.Execute(ctx, "query-kvm", nil, &kvm)
	s.kvm = kvm.Enabled
	return err
}

func (s *save) makeFiles(context.Context) error {
	for _, path := range []string{s.plan.Memory, s.plan.State} {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return fmt.Errorf("make a file for the state: %w", err)
		}
		s.files = append(s.files, f)
	}
	if s.plan.Base == "" {
		return nil
	}
	var err error
	s.base, err = jail.OpenData(s.plan.Base, "", false)
	return err
}

// prepare does everything that is possible while the guest runs.
func (s *save) prepare(ctx context.Context) error {
	if err := s.disks.prepare(ctx, s.plan.Overlays); err != nil {
		return err
	}
	if s.disks.inUse && s.running {
		return errdefs.Preconditionf("a new overlay is already in use, and the guest has run since; make another overlay on top of it")
	}
	s.method = methodStopped
	if s.running && !s.plan.Hold && s.tracked() {
		s.method = methodPrecopy
	}
	if err := s.allow(ctx, s.method); err != nil {
		return err
	}
	// As fast as we can read. downtime-limit is how long the guest may be paused; steady raises it for a guest that writes
	// faster.
	return s.c.Execute(ctx, "migrate-set-parameters", props{"max-bandwidth": int64(1) << 40, "downtime-limit": 20}, nil)
}

// tracked reports whether QEMU records every page that the guest changes during the save. For emulated guests it does not:
// before QEMU 9.0 the emulator keeps writing to pages that the migration has just marked clean (fixed there by commit
// 03bfc2188f, "physmem: Fix migration dirty bitmap coherency with TCG memory access"; its author knows of further races). A
// guest that resumes from such a snapshot would have a page older than the rest.
func (s *save) tracked() bool { return s.kvm || s.i.d.trustEmulator }

// allow switches on the capabilities that method needs and switches off those of the other method.
func (s *save) allow(ctx context.Context, method string) error {
	return capabilities(ctx, s.c, map[string]bool{
		"events": true, "pause-before-switchover": method == methodPrecopy,
	})
}

// take saves disks, devices and memory of one instant.
func (s *save) take(ctx context.Context) error {
	if s.method == methodPrecopy {
		return s.takePrecopy(ctx)
	}
	return s.takeStopped(ctx)
}

func (s *save) takeStopped(ctx context.Context) error {
	if err := s.stop(ctx); err != nil {
		return err
	}
	if err := s.change(ctx); err != nil {
		return err
	}
	ctx, err := s.migrate(ctx)
	if err != nil {
		return err
	}
	if err := s.until(ctx, "completed"); err != nil {
		return err
	}
	if s.running && !s.plan.Hold {
		return s.goOn(ctx)
	}
	s.taken()
	return nil
}

// change is the instant of the save: the guest is paused, and QEMU has flushed its disks.
func (s *save) change(ctx context.Context) error {
	if err := s.disks.change(ctx); err != nil {
		return err
	}
	if s.plan.Still == nil {
		return nil
	}
	return s.plan.Still(ctx)
}

func (s *save) stop(ctx context.Context) error {
	if !s.running {
		return nil
	}
	if err := s.c.Execute(ctx, "stop", nil, nil); err != nil {
		return err
	}
	return s.until(ctx, "STOP")
}

func (s *save) takePrecopy(ctx context.Context) error {
	ctx, err := s.migrate(ctx)
	if err != nil {
		return err
	}
	if err := s.until(ctx, "pre-switchover"); err != nil {
		return err
	}
	if err := s.change(ctx); err != nil {
		return err
	}
	if err := s.c.Execute(ctx, "migrate-continue", props{"state": "pre-switchover"}, nil); err != nil {
		return err
	}
	if err := s.until(ctx, "completed"); err != nil {
		return err
	}
	return s.goOn(ctx)
}

func (s *save) goOn(ctx context.Context) error {
	if err := cont(ctx, s.c); err != nil {
		return err
	}
	err := s.until(ctx, resumed)
	s.taken()
	return err
}

func (s *save) taken() {
	if s.plan.Taken != nil {
		s.plan.Taken()
	}
}

// migrate starts the stream. The returned context ends if the stream fails.
func (s *save) migrate(ctx context.Context) (context.Context, error) {
	const name = "save"
	var w *os.File
	var err error
	ctx, s.flow, w, err = newFlow(ctx, s.files[0], s.base, s.files[1])
	if err != nil {
		return ctx, err
	}
	err = s.c.ExecuteFile(ctx, "getfd", props{"fdname": name}, nil, w)
	_ = w.Close() // QEMU has its own copy
	if err != nil {
		return ctx, err
	}
	if err := s.c.Execute(ctx, "migrate", props{"uri": "fd:" + name}, nil); err != nil {
		return ctx, errors.Join(err, s.c.Execute(ctx, "closefd", props{"fdname": name}, nil))
	}
	return ctx, nil
}

const resumed = "RESUME"

// until waits for an event or for a migration status.
func (s *save) until(ctx context.Context, want string) error {
	for {
		ev, err := s.ear.next(ctx, s.c)
		if err != nil {
			if ctx.Err() != nil {
				err = context.Cause(ctx) // our side of the stream may have failed
			}
			return err
		}
		got := ev.Name
		switch ev.Name {
		case "STOP":
			s.stopped = ev.Time
		case resumed:
			if !s.stopped.IsZero() {
				s.pause += ev.Time.Sub(s.stopped)
				s.stopped = time.Time{}
			}
		case "MIGRATION_PASS":
			if err := s.steady(ctx, ev); err != nil {
				return err
			}
		case "MIGRATION":
			got = migrationStatus(ev)
		}
		if got == want {
			return nil
		}
		if s.flow != nil && (got == "failed" || got == "cancelled") {
			return s.why(ctx, got)
		}
	}
}

// why explains why a migration failed. If our side of the stream broke, that is the reason.
func (s *save) why(ctx context.Context, status string) error {
	if err := s.flow.wait(ctx); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) { // QEMU has closed it, or will soon
		return err
	}
	_, desc, err := migrating(ctx, s.c)
	if err != nil {
		return err
	}
	if desc == "" {
		desc = "no reason given"
	}
	return errdefs.Unsupportedf("QEMU ended the save with status %s: %s", status, desc)
}

// steady handles a guest that changes its memory faster than it is saved: it allows a longer pause, and finally stops the
// guest.
func (s *save) steady(ctx context.Context, ev qmp.Event) error {
	var data struct {
		Pass int `json:"pass"`
	}
	_ = json.Unmarshal(ev.Data, &data)
	switch data.Pass {
	case 5:
		return s.c.Execute(ctx, "migrate-set-parameters", props{"downtime-limit": 100}, nil)
	case 10:
		return s.c.Execute(ctx, "migrate-set-parameters", props{"downtime-limit": 500}, nil)
	case 20:
		return s.c.Execute(ctx, "stop", nil, nil)
	}
	return nil
}

// finish waits until every byte is in the files.
func (s *save) finish(ctx context.Context) error {
	if err := s.flow.wait(ctx); err != nil {
		return err
	}
	for _, f := range s.files {
		if err := f.Close(); err != nil {
			return fmt.Errorf("write the state: %w", err)
		}
	}
	s.files = nil
	return nil
}

func (s *save) result() hypervisor.Saved {
	if !s.stopped.IsZero() {
		s.pause += time.Since(s.stopped)
	}
	v := s.c.Version()
	accel := vm.AccelTCG
	if s.kvm {
		accel = vm.AccelKVM
	}
	facts := binaryFacts{version: fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Micro), machine: s.flow.machine}
	return hypervisor.Saved{Pause: s.pause, Method: s.method, Memory: s.flow.written.Used, Delta: s.flow.written.Delta, Machine: machineOf(facts, accel)}
}

// abort rolls the guest back to its state before the save.
func (s *save) abort(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortLimit)
	defer cancel()
	if s.flow != nil {
		s.flow.end() // QEMU may be blocked writing to it
	}
	c, err := s.i.connected(ctx) // the connection may have been replaced meanwhile
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	err = s.i.settle(ctx, c)
	err = errors.Join(err, s.disks.drop(ctx, c))
	if s.running {
		err = errors.Join(err, cont(ctx, c))
	}
	select {
	case <-s.i.Proc.Done():
		return nil
	default:
		return err
	}
}

// discard removes the files of a failed save.
func (s *save) discard() (err error) {
	for _, f := range s.files {
		_ = f.Close()
		err = errors.Join(err, os.Remove(f.Name()))
	}
	return err
}
