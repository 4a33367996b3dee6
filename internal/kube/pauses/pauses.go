// Package pauses is how the virtual node waits between attempts. It retries nothing itself.
package pauses

import (
	"context"
	"math"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Many is the jitter of pauses after which many nodes ask the API server again.
const Many = 0.1

// Growing is a back-off that doubles from first to most. jitter is the part by which a pause may be longer. What users
// see of a pod has no jitter, as in the kubelet.
func Growing(first, most time.Duration, jitter float64) wait.Backoff {
	return wait.Backoff{Duration: min(first, most), Factor: 2, Jitter: jitter, Steps: math.MaxInt, Cap: most}
}

// Sleep waits for d or a wake-up (only for the wake-up when endless). It returns false when ctx has ended.
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
