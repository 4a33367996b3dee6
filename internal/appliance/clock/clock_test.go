package clock

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// pretender is a clock that is some time behind, and servers that say so.
type pretender struct {
	mu     sync.Mutex
	behind time.Duration
	lies   map[string]time.Duration // of servers
	down   bool
	asked  int
	steps  int
	slews  int
	told   Status
}

func (p *pretender) Step(d time.Duration) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.behind -= d
	p.steps++
	return nil
}

func (p *pretender) Slew(d time.Duration) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.behind -= d
	p.slews++
	return nil
}

func (p *pretender) ask(_ context.Context, server string) (Sample, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked++
	if p.down {
		return Sample{}, errors.New("no answer")
	}
	return Sample{Server: server, Offset: p.behind + p.lies[server], Distance: time.Millisecond}, nil
}

func (p *pretender) is(t *testing.T, what string, set bool, behind time.Duration, steps, slews int) {
	t.Helper()
	synctest.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.told.Set != set || p.behind != behind || p.steps != steps || p.slews != slews {
		t.Errorf("%s: set %v, %s behind, %d steps, %d slews; want %v, %s, %d, %d (%s)", what, p.told.Set, p.behind, p.steps, p.slews, set, behind, steps, slews, p.told.Fault)
	}
}

func (p *pretender) change(fn func()) { p.mu.Lock(); defer p.mu.Unlock(); fn() }

// A clock at 1970 is set when there is a network, and kept afterwards. A single server that is absurd is not believed then, several are.
func TestKeeper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &pretender{behind: 56 * 365 * 24 * time.Hour, lies: map[string]time.Duration{}}
		k := &Keeper{Machine: p, Ask: p.ask, Told: func(s Status) { p.change(func() { p.told = s }) }, Log: slog.New(slog.DiscardHandler)}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); k.Run(ctx) }()
		<-time.After(time.Hour)
		p.is(t, "without a network", false, 56*365*24*time.Hour, 0, 0)
		p.change(func() { p.down = true })
		k.Use([]string{"a"})
		<-time.After(time.Minute)
		p.is(t, "without an answer", false, 56*365*24*time.Hour, 0, 0)
		p.change(func() { p.down = false })
		<-time.After(maxWait)
		p.mu.Lock()
		first := p.slews // a clock that is right runs on
		p.mu.Unlock()
		p.is(t, "at last", true, 0, 1, first)
		p.change(func() { p.behind, p.slews = 100*time.Millisecond, 0 })
		<-time.After(2 * maxPoll)
		p.mu.Lock()
		if p.behind != 0 || p.steps != 1 || p.slews == 0 {
			t.Errorf("a small offset: %s behind, %d steps, %d slews", p.behind, p.steps, p.slews)
		}
		p.slews = 0
		p.behind = time.Hour
		p.mu.Unlock()
		<-time.After(2 * maxPoll)
		p.is(t, "an absurd offset by one server", true, time.Hour, 1, 0)
		k.Use([]string{"a", "b", "liar"})
		p.change(func() { p.lies["liar"] = -30 * time.Minute })
		synctest.Wait()
		<-time.After(time.Second)
		p.mu.Lock()
		if p.behind != 0 || p.steps != 2 {
			t.Errorf("an absurd offset by two servers: %s behind, %d steps", p.behind, p.steps)
		}
		p.asked = 0
		p.mu.Unlock()
		<-time.After(24 * time.Hour)
		p.mu.Lock()
		if rounds := p.asked / 3; rounds < 24*3600/1200 || rounds > 24*3600/1000 {
			t.Errorf("%d questions in a day to a server", rounds)
		}
		p.mu.Unlock()
		stop()
		<-ended
	})
}

// The protocol itself, with a server that says another time, and one that is not synchronized.
func TestQuery(t *testing.T) {
	for what, tc := range map[string]struct {
		stratum byte
		ok      bool
	}{"a server": {2, true}, "one that is not synchronized": {0, false}} {
		c, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		go func() {
			b := make([]byte, 100)
			n, from, err := c.ReadFrom(b)
			if err != nil || n < 48 {
				return
			}
			r := make([]byte, 48)
			r[0], r[1], r[2], r[3] = 4<<3|4, tc.stratum, 6, 0xec
			copy(r[24:32], b[40:48])
			now := time.Now().Add(time.Hour)
			stamp := uint64(now.Unix()+2208988800)<<32 | uint64(now.Nanosecond())<<32/1e9
			for _, at := range []int{16, 32, 40} {
				for i := range 8 {
					r[at+i] = byte(stamp >> (56 - 8*i))
				}
			}
			_, _ = c.WriteTo(r, from)
		}()
		s, err := query(t.Context(), c.LocalAddr().String())
		if (err == nil) != tc.ok || tc.ok && (s.Offset-time.Hour).Abs() > time.Minute {
			t.Errorf("%s: %v, %v", what, s, err)
		}
	}
}

// What the file says never sets a clock back.
func TestFloor(t *testing.T) {
	h := &Host{Last: filepath.Join(t.TempDir(), "clock")}
	for _, text := range []string{"", "x", "-1", "1000"} {
		if text != "" {
			if err := os.WriteFile(h.Last, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		before := time.Now()
		if err := h.Floor(); err != nil || time.Now().Before(before) {
			t.Errorf("%q: %v", text, err)
		}
	}
}
