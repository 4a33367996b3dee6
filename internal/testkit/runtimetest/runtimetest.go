// Package runtimetest is the test suite for every Runtime: the node API, the cocoon binary, and the fake that tests of
// doors use.
//
// It needs no guest that answers; other suites test guests.
package runtimetest

import (
	"context"
	"errors"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// Runtime is the part of podprovider.Runtime that can be tested without a guest.
type Runtime interface {
	machines
	plugger
	watcher
	guest.Containers
	puller
}

type machines interface {
	Launch(ctx context.Context, spec vm.Spec) (vm.Record, error)
	Start(ctx context.Context, ref string) (vm.Record, error)
	Stop(ctx context.Context, ref string, grace time.Duration) (vm.Record, error)
	Remove(ctx context.Context, ref string, force bool) error
	Inspect(ctx context.Context, ref string) (vm.Record, error)
	List(ctx context.Context) ([]vm.Record, error)
}

type plugger interface {
	Resize(ctx context.Context, ref string, to vm.Size) (vm.Record, error)
	AttachVolume(ctx context.Context, ref string, use vm.VolumeUse, path string) (vm.Record, error)
	DetachVolume(ctx context.Context, ref, volume string) (vm.Record, error)
	DumpMemory(ctx context.Context, ref, volume, file string) error
	AttachNIC(ctx context.Context, ref string, want vm.NICSpec) (vm.Record, error)
	DetachNIC(ctx context.Context, ref, nic string) (vm.Record, error)
	SetLink(ctx context.Context, ref, nic string, down bool) (vm.Record, error)
}

type watcher interface {
	Watch(ctx context.Context, after int64, fn func(vm.Event) error) error
}

type puller interface {
	Pull(ctx context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error)
}

// T is the part of a test that the suite needs; a script provides it too.
type T interface {
	Context() context.Context
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// Run tests r, which must have no VMs and the image img. It leaves no VM behind.
func Run(t T, r Runtime, img string) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	life(ctx, t, r, r, img, func() { strangers(ctx, t, r); plugs(ctx, t, r) })
	notFound(ctx, t, r)
}

// life takes a VM from its launch to its removal. It calls running while the VM runs.
func life(ctx context.Context, t T, r machines, w watcher, img string, running func()) {
	if all, err := r.List(ctx); err != nil || len(all) != 0 {
		t.Fatalf("at first there are %d VMs, %v", len(all), err)
	}
	if _, err := r.Inspect(ctx, "nothing"); !errdefs.IsNotFound(err) {
		t.Errorf("inspect of what is not: %v", err)
	}
	spec := vm.Spec{
		Name: "one", Image: img, CPUs: 1, Memory: 256 << 20, Storage: 1 << 30, StopGrace: 2 * time.Second,
		Labels:  map[string]string{"cocoonstack.io/node": "n", "odd": "a=b \"c\""},
		Process: vm.Process{Env: []vm.EnvVar{{Name: "SECRET", Value: "x\ny"}}},
		Volumes: []vm.Volume{{Name: "conf", Kind: vm.VolumeFiles, Files: []vm.VolumeFile{{Path: "a", Data: []byte{0, 0xff}, Mode: 0o600}}}},
		Mounts:  []vm.Mount{{Volume: "conf", Path: "/etc/conf", ReadOnly: true}},
	}
	spec = spec.Default()
	rec, err := r.Launch(ctx, spec)
	if err != nil {
		t.Fatalf("launch: %v", err)
	}
	if rec.ID == "" || rec.Spec.Name != "one" || rec.Spec.Image != img || rec.Spec.Memory != spec.Memory || rec.Spec.Labels["odd"] != spec.Labels["odd"] || rec.Revision == 0 {
		t.Errorf("launched %+v", rec)
	}
	if len(rec.Spec.Volumes) != 1 || rec.Spec.Volumes[0].Name != "conf" {
		t.Errorf("volumes %+v", rec.Spec.Volumes)
	}
	if _, err := r.Launch(ctx, spec); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a name that is taken: %v", err)
	}
	bad := spec
	bad.Name = "-bad-"
	if _, err := r.Launch(ctx, bad); !errdefs.IsInvalid(err) {
		t.Errorf("a bad name: %v", err)
	}
	await(ctx, t, w, "VM one running", func(e vm.Event) bool { return e.Record.ID == rec.ID && e.Record.State == vm.StateRunning })
	if got, err := r.Inspect(ctx, string(rec.ID)); err != nil || got.Spec.Name != "one" || got.StartedAt.IsZero() || got.CreatedAt.IsZero() {
		t.Errorf("inspect: %+v, %v", got, err)
	}
	if all, err := r.List(ctx); err != nil || len(all) != 1 || all[0].ID != rec.ID {
		t.Errorf("list: %d, %v", len(all), err)
	}
	running()
	stopped, err := r.Stop(ctx, "one", 0)
	if err != nil || stopped.State != vm.StateStopped || stopped.StoppedAt.IsZero() {
		t.Errorf("stop: %+v, %v", stopped, err)
	}
	if again, err := r.Start(ctx, "one"); err != nil || again.ID != rec.ID {
		t.Errorf("start: %+v, %v", again, err)
	}
	last, err := r.Inspect(ctx, "one")
	if err != nil {
		t.Fatalf("inspect: %v", err)
	}
	if err := r.Remove(ctx, "one", true); err != nil {
		t.Errorf("remove: %v", err)
	}
	after(ctx, t, w, last.Revision, "the removal", func(e vm.Event) bool { return e.Type == vm.EventDeleted && e.Record.ID == rec.ID })
	if err := r.Remove(ctx, "one", true); !errdefs.IsNotFound(err) {
		t.Errorf("remove what is gone: %v", err)
	}
	if all, err := r.List(ctx); err != nil || len(all) != 0 {
		t.Errorf("at last there are %d VMs, %v", len(all), err)
	}
	stop := errors.New("enough")
	if err := w.Watch(ctx, last.Revision-1, func(vm.Event) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("a watcher's error comes back as %v", err)
	}
	gone, leave := context.WithCancel(ctx)
	leave()
	if err := w.Watch(gone, -1, func(vm.Event) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("a watch that is given up: %v", err)
	}
}

// plugs checks the errors for volumes that cannot be plugged or taken away.
func plugs(ctx context.Context, t T, r plugger) {
	for _, path := range []string{"", "/data"} {
		if _, err := r.AttachVolume(ctx, "nothing", vm.VolumeUse{Ref: "none", ReadOnly: true}, path); !errdefs.IsNotFound(err) {
			t.Errorf("a volume for what is not: %v", err)
		}
	}
	if _, err := r.Resize(ctx, "nothing", vm.Size{CPUs: 2, Memory: 1 << 30}); !errdefs.IsNotFound(err) {
		t.Errorf("a size for what is not: %v", err)
	}
	if _, err := r.Resize(ctx, "one", vm.Size{CPUs: 100, Memory: 1 << 40}); !errdefs.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("a size for a VM that cannot grow: %v", err)
	}
	if _, err := r.AttachNIC(ctx, "nothing", vm.NICSpec{Network: "none"}); !errdefs.IsNotFound(err) {
		t.Errorf("an interface for what is not: %v", err)
	}
	if _, err := r.AttachNIC(ctx, "one", vm.NICSpec{Network: "none"}); !errdefs.IsInvalid(err) {
		t.Errorf("an interface on a network that is not: %v", err)
	}
	for _, of := range []string{"nothing", "one"} {
		if err := r.DumpMemory(ctx, of, "none", "dump"); !errdefs.IsNotFound(err) {
			t.Errorf("a dump of %s to a volume that is not: %v", of, err)
		}
		if _, err := r.DetachNIC(ctx, of, "none"); !errdefs.IsNotFound(err) {
			t.Errorf("an interface that %s does not have is taken away: %v", of, err)
		}
		if _, err := r.SetLink(ctx, of, "none", true); !errdefs.IsNotFound(err) {
			t.Errorf("the link of an interface that %s does not have: %v", of, err)
		}
		if _, err := r.DetachVolume(ctx, of, "none"); !errdefs.IsNotFound(err) {
			t.Errorf("a volume that %s does not have is taken away: %v", of, err)
		}
	}
}

// strangers checks the errors for what the VM called one does not have.
func strangers(ctx context.Context, t T, r guest.Containers) {
	if err := r.UpdateVolume(ctx, "nothing", "conf", nil); !errdefs.IsNotFound(err) {
		t.Errorf("a volume of what is not: %v", err)
	}
	for _, grace := range []time.Duration{-1, 0, time.Second} {
		if err := r.KillContainer(ctx, "one", "none", 1, grace); !errdefs.IsNotFound(err) {
			t.Errorf("a container of a VM that is one process: %v", err)
		}
	}
	if err := r.ReleaseContainer(ctx, "one", "none"); !errdefs.IsNotFound(err) {
		t.Errorf("release of a container of a VM that is one process: %v", err)
	}
	add := vm.Container{Name: "debug", Image: "anything", Kind: vm.ContainerEphemeral}
	if _, err := r.AddContainer(ctx, "nothing", add); !errdefs.IsNotFound(err) {
		t.Errorf("a container for what is not: %v", err)
	}
	if _, err := r.AddContainer(ctx, "one", add); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("a container for a VM that is one process: %v", err)
	}
	if _, err := r.StartContainer(ctx, "nothing", "none"); !errdefs.IsNotFound(err) {
		t.Errorf("a start of a container of what is not: %v", err)
	}
	if _, err := r.StartContainer(ctx, "one", "none"); !errdefs.IsNotFound(err) {
		t.Errorf("a start of what the VM does not have: %v", err)
	}
	if err := r.RemoveContainer(ctx, "nothing", "none"); !errdefs.IsNotFound(err) {
		t.Errorf("a removal of a container of what is not: %v", err)
	}
	if err := r.RemoveContainer(ctx, "one", "none"); err != nil {
		t.Errorf("a removal of what the VM does not have: %v", err)
	}
	want := map[string]vm.Resources{"none": {CPULimit: 100}}
	if _, err := r.ResizeContainers(ctx, "nothing", want); !errdefs.IsNotFound(err) {
		t.Errorf("a resize of what is not: %v", err)
	}
	if _, err := r.ResizeContainers(ctx, "one", want); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("a resize of a VM that is one process: %v", err)
	}
}

func notFound(ctx context.Context, t T, r puller) {
	if _, err := r.Pull(ctx, image.PullRequest{Name: "never-heard-of:1", Policy: image.PullNever, Auth: []image.RegistryAuth{{Registry: "r.example", Username: "u", Password: "p"}}}, nil); err == nil {
		t.Errorf("an image that is nowhere was found")
	}
}

func await(ctx context.Context, t T, r watcher, what string, is func(vm.Event) bool) {
	after(ctx, t, r, -1, what, is)
}

// after waits for a matching event after the revision.
func after(ctx context.Context, t T, r watcher, revision int64, what string, is func(vm.Event) bool) {
	seen := errors.New("seen")
	err := r.Watch(ctx, revision, func(e vm.Event) error {
		if e.Revision == 0 {
			t.Errorf("an event without revision: %+v", e)
		}
		if is(e) {
			return seen
		}
		return nil
	})
	if !errors.Is(err, seen) {
		t.Fatalf("waiting for %s: %v", what, err)
	}
}
