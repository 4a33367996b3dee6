package engine_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// booting is a container whose image boots itself.
func booting(name string) vm.Container {
	c := manual(name)
	c.Image, c.Process = "cloud", vm.Process{}
	return c
}

// bootScripts are the operations with a container that is the guest of its sandbox.
func bootScripts() map[string]script {
	running := func(ctx context.Context, r *rig) error {
		_, err := r.Launch(ctx, sandbox())
		return errors.Join(err, until(ctx, r, ready))
	}
	added := func(ctx context.Context, r *rig) error {
		_, err := r.AddBootContainer(ctx, "web", booting("os"), vm.GuestBoot{})
		return err
	}
	begun := func(ctx context.Context, r *rig) error {
		_, err := r.StartContainer(ctx, "web", "os")
		return err
	}
	return map[string]script{
		"add boot container": {before: running, act: added, after: []vm.State{vm.StateRunning, vm.StateCreated}},
		"start boot container": {
			before: func(ctx context.Context, r *rig) error { return errors.Join(running(ctx, r), added(ctx, r)) },
			act:    begun, after: []vm.State{vm.StateCreated, vm.StateRunning},
		},
		"remove boot container": {
			before: func(ctx context.Context, r *rig) error {
				return errors.Join(running(ctx, r), added(ctx, r), begun(ctx, r))
			},
			act: func(ctx context.Context, r *rig) error { return r.RemoveContainer(ctx, "web", "os") }, after: []vm.State{vm.StateRunning, vm.StateStopped},
		},
	}
}

// TestBootContainer: the guest of a sandbox ends for a container whose image boots itself, and is that container from then on.
func TestBootContainer(t *testing.T) {
	var shown shares
	r, ctx := newRig(t, shown.watch), t.Context()
	dir := t.TempDir()
	s := sandbox()
	s.DNS = &vm.DNS{Servers: []string{"10.9.9.9"}, Own: true}
	rec := r.must(r.Launch(ctx, s))
	r.await("web", "ready", ready)
	blank := rec.Disks[0].Path

	r.must(r.AddContainer(ctx, "web", manual("init")))
	_, err := r.AddBootContainer(ctx, "web", booting("os"), vm.GuestBoot{})
	wantClass(t, "beside a container that waits", err, errdefs.FailedPrecondition)
	r.must(r.StartContainer(ctx, "web", "init"))
	r.world.Guest(rec.ID).EndContainer("init", 0)
	r.await("web", "ended", inState("init", vm.ContainerTerminated))
	for what, change := range map[string]func(*vm.Container){
		"a container image": func(c *vm.Container) { c.Image = "layered" },
		"a command":         func(c *vm.Container) { c.Process.Args = []string{"x"} },
		"a file of the node": func(c *vm.Container) {
			c.Volumes = []vm.Volume{{Name: "f", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: "/etc/hosts", File: true, Trusted: true}}}
			c.Mounts = []vm.Mount{{Volume: "f", Path: "/f", SubPath: vm.DirFile}}
		},
		"no start": func(c *vm.Container) { c.Manual = false },
	} {
		c := booting("bad")
		change(&c)
		_, err := r.AddBootContainer(ctx, "web", c, vm.GuestBoot{})
		wantClass(t, what, err, errdefs.InvalidArgument)
	}
	for _, g := range []vm.GuestBoot{{Storage: -1}, {Storage: vm.MaxStorage + 1}, {Firmware: "coreboot"}, {CloudInit: &vm.CloudInit{UserData: "#cloud-config\n["}}} {
		_, err := r.AddBootContainer(ctx, "web", booting("bad"), g)
		wantClass(t, "a guest that cannot boot", err, errdefs.InvalidArgument)
	}
	if now := r.must(r.Inspect(ctx, "web")); now.State != vm.StateRunning || now.BootContainer != "" {
		t.Fatalf("after calls that were refused: %+v", now)
	}

	c := booting("os")
	c.Volumes = []vm.Volume{{Name: "d", Kind: vm.VolumeDir, Dir: &vm.HostDir{Path: dir, Trusted: true}}}
	c.Mounts = []vm.Mount{{Volume: "d", Path: "/data"}}
	var now vm.Record
	for range 2 { // again is no error
		now = r.must(r.AddBootContainer(ctx, "web", c, vm.GuestBoot{CloudInit: &vm.CloudInit{UserData: "#cloud-config"}}))
	}
	if e := now.Ephemeral; now.State != vm.StateCreated || now.BootContainer != "os" || now.ImageType != vm.ImageDisk || now.Boot.Firmware != vm.FirmwareBIOS ||
		len(e) != 2 || e[1].Record.Status.State != vm.ContainerCreated || e[1].Record.ImageDigest != now.ImageDigest || now.NICs[0].IP != rec.NICs[0].IP || now.PID != 0 {
		t.Fatalf("added: %+v", now)
	}
	if _, err := os.Stat(blank); err == nil || filepath.Dir(now.Disks[0].Path) == filepath.Dir(blank) {
		t.Errorf("the disk of the guest that has ended is still there: %v", now.Disks)
	}
	now = r.must(r.StartContainer(ctx, "web", "os"))
	if st := now.Container("os").Status; st.State != vm.ContainerRunning || st.StartedAt.IsZero() || now.State != vm.StateRunning {
		t.Fatalf("started: %+v", now)
	}
	r.await("web", "ready", ready)
	if got := shown.get(); len(got) != 1 || got[0] != (hypervisor.Share{Tag: vm.DirTag(0), Root: "/", Path: dir}) {
		t.Errorf("it shares %+v", got)
	}
	if got := seedOf(t, now); !strings.Contains(got, now.NICs[0].IP) {
		t.Errorf("its seed is %q", got)
	}
	var out bytes.Buffer
	if code, err := r.Exec(ctx, "web", guest.Exec{Container: "os", Command: []string{"echo", "hi"}}, guest.Streams{Stdout: &out}); code != 0 || err != nil || out.String() != "hi\n" {
		t.Errorf("exec: %d, %v, %q", code, err, out.String())
	}
	_, err = r.AddContainer(ctx, "web", manual("debug"))
	wantClass(t, "a container in a guest that boots itself", err, errdefs.FailedPrecondition)
	_, err = r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	wantClass(t, "its snapshot", err, errdefs.FailedPrecondition)
	if now = r.must(r.ResizeContainers(ctx, "web", map[string]vm.Resources{"os": {CPULimit: 500}})); now.Ephemeral[1].Spec.Resources.CPULimit != 500 {
		t.Errorf("resized: %+v", now.Ephemeral[1].Spec)
	}
	if err := r.RemoveContainer(ctx, "web", "init"); err != nil { // it was in the guest before
		t.Fatal(err)
	}
	r.restart()
	r.await("web", "ready", ready)
	if now = r.must(r.Inspect(ctx, "web")); now.Container("os").Status.State != vm.ContainerRunning || len(now.Ephemeral) != 1 {
		t.Fatalf("after a restart: %+v", now)
	}
	r.world.Guest(rec.ID).End(hypervisor.Exit{GuestShutdown: true})
	now = r.await("web", "ended", inState("os", vm.ContainerTerminated))
	if x := now.Container("os").Status.Exit; x == nil || x.Code != 0 || x.Reason != vm.ContainerCompleted || now.State != vm.StateStopped {
		t.Errorf("powered off: %+v, %+v", x, now)
	}
	_, err = r.StartContainer(ctx, "web", "os")
	wantClass(t, "one that has ended is started", err, errdefs.FailedPrecondition)

	// The next one has a disk of its own, and can be killed.
	now = r.must(r.AddBootContainer(ctx, "web", booting("os2"), vm.GuestBoot{}))
	if now.BootContainer != "os2" || now.NICs[0].IP != rec.NICs[0].IP || len(now.Spec.Volumes) != 0 || now.Container("os").Status.State != vm.ContainerTerminated {
		t.Fatalf("the next one: %+v", now)
	}
	r.must(r.StartContainer(ctx, "web", "os2"))
	r.await("web", "ready", ready)
	if err := r.KillContainer(ctx, "web", "os2", 0, 0); err != nil {
		t.Fatal(err)
	}
	if x := r.must(r.Inspect(ctx, "web")).Container("os2").Status.Exit; x == nil || x.Code != vm.LostExitCode {
		t.Errorf("killed: %+v", x)
	}
	for _, name := range []string{"os", "os2"} {
		if err := r.RemoveContainer(ctx, "web", name); err != nil {
			t.Fatal(err)
		}
	}
	_, err = r.Start(ctx, "web")
	wantClass(t, "a start without a container", err, errdefs.FailedPrecondition)
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(r.dir, "state", "vms", string(rec.ID))); !os.IsNotExist(err) {
		t.Errorf("its folder stays: %v", err)
	}
}

// TestBootContainerFailsToStart: a container that cannot boot has ended, says why, and another one follows.
func TestBootContainerFailsToStart(t *testing.T) {
	fail := false
	r, ctx := newRig(t, func(r *rig) {
		r.world.Fault = func(call string) error {
			if fail && strings.HasPrefix(call, "driver.Launch") {
				return errdefs.Preconditionf("no")
			}
			return nil
		}
	}), t.Context()
	r.must(r.Create(ctx, sandbox()))
	r.must(r.AddBootContainer(ctx, "web", booting("os"), vm.GuestBoot{}))
	fail = true
	_, err := r.StartContainer(ctx, "web", "os")
	wantClass(t, "a start that fails", err, errdefs.FailedPrecondition)
	now := r.must(r.Inspect(ctx, "web"))
	if s := now.Container("os").Status; s.State != vm.ContainerTerminated || s.Reason != vm.ContainerStartError || now.State != vm.StateCreated {
		t.Fatalf("it could not start: %+v", now)
	}
	fail = false
	r.must(r.AddBootContainer(ctx, "web", booting("lost"), vm.GuestBoot{})) // whoever asked for it does not know
	now = r.must(r.AddBootContainer(ctx, "web", booting("os2"), vm.GuestBoot{}))
	if s := now.Container("lost").Status; s.State != vm.ContainerTerminated || s.Reason != vm.ContainerStartError {
		t.Errorf("one whose place was taken: %+v", s)
	}
	_, err = r.StartContainer(ctx, "web", "lost")
	wantClass(t, "one whose place was taken is started", err, errdefs.FailedPrecondition)
	r.must(r.StartContainer(ctx, "web", "os2"))
	r.await("web", "ready", ready)
}
