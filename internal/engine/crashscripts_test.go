package engine_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// script is an operation and what comes before it. Each part returns when its result is in the journal.
type script struct {
	before  func(context.Context, *rig) error
	trigger func(context.Context, *rig) error // what starts it from outside; no point is passed before this is done
	act     func(context.Context, *rig) error
	only    func(context.Context, *rig) error // act alone, once and without waiting for the guest; nil: act
	// after lists the states that the VM may be in after recovery; "" means removed.
	after []vm.State
	// disk lists what the disks of VMs that run, or can be started, may hold; nil: not checked.
	disk []string
	name string // of the VM; "": web
	pool int    // clones kept ready
	raw  bool   // the driver has raw disks only
}

// rawScripts are those of all that changes disks, for a driver that has raw ones only.
func rawScripts(all map[string]script) map[string]script {
	out := map[string]script{}
	for _, op := range []string{"launch", "save", "save stopped", "clone", "clone pooled", "hibernate", "wake", "restore", "restore hibernated"} {
		s := all[op]
		s.raw = true
		out[op+" raw"] = s
	}
	return out
}

func cloud() vm.Spec {
	s := spec("web")
	s.Image = "cloud"
	return s
}

func launched(ctx context.Context, r *rig) error {
	if _, err := r.Launch(ctx, withVolumes()); err != nil {
		return err
	}
	return until(ctx, r, ready)
}

var errFound = errors.New("found")

func until(ctx context.Context, r *rig, ok func(vm.Record) bool) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	err := r.Watch(ctx, -1, func(e vm.Event) error {
		if ok(e.Record) {
			return errFound
		}
		if e.Record.State == vm.StateError || e.Record.Reason == vm.ReasonStartFailed { // and stays so
			return fmt.Errorf("vm %s: %s", e.Record.Spec.Name, e.Record.Message)
		}
		return nil
	})
	if errors.Is(err, errFound) {
		return nil
	}
	return err
}

// written launches the VM and makes it write to its disk.
func written(ctx context.Context, r *rig) error {
	return errors.Join(launched(ctx, r), write(ctx, r, "one."))
}

func write(ctx context.Context, r *rig, text string) error {
	rec, err := r.Inspect(ctx, "web")
	if err != nil {
		return err
	}
	return r.world.Guest(rec.ID).Write(text)
}

func halt(ctx context.Context, r *rig) error {
	_, err := r.Stop(ctx, "web", 0)
	return err
}

func save(ctx context.Context, r *rig) error {
	_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	return err
}

// saved is written, then saved, then written to again.
func saved(ctx context.Context, r *rig) error {
	return errors.Join(written(ctx, r), save(ctx, r), write(ctx, r, "two."))
}

func clone(ctx context.Context, r *rig) error {
	_, err := r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a"})
	return err
}

func second(ctx context.Context, r *rig) error {
	_, err := r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "b"})
	return err
}

// filled waits until a clone is in the pool.
func filled(ctx context.Context, r *rig) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for r.Pool().Entries == 0 {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func restore(ctx context.Context, r *rig) error {
	_, err := r.Restore(ctx, "web", "gold")
	return err
}

func scripts() map[string]script {
	all := map[string]script{
		"create": {
			act:   func(ctx context.Context, r *rig) error { _, err := r.Create(ctx, spec("web")); return err },
			after: []vm.State{"", vm.StateCreated},
		},
		"launch": {act: launched, after: []vm.State{"", vm.StateRunning}},
		"start": {
			before: func(ctx context.Context, r *rig) error { _, err := r.Create(ctx, spec("web")); return err },
			act:    func(ctx context.Context, r *rig) error { _, err := r.Start(ctx, "web"); return err },
			after:  []vm.State{vm.StateCreated, vm.StateRunning},
		},
		"launch disk": {
			act: func(ctx context.Context, r *rig) error {
				if _, err := r.Launch(ctx, cloud()); err != nil {
					return err
				}
				return until(ctx, r, ready)
			},
			after: []vm.State{"", vm.StateRunning},
		},
		"launch kernel": {act: launchedByKernel, after: []vm.State{"", vm.StateRunning}},
		"start disk": {
			before: func(ctx context.Context, r *rig) error { _, err := r.Create(ctx, cloud()); return err },
			act:    func(ctx context.Context, r *rig) error { _, err := r.Start(ctx, "web"); return err },
			after:  []vm.State{vm.StateCreated, vm.StateRunning},
		},
		"stop": {
			before: launched,
			act:    func(ctx context.Context, r *rig) error { _, err := r.Stop(ctx, "web", -1); return err },
			after:  []vm.State{vm.StateRunning, vm.StateStopped},
		},
		"restart": {
			before: launched,
			act:    func(ctx context.Context, r *rig) error { _, err := r.Restart(ctx, "web", -1); return err },
			after:  []vm.State{vm.StateRunning},
		},
		"remove": {
			before: launched,
			act:    func(ctx context.Context, r *rig) error { return r.Remove(ctx, "web", true) },
			after:  []vm.State{vm.StateRunning, ""},
		},
		"exit": {
			before: launched,
			trigger: func(ctx context.Context, r *rig) error {
				rec, err := r.Inspect(ctx, "web")
				if err != nil {
					return err
				}
				r.world.Guest(rec.ID).Exit(5)
				return nil
			},
			act:   func(ctx context.Context, r *rig) error { return until(ctx, r, stopped) },
			after: []vm.State{vm.StateStopped},
		},
		"update": {
			before: launched,
			only:   func(ctx context.Context, r *rig) error { return r.UpdateVolume(ctx, "web", "conf", content("two")) },
			act: func(ctx context.Context, r *rig) error {
				for range 2 * abreast { // each has only one point
					if err := r.UpdateVolume(ctx, "web", "conf", content("two")); err != nil {
						return err
					}
				}
				return nil
			},
			after: []vm.State{vm.StateRunning},
		},
		"save": {
			before: written,
			act:    func(ctx context.Context, r *rig) error { return save(ctx, r) },
			after:  []vm.State{vm.StateRunning},
			disk:   []string{"one."},
		},
		"save stopped": {
			before: func(ctx context.Context, r *rig) error { return errors.Join(written(ctx, r), halt(ctx, r)) },
			act:    func(ctx context.Context, r *rig) error { return save(ctx, r) },
			after:  []vm.State{vm.StateStopped},
			disk:   []string{"one."},
		},
		"clone": {
			before: saved,
			act: func(ctx context.Context, r *rig) error {
				if err := clone(ctx, r); err != nil {
					return err
				}
				return until(ctx, r, func(v vm.Record) bool { return v.Spec.Name == "a" && v.AgentReady })
			},
			only:  clone,
			after: []vm.State{"", vm.StateRunning},
			disk:  []string{"one.two.", "one."}, // of the source and of the clone
			name:  "a",
		},
		"clone pooled": {
			before: func(ctx context.Context, r *rig) error {
				return errors.Join(saved(ctx, r), clone(ctx, r), filled(ctx, r))
			},
			act: func(ctx context.Context, r *rig) error {
				if err := second(ctx, r); err != nil {
					return err
				}
				return errors.Join(until(ctx, r, func(v vm.Record) bool { return v.Spec.Name == "b" && v.AgentReady }), filled(ctx, r))
			},
			only:  second,
			after: []vm.State{"", vm.StateRunning},
			disk:  []string{"one.two.", "one."},
			name:  "b",
			pool:  1,
		},
		"clone disk": {
			before: func(ctx context.Context, r *rig) error {
				if _, err := r.Launch(ctx, cloud()); err != nil {
					return err
				}
				return errors.Join(until(ctx, r, ready), write(ctx, r, "one."), save(ctx, r))
			},
			act: func(ctx context.Context, r *rig) error {
				if err := clone(ctx, r); err != nil {
					return err
				}
				return until(ctx, r, func(v vm.Record) bool { return v.Spec.Name == "a" && v.Itself() })
			},
			only:  clone,
			after: []vm.State{"", vm.StateRunning},
			disk:  []string{"one."},
			name:  "a",
		},
		"hibernate": {
			before: written,
			act:    func(ctx context.Context, r *rig) error { _, err := r.Hibernate(ctx, "web", ""); return err },
			after:  []vm.State{vm.StateRunning, vm.StateHibernated},
			disk:   []string{"one."},
		},
		"wake": {
			before: func(ctx context.Context, r *rig) error {
				if err := written(ctx, r); err != nil {
					return err
				}
				_, err := r.Hibernate(ctx, "web", "")
				return err
			},
			act: func(ctx context.Context, r *rig) error {
				if _, err := r.Wake(ctx, "web"); err != nil {
					return err
				}
				return until(ctx, r, ready)
			},
			only:  func(ctx context.Context, r *rig) error { _, err := r.Wake(ctx, "web"); return err },
			after: []vm.State{vm.StateRunning, vm.StateHibernated},
			disk:  []string{"one."},
		},
		"restore": {
			before: saved,
			act:    restore,
			after:  []vm.State{vm.StateRunning},
			disk:   []string{"one.", "one.two."},
		},
		"restore hibernated": {
			before: func(ctx context.Context, r *rig) error {
				if err := saved(ctx, r); err != nil {
					return err
				}
				_, err := r.Hibernate(ctx, "web", "night")
				return err
			},
			act:   restore,
			after: []vm.State{vm.StateRunning, vm.StateHibernated},
			disk:  []string{"one.", "one.two."},
		},
		"remove hibernated": {
			before: func(ctx context.Context, r *rig) error {
				if err := written(ctx, r); err != nil {
					return err
				}
				_, err := r.Hibernate(ctx, "web", "night")
				return err
			},
			act:   func(ctx context.Context, r *rig) error { return r.Remove(ctx, "web", false) },
			after: []vm.State{vm.StateHibernated, ""},
		},
		"recover": {act: func(context.Context, *rig) error { return nil }},
	}
	maps.Copy(all, pauseScripts())
	maps.Copy(all, severalScripts())
	maps.Copy(all, addScripts())
	maps.Copy(all, sandboxScripts())
	maps.Copy(all, bootScripts())
	maps.Copy(all, savedScripts())
	maps.Copy(all, resizeScripts())
	maps.Copy(all, growScripts())
	maps.Copy(all, dumpScripts())
	maps.Copy(all, attachedScripts())
	maps.Copy(all, attachScripts())
	maps.Copy(all, sharedScripts())
	maps.Copy(all, nicScripts())
	maps.Copy(all, linkScripts())
	maps.Copy(all, rawScripts(all))
	return all
}
