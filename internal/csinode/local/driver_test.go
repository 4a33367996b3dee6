package local

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// A driver knows the deadline of its caller, and may end the call a moment before the caller's own clock does.
func TestDriverIsBeforeTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended := status.Error(codes.Canceled, "stream terminated by RST_STREAM with error code: CANCEL")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := classify(ctx, ended, nil); !errdefs.Is(err, errdefs.Unavailable) {
			t.Errorf("a minute before: %v", err)
		}
		<-time.After(time.Minute - time.Millisecond)
		if err := classify(ctx, ended, nil); !errdefs.Is(err, errdefs.DeadlineExceeded) {
			t.Errorf("at the deadline: %v", err)
		}
		gone, leave := context.WithCancel(t.Context())
		leave()
		if err := classify(gone, ended, nil); !errdefs.Is(err, errdefs.Canceled) {
			t.Errorf("of a caller who has left: %v", err)
		}
	})
}
