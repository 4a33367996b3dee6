// Package pauses has the back-off and the sleep with which the virtual node waits between attempts. It retries nothing itself.
package pauses

import (
	"context"
	"math"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Many is the jitter of requests that many nodes send to the API server at the same time.
const Many = 0.1

// Growing returns a back-off whose pauses double from first to most. jitter is the largest random extension of a pause, as a
// fraction of the pause. As in the kubelet, pauses that users see in a pod's status have no jitter.
func Growing(first, most time.Duration, jitter float64) wait.Backoff {
	return wait.Backoff{Duration: min(first, most), Factor: 2, Jitter: jitter, Steps: math.MaxInt, Cap: most}
}

// Sleep waits until d has passed, wake delivers a value or ctx ends. If endless is set, it ignores d. It returns false if ctx
// has ended.
func Sleep(ctx context.Context, wake <-chan struct{}, d time.Duration, endless bool) bool {
	var timer <-chan time.Time
	if !endless {
		t := time.NewTimer(max(d, 0))
		defer t.Stop()
		timer = t.C
	}
	select {
	case <-ctx.Done():
		return false
	case <-wake:
	case <-timer:
	}
	return true
}
