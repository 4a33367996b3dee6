package probing

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// running starts a scheduler on the fake clock of synctest.
func running(t *testing.T) (s *Scheduler, stop func()) {
	s = NewScheduler()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = s.Run(ctx)
	}()
	return s, func() { cancel(); <-ended }
}

func TestChecksRunWhenTheyAreDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, stop := running(t)
		began := time.Now()
		ran := make(chan string, 100)
		for _, n := range []int{7, 3, 5} {
			s.Start(time.Duration(n)*time.Second, func(context.Context) (time.Duration, bool) {
				ran <- fmt.Sprintf("%d@%d", n, int(time.Since(began).Seconds()))
				return 10 * time.Second, time.Since(began) < 20*time.Second
			})
		}
		<-time.After(time.Minute)
		stop()
		close(ran)
		if got := strings.Join(slices.Collect(values(ran)), " "); got != "3@3 5@5 7@7 3@13 5@15 7@17 3@23 5@25 7@27" {
			t.Error(got)
		}
	})
}

func values(c <-chan string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for s := range c {
			if !yield(s) {
				return
			}
		}
	}
}

// A thousand checks of one period wake the process ten times a second. Each runs at most half a grid step off its time.
func TestLongWaitsShareWakeUps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, stop := running(t)
		const checks, period = 1000, 5 * time.Second
		began := time.Now()
		var mu sync.Mutex
		wakes, runs := map[time.Duration]bool{}, 0
		for i := range checks {
			s.Start(period*time.Duration(i)/checks, func(context.Context) (time.Duration, bool) {
				mu.Lock()
				defer mu.Unlock()
				if at := time.Since(began); at >= 2*period {
					wakes[at] = true
					runs++
				}
				return period, true
			})
		}
		exact := make(chan time.Duration, 1)
		s.Start(1234*time.Millisecond, func(context.Context) (time.Duration, bool) { exact <- time.Since(began); return 0, false })
		<-time.After(4*period - time.Millisecond)
		stop()
		if want := int(2 * period / grid); runs < 2*checks-checks/10 || len(wakes) > want {
			t.Errorf("%d runs at %d times, want about %d at no more than %d", runs, len(wakes), 2*checks, want)
		}
		if at := <-exact; at != 1234*time.Millisecond {
			t.Errorf("a short delay ended after %s", at)
		}
	})
}

func TestAStoppedCheckRunsNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, stop := running(t)
		defer stop()
		runs := 0
		waiting := s.Start(time.Second, func(context.Context) (time.Duration, bool) { runs++; return time.Second, true })
		<-time.After(3500 * time.Millisecond)
		waiting.Stop()
		<-time.After(time.Minute)
		if runs != 3 {
			t.Errorf("ran %d times", runs)
		}
		cut := false
		inside := s.Start(0, func(ctx context.Context) (time.Duration, bool) {
			<-ctx.Done() // ended only by Stop
			cut = true
			return 0, true
		})
		<-time.After(time.Second)
		inside.Stop()
		inside.Stop()
		synctest.Wait()
		if !cut {
			t.Error("a run in progress was not cancelled")
		}
		if len(s.heap) != 0 {
			t.Errorf("%d tasks are left", len(s.heap))
		}
	})
}

func TestSlowChecksHoldNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, stop := running(t)
		s.Start(0, func(ctx context.Context) (time.Duration, bool) { <-ctx.Done(); return 0, true })
		others := 0
		s.Start(0, func(context.Context) (time.Duration, bool) { others++; return time.Second, true })
		<-time.After(10500 * time.Millisecond)
		stop() // also waits for the slow check, whose context has ended
		if others != 11 {
			t.Errorf("the other check ran %d times", others)
		}
	})
}
