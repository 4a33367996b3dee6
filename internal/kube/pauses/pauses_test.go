package pauses

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestGrowing(t *testing.T) {
	b := Growing(time.Second, 5*time.Second, 0)
	for i, want := range []time.Duration{1, 2, 4, 5, 5, 5} {
		if got := b.Step(); got != want*time.Second {
			t.Errorf("pause %d is %s, want %s", i, got, want*time.Second)
		}
	}
}

func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, wake := time.Now(), make(chan struct{}, 1)
		if !Sleep(t.Context(), wake, time.Second, false) || time.Since(began) != time.Second {
			t.Errorf("it slept %s", time.Since(began))
		}
		wake <- struct{}{}
		if !Sleep(t.Context(), wake, 0, true) || time.Since(began) != time.Second {
			t.Error("Sleep does not return when wake delivers a value")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if Sleep(ctx, wake, 0, true) || time.Since(began) != time.Minute+time.Second {
			t.Errorf("it slept %s", time.Since(began))
		}
	})
}
