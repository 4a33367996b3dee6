// Package clock sets the clock of an appliance by servers of time (NTP): at once when the machine has a network, and steadily afterwards.
//
// Nothing waits for it, and no deadline of the machine depends on it. It knows no links.
package clock

import (
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/beevik/ntp"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	askTime   = 5 * time.Second  // for one server to answer
	firstWait = 4 * time.Second  // after a failure, doubled each time
	maxWait   = 5 * time.Minute  // after failures
	minPoll   = 64 * time.Second // while the clock is set
	maxPoll   = 1024 * time.Second
	good      = 50 * time.Millisecond // of an offset: the next question may be later

	slewed = 128 * time.Millisecond // an offset up to this is taken back slowly, so that no time is missing or there twice
	absurd = 1000 * time.Second     // an offset of a clock that was set before, which no single server is believed
	agree  = time.Second            // between servers that confirm each other
)

// Sample is what a server says.
type Sample struct {
	Server   string
	Offset   time.Duration // of its clock, from ours
	Distance time.Duration // by which it may be wrong
}

// Status says how the clock is.
type Status struct {
	Set    bool // by a server, since the start
	Sample      // the last one that was used
	Fault  string
}

// Machine has a clock.
type Machine interface {
	// Step sets the clock forward by d, which may be negative, at once.
	Step(d time.Duration) error
	// Slew lets the clock run faster or slower until it has gained d.
	Slew(d time.Duration) error
}

// Keeper keeps the clock of a machine. Its fields do not change.
type Keeper struct {
	Machine Machine
	Ask     func(ctx context.Context, server string) (Sample, error) // nil: by NTP
	Told    func(Status)                                             // is told of each attempt
	Log     *slog.Logger

	mu      sync.Mutex
	servers []string
	wake    chan struct{}
}

// Use says which servers are asked, from now on. None: nobody is asked.
func (k *Keeper) Use(servers []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if slices.Equal(k.servers, servers) {
		return
	}
	k.servers = slices.Clone(servers)
	if k.wake != nil {
		close(k.wake)
		k.wake = nil
	}
}

// asked returns the servers, and a channel that is closed when they change.
func (k *Keeper) asked() ([]string, <-chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.wake == nil {
		k.wake = make(chan struct{})
	}
	return k.servers, k.wake
}

// Run keeps the clock until ctx ends.
func (k *Keeper) Run(ctx context.Context) {
	var s Status
	poll, wait := minPoll, firstWait
	for ctx.Err() == nil {
		servers, changed := k.asked()
		next := wait
		if len(servers) > 0 {
			err := k.round(ctx, servers, &s)
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				if s.Fault == "" {
					k.Log.Warn("the clock is not set", "err", err)
				}
				s.Fault = err.Error()
				wait = min(2*wait, maxWait)
			default:
				s.Fault, wait = "", firstWait
				poll = min(2*poll, maxPoll)
				if s.Offset.Abs() > good {
					poll = minPoll
				}
				next = poll
			}
			k.Told(s)
		}
		next += rand.N(next / 8) // so that machines that started together do not ask together
		if len(servers) == 0 {
			next = maxWait
		}
		select {
		case <-ctx.Done():
		case <-changed:
			wait, poll = firstWait, minPoll
		case <-time.After(next):
		}
	}
}

// round asks all servers and sets the clock.
func (k *Keeper) round(ctx context.Context, servers []string, s *Status) error {
	ask := k.Ask
	if ask == nil {
		ask = query
	}
	var mu sync.Mutex
	var samples []Sample
	var faults []string
	var wg sync.WaitGroup
	for _, server := range servers {
		wg.Go(func() {
			x, err := ask(ctx, server)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				faults = append(faults, server+": "+err.Error())
				return
			}
			samples = append(samples, x)
		})
	}
	wg.Wait()
	if len(samples) == 0 {
		slices.Sort(faults)
		return errdefs.Unavailablef("no server of time answers: %s", strings.Join(faults, "; "))
	}
	best, friends := choose(samples)
	if s.Set && best.Offset.Abs() > absurd && friends < 2 {
		return errdefs.Unavailablef("%s says that the clock is %s off, and no other server agrees", best.Server, best.Offset.Round(time.Second))
	}
	set := k.Machine.Step
	if best.Offset.Abs() <= slewed {
		set = k.Machine.Slew
	}
	if err := set(best.Offset); err != nil {
		return err
	}
	if !s.Set || best.Offset.Abs() > slewed {
		k.Log.Info("the clock is set", "server", best.Server, "offset", best.Offset.Round(time.Millisecond))
	}
	s.Set, s.Sample = true, best
	return nil
}

// choose returns the sample with which most others agree, of these the one that is least wrong, and how many agree, itself included.
func choose(samples []Sample) (best Sample, friends int) {
	slices.SortFunc(samples, func(a, b Sample) int {
		return cmp.Or(cmp.Compare(a.Distance, b.Distance), cmp.Compare(a.Server, b.Server))
	})
	for _, s := range samples {
		n := 0
		for _, o := range samples {
			if (s.Offset - o.Offset).Abs() <= agree {
				n++
			}
		}
		if n > friends {
			best, friends = s, n
		}
	}
	return best, friends
}

// query asks a server by NTP.
func query(_ context.Context, server string) (Sample, error) {
	r, err := ntp.QueryWithOptions(server, ntp.QueryOptions{Timeout: askTime})
	if err == nil {
		err = r.Validate()
	}
	if err != nil {
		return Sample{}, err
	}
	return Sample{Server: server, Offset: r.ClockOffset, Distance: r.RootDistance}, nil
}
