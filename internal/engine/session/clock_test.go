package session

import (
	"slices"
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

// drive observes a guest once in 30 seconds, and sets its clock whenever that is due. Its clock gains what is in gains between
// two readings.
func drive(k *clock, at time.Time, up time.Duration, gains ...time.Duration) (time.Time, time.Duration) {
	const every = 30 * time.Second
	for _, gain := range gains {
		at, up = at.Add(every), up+every+gain
		k.observe(reading{up: up, asked: at, answered: at})
		if k.off.Abs() > clockSlack {
			k.corrected(at)
		}
	}
	return at, up
}

// A clock that is slightly off has to be set again and again, which is wrong too, until it has kept the time for long enough.
func TestClockThatIsSetAgainAndAgain(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name  string
		gains []time.Duration
		wrong bool
	}{
		{"slightly fast", slices.Repeat([]time.Duration{400 * ms}, 9), true},
		{"slightly slow", slices.Repeat([]time.Duration{-600 * ms}, 6), true},
		{"set only twice", slices.Repeat([]time.Duration{400 * ms}, 8), false},
		{"so slightly that it is set less often", slices.Repeat([]time.Duration{100 * ms}, 100), false},
		{"paused now and then", slices.Repeat([]time.Duration{-700 * ms, 0}, 20), false},
		{"paused for long", slices.Repeat([]time.Duration{-5 * time.Second, 0}, 20), false},
	} {
		var k clock
		at := time.Now()
		k.observe(reading{asked: at, answered: at})
		at, up := drive(&k, at, 0, c.gains...)
		if k.wrong() != c.wrong {
			t.Errorf("%s: wrong is %t after %d sets", c.name, k.wrong(), len(k.sets))
		}
		if !c.wrong {
			continue
		}
		at, up = drive(&k, at, up, 0, 0, 0, 0, 0)
		if k.steady() {
			t.Errorf("%s: it counts as right so soon", c.name)
		}
		drive(&k, at, up, make([]time.Duration, 20)...)
		if !k.steady() || k.wrong() {
			t.Errorf("%s: it does not count as right after ten minutes without an error", c.name)
		}
	}
}

// Somebody in a guest may set its clock; a clock that jumps each time runs at a wrong speed.
func TestClockOfAnotherAgent(t *testing.T) {
	at := time.Now()
	k := clock{wall: true}
	k.observe(reading{asked: at, answered: at})
	at, up := drive(&k, at, 0, time.Hour, 0)
	if k.off != 0 || k.wrong() {
		t.Errorf("set by its guest: off %s, wild %d", k.off, k.wild)
	}
	drive(&k, at, up, time.Minute)
	if k.off != 0 {
		t.Errorf("one jump: off %s", k.off)
	}
	k = clock{wall: true}
	k.observe(reading{asked: at, answered: at})
	drive(&k, at, 0, time.Minute, time.Minute)
	if !k.wrong() {
		t.Errorf("three times as fast: wild %d", k.wild)
	}
}
