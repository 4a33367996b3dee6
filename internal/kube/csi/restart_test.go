package csi

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// written is what was logged.
type written struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (w *written) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.Write(p)
}

// take returns what was written since the last call.
func (w *written) take() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.text.Reset()
	return w.text.String()
}

// TestNodeRestarts: a node that does not answer for some seconds is no reason for a warning. One that stays away is, and so is another
// failure.
func TestNodeRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{}
		p, _ := plugins(n, &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: "n1"}})
		var log written
		p.Log = slog.New(slog.NewTextHandler(&log, nil))
		fail := func(err error) {
			n.mu.Lock()
			n.fail, n.away = err, err
			n.mu.Unlock()
			n.set() // the driver watch ends
		}
		passed := func(d time.Duration) string {
			time.Sleep(d) //nolint:forbidigo // the fake clock of synctest
			synctest.Wait()
			return log.take()
		}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		n.fail, n.away = errdefs.Unavailablef("cannot reach cocoond"), errdefs.Unavailablef("cannot reach cocoond")
		go func() { done <- p.Run(ctx) }()
		if got := passed(5 * time.Second); got != "" {
			t.Errorf("cocoond starts: %s", got)
		}
		for range 3 {
			fail(nil)
			if got := passed(2 * sweepEvery); got != "" {
				t.Errorf("cocoond runs: %s", got)
			}
			fail(errdefs.Unavailablef("lost the connection to cocoond"))
			if got := passed(20 * time.Second); got != "" {
				t.Errorf("cocoond restarts: %s", got)
			}
		}
		if got := passed(3 * patience); !strings.Contains(got, "published volumes not listed") || !strings.Contains(got, "cluster not told of CSI drivers") {
			t.Errorf("cocoond stays away: %s", got)
		}
		fail(nil)
		passed(2 * sweepEvery)
		fail(errdefs.Preconditionf("no permission to talk to cocoond"))
		if got := passed(2 * sweepEvery); strings.Count(got, "published volumes not listed") != 1 || !strings.Contains(got, "cluster not told of CSI drivers") {
			t.Errorf("cocoond refuses: %s", got)
		}
		stop()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
