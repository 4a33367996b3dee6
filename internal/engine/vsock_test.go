package engine_test

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// The record of a VM has the context id of its virtio socket while it runs, also over a restart of the engine. No snapshot has the socket.
func TestVSOCK(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	s := cloud()
	s.Hardware = &vm.Hardware{VSOCK: true}
	_, err := r.Launch(ctx, s)
	wantClass(t, "on a node without sockets", err, errdefs.Unsupported)
	r.cfg.VSOCK = true
	r.restart()
	first := r.must(r.Launch(ctx, s))
	s.Name = "other"
	second := r.must(r.Launch(ctx, s))
	if first.CID == 0 || second.CID == 0 || first.CID == second.CID {
		t.Errorf("the context ids are %d and %d", first.CID, second.CID)
	}
	r.restart()
	if rec := r.must(r.Inspect(ctx, "web")); rec.CID != first.CID {
		t.Errorf("after a restart of the engine it is %d, and was %d", rec.CID, first.CID)
	}
	_, err = r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	wantClass(t, "a snapshot", err, errdefs.FailedPrecondition)
	_, err = r.Hibernate(ctx, "web", "")
	wantClass(t, "a hibernation", err, errdefs.FailedPrecondition)
	if rec := r.must(r.Stop(ctx, "web", 0)); rec.CID != 0 {
		t.Errorf("a stopped VM has %d", rec.CID)
	}
	r.cfg.VSOCK = false
	r.restart()
	_, err = r.Start(ctx, "web")
	wantClass(t, "a start after the operator has changed his mind", err, errdefs.Unsupported)
	s.Name, s.Hardware = "none", nil
	if rec := r.must(r.Launch(ctx, s)); rec.CID != 0 {
		t.Errorf("a VM without a socket has %d", rec.CID)
	}
}
