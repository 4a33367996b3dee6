package appliance

import (
	"crypto/ed25519"
	"log/slog"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/desired"
	"cocoonstack.io/cocoon/internal/appliance/identity"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/journal/journaltest"
)

// served is a door that listens, and whose workloads nobody runs.
type served struct {
	t    *testing.T
	door *Door
	addr string
}

// serve serves a door with the parts that a test gives.
func serve(t *testing.T, d Deps) *served {
	t.Helper()
	ctx, docs := t.Context(), journaltest.NewDocuments()
	d.Documents, d.Log = docs, slog.New(slog.DiscardHandler)
	var err error
	if d.Identity, err = identity.Open(ctx, identity.Config{Documents: docs, Age: func() time.Duration { return 0 }, Now: time.Now, Log: d.Log}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Identity.Close() })
	if d.Desired, err = desired.Open(ctx, docs, time.Now, d.Log); err != nil {
		t.Fatal(err)
	}
	door, err := New(ctx, Config{Spool: t.TempDir(), Silent: true}, d)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, ended := door.server(), make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return &served{t: t, door: door, addr: l.Addr().String()}
}

// as connects with a key of that role.
func (s *served) as(role capsulev1.Role) *grpc.ClientConn {
	s.t.Helper()
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		s.t.Fatal(err)
	}
	id := s.door.deps.Identity
	if _, err := id.Add(s.t.Context(), public, role.String(), role, ""); err != nil {
		s.t.Fatal(err)
	}
	c, err := grpc.NewClient(s.addr, grpc.WithTransportCredentials(credentials.NewTLS(capsulewire.PinnedTLS(id.Fingerprint()))), grpc.WithPerRPCCredentials(capsulewire.Credentials(private, id.ID())))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// wants puts a workload of an administrator into the store.
func (s *served) wants(w *capsulev1.Workload) {
	s.t.Helper()
	if _, err := s.door.deps.Desired.Apply(s.t.Context(), w, false, func([]workload.Row) error { return nil }); err != nil {
		s.t.Fatal(err)
	}
}

// code checks the answer of a call.
func (s *served) code(what string, err error, want codes.Code) {
	s.t.Helper()
	if status.Code(err) != want {
		s.t.Errorf("%s: %v, want %v", what, err, want)
	}
}
