package session

import (
	"testing"
	"time"
)

// TestClock observes guests once in 30 seconds.
func TestClock(t *testing.T) {
	const every = 30 * time.Second
	for _, c := range []struct {
		name   string
		up     []time.Duration // of the guest between two readings
		answer time.Duration   // how long it takes
		off    time.Duration
		wild   int
		right  int
	}{
		{"right", []time.Duration{every, every, every}, time.Millisecond, 0, 0, 3},
		{"somewhat fast", []time.Duration{every + 300*time.Millisecond, every + 300*time.Millisecond}, 0, 600 * time.Millisecond, 0, 2},
		{"much too fast", []time.Duration{5 * every, 5 * every}, 0, 8 * every, 2, 0},
		{"much too slow", []time.Duration{every / 2, every / 2}, 0, -every, 2, 0},
		{"paused once", []time.Duration{every, every / 2, every}, 0, -every / 2, 0, 1},
		{"answers too late", []time.Duration{5 * every, 5 * every}, 2 * clockSlack, 0, 0, 0},
	} {
		var k clock
		at, up := time.Now(), time.Duration(0)
		k.observe(reading{up: up, asked: at, answered: at.Add(c.answer)})
		for _, moved := range c.up {
			at, up = at.Add(every), up+moved
			k.observe(reading{up: up, asked: at, answered: at.Add(c.answer)})
		}
		if k.off != c.off || k.wild != c.wild || k.right != c.right {
			t.Errorf("%s: off %s, wild %d, right %d", c.name, k.off, k.wild, k.right)
		}
	}
}
