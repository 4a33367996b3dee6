package appliance

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/errdefs"
	freeport "cocoonstack.io/cocoon/internal/testkit/port"
)

// A machine whose state cannot be read tells callers so, and the person in front of it why. Nobody adopts it.
func TestUnreadable(t *testing.T) {
	addr, err := freeport.Free()
	if err != nil {
		t.Fatal(err)
	}
	console := &screen{on: make(chan struct{})}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- Unreadable(ctx, addr, errdefs.DataLossf("row 7 is damaged"), console, slog.New(slog.DiscardHandler))
	}()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	var fingerprint string
	for fingerprint == "" && ctx.Err() == nil {
		fingerprint, _ = capsulewire.PeerFingerprint(ctx, addr)
	}
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(credentials.NewTLS(capsulewire.PinnedTLS(fingerprint))))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := capsulev1.NewIdentityServiceClient(conn).Adopt(ctx, &capsulev1.AdoptRequest{}); status.Code(err) != codes.DataLoss {
		t.Errorf("adoption: %v", err)
	}
	if _, err := capsulev1.NewCapsuleServiceClient(conn).GetInfo(ctx, &capsulev1.GetInfoRequest{}); status.Code(err) != codes.DataLoss {
		t.Errorf("info: %v", err)
	}
	if said := console.said(); !strings.Contains(said, "STATE UNREADABLE") || !strings.Contains(said, "row 7 is damaged") {
		t.Errorf("the console says %q", said)
	}
}

// The console shows the fingerprint in the form in which capsulectl asks for it.
func TestBanner(t *testing.T) {
	print := strings.Repeat("0f", 32)
	for adopted, want := range map[bool]string{false: "nobody has adopted it", true: "it is adopted"} {
		if got := banner("capsule-a3f2", print, adopted); !strings.Contains(got, "capsule-a3f2: "+want+"\n") || !strings.Contains(got, capsulewire.FingerprintRows(print)) {
			t.Errorf("adopted %v: %q", adopted, got)
		}
	}
}
