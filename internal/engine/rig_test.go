package engine_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/journal/records"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
	volumefile "cocoonstack.io/cocoon/internal/volume/file"
)

// rig is an engine in a world, with a folder that outlives both.
type rig struct {
	*engine.Engine
	t     testing.TB
	dir   string
	world *enginetest.World
	wrap  func(journal.Journal) journal.Journal
	vmm   hypervisor.Driver // nil: the world's
	end   func()

	snapshots snapshot.Store // nil: the world's
	cfg       engine.Config  // settings that differ from the common ones
	room      func(dir string) (engine.Room, error)
	file      sqlite.Config // of the journal; its path is the rig's

	journal  journal.Journal
	parallel bool // other tests run in parallel
}

// newRig returns an engine that has recovered. opts change the rig before the engine starts.
func newRig(t testing.TB, opts ...func(*rig)) *rig {
	t.Helper()
	r := &rig{t: t, dir: t.TempDir(), wrap: func(j journal.Journal) journal.Journal { return j }}
	r.world = r.newWorld()
	for _, o := range opts {
		o(r)
	}
	r.start()
	t.Cleanup(func() { r.stop() })
	return r
}

func (r *rig) newWorld() *enginetest.World {
	r.t.Helper()
	w, err := enginetest.New(filepath.Join(r.dir, "world"))
	if err != nil {
		r.t.Fatal(err)
	}
	return w
}

// build assembles an engine on the folders of dir; cfg and at hold the settings that differ between tests.
func build(ctx context.Context, dir string, w *enginetest.World, d hypervisor.Driver, wrap func(journal.Journal) journal.Journal, snapshots snapshot.Store, cfg engine.Config, room func(string) (engine.Room, error), at sqlite.Config) (*engine.Engine, journal.Journal, error) {
	if snapshots == nil {
		snapshots = w.Snapshots()
	}
	state := filepath.Join(dir, "state")
	if err := os.MkdirAll(state, 0o700); err != nil {
		return nil, nil, err
	}
	at.Path = filepath.Join(state, "journal.db")
	file, err := sqlite.Open(ctx, at)
	if err != nil {
		return nil, nil, err
	}
	j := records.New(records.Config{Dir: filepath.Join(state, "vms"), Older: at.Older}, file)
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("ENGINE_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	if w.Volumes() == nil { // it stays open for as long as the world
		s, err := volumefile.New(ctx, volumefile.Config{Dir: filepath.Join(dir, "volumes")})
		if err != nil {
			return nil, nil, err
		}
		w.Keep(s)
	}
	cfg.StateDir, cfg.RunDir = state, filepath.Join(dir, "run")
	cfg.DefaultDriver, cfg.DefaultNetwork, cfg.Kernel, cfg.Initrd = "fake", "net", "/k", "/i"
	cfg.StopMargin, cfg.PoweroffTimeout = 100*time.Millisecond, 100*time.Millisecond
	if cfg.AgentTimeout == 0 {
		cfg.AgentTimeout = 10 * time.Second
	}
	cfg.DrainTimeout, cfg.SilentMax = time.Second, 10*time.Millisecond
	cfg.ReconnectMin, cfg.ReconnectMax = time.Millisecond, 10*time.Millisecond
	if cfg.ProvenAfter == 0 {
		cfg.ProvenAfter = 10 * time.Millisecond
	}
	cfg.PoolMemory, cfg.PoolPause = int64(cfg.PoolSize)<<30, time.Millisecond
	e, err := engine.New(cfg, engine.Deps{
		Journal: wrap(j), Drivers: map[string]hypervisor.Driver{"fake": d}, Images: w.Images(),
		Networks: network.Fixed{"net": w.Network(), "lab": w.Lab()}, Agents: w.Agents(), DiskAgents: w.DiskAgents(), Seeds: w.Seeds(), Log: log, Snapshots: snapshots, Volumes: w.Volumes(), Records: j, Room: room,
	})
	return e, j, err
}

func (r *rig) start() {
	r.t.Helper()
	if err := r.try(); err != nil {
		r.t.Fatal(err)
	}
}

// try is a start that may fail.
func (r *rig) try() error {
	if r.vmm == nil {
		r.vmm = r.world.Driver()
	}
	e, j, err := build(r.t.Context(), r.dir, r.world, r.vmm, r.wrap, r.snapshots, r.cfg, r.room, r.file)
	if err != nil {
		return err
	}
	r.Engine, r.journal = e, j
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.Run(ctx) }()
	r.end = func() {
		cancel()
		if err := <-done; err != nil {
			r.t.Errorf("Run: %v", err)
		}
		if err := j.Close(); err != nil {
			r.t.Error(err)
		}
		if !r.parallel {
			noGoroutines(r.t)
		}
	}
	select {
	case <-e.Recovered():
		return nil
	case err := <-done:
		cancel()
		r.end = nil
		return errors.Join(err, j.Close())
	}
}

func (r *rig) stop() {
	if r.end != nil {
		r.end()
		r.end = nil
	}
}

// restart ends the engine and starts another one on the same folders; the world keeps running.
func (r *rig) restart() {
	r.t.Helper()
	r.stop()
	r.start()
}

// noGoroutines fails if goroutines of the engine remain.
func noGoroutines(t testing.TB) {
	t.Helper()
	var left []string
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); <-time.After(time.Millisecond) {
		buf := make([]byte, 1<<20)
		left = nil
		for _, g := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
			if strings.Contains(g, "cocoonstack.io/cocoon/internal/engine.") {
				left = append(left, g)
			}
		}
		if len(left) == 0 {
			return
		}
	}
	t.Errorf("%d goroutines are left:\n%s", len(left), strings.Join(left, "\n\n"))
}

func spec(name string) vm.Spec {
	return vm.Spec{Name: name, Image: "demo", NICs: []vm.NICSpec{{}}, StopGrace: 5 * time.Second}
}

func (r *rig) must(rec vm.Record, err error) vm.Record {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
	return rec
}

// await returns the record of ref once ok holds for it.
func (r *rig) await(ref string, what string, ok func(vm.Record) bool) vm.Record {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	var got vm.Record
	found := errors.New("found")
	err := r.Watch(ctx, -1, func(e vm.Event) error {
		if e.Record.Spec.Name == ref || string(e.Record.ID) == ref {
			if got = e.Record; ok(got) {
				return found
			}
		}
		return nil
	})
	if !errors.Is(err, found) {
		r.t.Fatalf("%s did not become %s: %v; it is %+v", ref, what, err, got)
	}
	for { // the event is sent a moment before the engine itself uses the new record
		now, err := r.Inspect(ctx, string(got.ID))
		if err != nil || now.Revision >= got.Revision {
			return got
		}
		runtime.Gosched()
	}
}

func ready(r vm.Record) bool   { return r.AgentReady }
func stopped(r vm.Record) bool { return r.State == vm.StateStopped }

// clean fails if anything of any VM remains.
func (r *rig) clean() {
	r.t.Helper()
	if left := leftovers(r.t, r.dir, r.world); len(left) > 0 {
		r.t.Errorf("left behind: %v", left)
	}
	if all, err := r.List(r.t.Context()); err != nil || len(all) > 0 {
		r.t.Errorf("records: %+v, %v", all, err)
	}
}

// leftovers lists what exists of any VM outside the journal.
func leftovers(t testing.TB, dir string, w *enginetest.World) []string {
	t.Helper()
	left, err := w.Leftovers()
	if err != nil {
		t.Fatal(err)
	}
	attached, err := w.Volumes().Attachments(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	left = append(left, attached...)
	for _, sub := range []string{"state/vms", "run/vms"} {
		entries, err := os.ReadDir(filepath.Join(dir, sub))
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		for _, e := range entries {
			left = append(left, sub+"/"+e.Name())
		}
	}
	slices.Sort(left)
	return left
}

func wantClass(t testing.TB, what string, err error, want errdefs.Class) {
	t.Helper()
	if !errdefs.Is(err, want) {
		t.Errorf("%s: got %v (%v), want %v", what, err, errdefs.ClassOf(err), want)
	}
}
