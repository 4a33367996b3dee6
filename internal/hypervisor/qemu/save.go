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
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/vm"
)

// The ways to take memory. QEMU's background-snapshot is not among them: it pauses the guest no shorter than precopy
// does, unprivileged processes may use it only where the host's vm.unprivileged_userfaultfd allows, and when its reader
// goes away in the middle, as with a full disk or a killed daemon, the guest stands for ever. Where guests are emulated its
// pause would be the shorter one; the other two reasons hold.
const (
	methodPrecopy = "precopy" // pages are saved while the guest runs, and again those it changed, the last when it stands
	methodStopped = "stopped" // the guest stands until all is saved
)

// save is one Save on its way.
type save struct {
	i    *instance
	plan hypervisor.SavePlan
	c    *qmp.Client
	ear  *ear

	running bool // the guest ran before
	kvm     bool
	disks   disks
	files   []*os.File // memory and state
	base    *os.File   // the memory that this one may stand on; nil: none
	flow    *flow
	method  string
	pause   time.Duration
	stopped time.Time // of the STOP event that no RESUME has followed
}

// abortLimit bounds the way back to a running guest.
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
		err = errors.Join(i.orEnded(err), s.discard())
		return hypervisor.Saved{}, fmt.Errorf("save VM %s: %w", i.h.ID, err)
	}
	return saved, nil
}

func (s *save) run(ctx context.Context) (saved hypervisor.Saved, err error) {
	if s.plan.State == "" || s.plan.Memory == "" || s.plan.State == s.plan.Memory {
		return saved, errdefs.Invalidf("state and memory need a file each")
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

// look finds out how the guest is.
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
		return errdefs.Preconditionf("it was saved and has stood since; let it go on, or end it")
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
	s.base, err = openData(file{kind: fileRead, path: s.plan.Base})
	return err
}

// prepare does all that can be done while the guest runs.
func (s *save) prepare(ctx context.Context) error {
	if err := s.disks.prepare(ctx, s.plan.Overlays); err != nil {
		return err
	}
	if s.disks.inUse && s.running {
		return errdefs.Preconditionf("a new overlay is in use already and the guest has run since; make another one on top of it")
	}
	s.method = methodStopped
	if s.running && !s.plan.Hold && s.tracked() {
		s.method = methodPrecopy
	}
	if err := s.allow(ctx, s.method); err != nil {
		return err
	}
	// As fast as we read. The guest may stand for so long; steady raises it for one that writes faster.
	return s.c.Execute(ctx, "migrate-set-parameters", props{"max-bandwidth": int64(1) << 40, "downtime-limit": 20}, nil)
}

// tracked reports whether QEMU notes every page that the guest changes while it is saved. Where guests are emulated it does
// not: before QEMU 9.0 the emulator goes on writing to pages that the migration has just marked clean (fixed there by
// commit 03bfc2188f, "physmem: Fix migration dirty bitmap coherency with TCG memory access"; its author knows of further
// races). What goes on from such a snapshot has a page that is older than the rest.
func (s *save) tracked() bool { return s.kvm || s.i.d.trustEmulator }

// allow switches on what method needs, and what another one needs off.
func (s *save) allow(ctx context.Context, method string) error {
	return capabilities(ctx, s.c, map[string]bool{
		"events": true, "pause-before-switchover": method == methodPrecopy,
	})
}

// take takes disks, devices and memory of one instant.
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
	if err := s.disks.change(ctx); err != nil {
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
	if err := s.disks.change(ctx); err != nil {
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

// migrate begins the stream. The context it returns ends with the stream when that fails.
func (s *save) migrate(ctx context.Context) (context.Context, error) {
	const name = "save"
	var w *os.File
	var err error
	ctx, s.flow, w, err = newFlow(ctx, s.files[0], s.base, s.files[1])
	if err != nil {
		return ctx, err
	}
	err = s.c.ExecuteFile(ctx, "getfd", props{"fdname": name}, nil, w)
	_ = w.Close() // QEMU has its own
	if err != nil {
		return ctx, err
	}
	if err := s.c.Execute(ctx, "migrate", props{"uri": "fd:" + name}, nil); err != nil {
		return ctx, errors.Join(err, s.c.Execute(ctx, "closefd", props{"fdname": name}, nil))
	}
	return ctx, nil
}

const resumed = "RESUME"

// until waits for an event, or for a state of the migration.
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

// why says why a migration has failed. The reason is ours when our side of the stream broke.
func (s *save) why(ctx context.Context, status string) error {
	if err := s.flow.wait(ctx); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) { // QEMU has closed, or is about to
		return err
	}
	_, desc, err := migrating(ctx, s.c)
	if err != nil {
		return err
	}
	if desc == "" {
		desc = "it does not say why"
	}
	return errdefs.Unsupportedf("QEMU ended the save as %s: %s", status, desc)
}

// steady gives a guest that changes its memory faster than it is saved more time to stand, and stops it in the end.
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

// abort brings the guest back to where it was.
func (s *save) abort(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortLimit)
	defer cancel()
	if s.flow != nil {
		s.flow.end() // QEMU may be stuck writing to it
	}
	c, err := s.i.connected(ctx) // the connection may be another one meanwhile
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
	case <-s.i.proc.Done():
		return nil
	default:
		return err
	}
}

// discard removes the files of a save that failed.
func (s *save) discard() (err error) {
	for _, f := range s.files {
		_ = f.Close()
		err = errors.Join(err, os.Remove(f.Name()))
	}
	return err
}
