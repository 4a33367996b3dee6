package engine_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// mounting is the VM web, whose guest mounts a folder of an NFS server.
func mounting(server string) vm.Spec {
	s := spec("web")
	s.Volumes = []vm.Volume{{Name: "data", Kind: vm.VolumeNFS, NFS: &vm.NFS{Server: server, Path: "/data", Options: []string{"soft"}}}}
	s.Mounts = []vm.Mount{{Volume: "data", Path: "/data"}}
	return s
}

// TestNFSWaitsForItsServer: while the guest waits for a server, the record says why and the VM is not ready. A restart of the daemon
// changes nothing. When the server is there, nothing of it remains in the record.
func TestNFSWaitsForItsServer(t *testing.T) {
	var why atomic.Pointer[string]
	var args atomic.Pointer[string]
	fault := func(call string) error {
		if text := why.Load(); call == "agent.Setup" && text != nil {
			return guest.NewWaiting(*text)
		}
		return nil
	}
	r, ctx := newRig(t), t.Context()
	watch := func() {
		r.world.Fault = fault
		r.world.Process = func(p hypervisor.Plan) int {
			args.Store(&p.Boot.Cmdline)
			return 4711
		}
	}
	watch()
	says := func(text string) func(vm.Record) bool {
		return func(rec vm.Record) bool { return rec.Reason == vm.ReasonFailedMount && rec.Message == text }
	}
	why.Store(new("the server is away"))
	r.must(r.Launch(ctx, mounting("files")))
	if rec := r.await("web", "it says why it waits", says("the server is away")); rec.AgentReady || rec.State != vm.StateRunning {
		t.Errorf("it waits as %s, ready %v", rec.State, rec.AgentReady)
	}
	if got := *args.Load(); got != vm.ArgNFS {
		t.Errorf("the kernel has the arguments %q", got)
	}
	why.Store(new("the server refuses"))
	r.await("web", "it says the new reason", says("the server refuses"))
	why.Store(nil)
	rec := r.await("web", "it is ready", ready)
	if rec.Reason != "" || rec.Message != "" {
		t.Errorf("mounted, and still %s: %s", rec.Reason, rec.Message)
	}
	told := r.world.Guest(rec.ID).Identity()
	if told.VolumeSerials["data"] != "cocoon-"+string(rec.ID) || len(told.Volumes) != 1 || told.Volumes[0].NFS == nil || told.Volumes[0].NFS.Options[0] != "soft" {
		t.Errorf("the guest was told %+v", told)
	}

	// A VM that waits can be stopped, and then nothing says that it waits.
	r.must(r.Stop(ctx, "web", 0))
	why.Store(new("the server is away again"))
	r.must(r.Start(ctx, "web"))
	r.await("web", "it waits again", says("the server is away again"))
	if rec := r.must(r.Stop(ctx, "web", 0)); rec.Reason == vm.ReasonFailedMount || strings.Contains(rec.Message, "away") {
		t.Errorf("stopped: %s: %s", rec.Reason, rec.Message)
	}
}

// TestNFSCannotBeSaved: what needs the state of the guest is refused before anything changes. Images that boot themselves are refused.
func TestNFSCannotBeSaved(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	r.must(r.Launch(ctx, mounting("files")))
	was := r.await("web", "it is ready", ready)
	for what, verb := range map[string]func(context.Context) error{
		"snapshot": func(ctx context.Context) error {
			_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
			return err
		},
		"hibernate": func(ctx context.Context) error { _, err := r.Hibernate(ctx, "web", ""); return err },
	} {
		if err := verb(ctx); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "files:/data") || !strings.Contains(err.Error(), "volume data") {
			t.Errorf("%s: %v", what, err)
		}
		if now := r.must(r.Inspect(ctx, "web")); now.Revision != was.Revision || now.State != vm.StateRunning {
			t.Errorf("%s changed %+v", what, now)
		}
	}
	if _, err := r.Launch(ctx, mounting("a,b")); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "not the name or address") {
		t.Errorf("a server that is none: %v", err)
	}
}
