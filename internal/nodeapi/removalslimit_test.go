package nodeapi

import (
	"testing"
	"testing/synctest"
	"time"
)

// A caller that neither ends nor reads must not keep events from others.
func TestTheEventOfARemovalWaitsWithALimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r removals
		end := r.begin(t.Context(), "web")
		began := time.Now()
		end(nil)
		r.wait(t.Context(), "web")
		if took := time.Since(began); took != answerTime {
			t.Errorf("it waited %s", took)
		}
		if len(r.pending) > 0 {
			t.Errorf("still pending: %v", r.pending)
		}
		r.wait(t.Context(), "web")
	})
}
