package stats

import (
	"context"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// The rules of asking guests. Who scrapes waits for them, so it is short; of a guest that is late it is told what it used
// when it answered last.
const (
	askLimit  = time.Second      // for all answers of one scrape
	askAtOnce = 16               // guests that are asked at a time
	askFresh  = time.Second      // an answer younger than that is not asked for again
	askStale  = 45 * time.Second // one that is older counts no more: three scrapes of metrics-server
)

// ContainerUsage is the part of its VM's use that one container has: what the guest counts for it, and as much as the
// others of what nobody in the guest used (its kernel, the emulation). The parts of one moment add up to the VM's use.
type ContainerUsage struct {
	Name            string
	At              time.Time
	CPU             time.Duration // of all its runs since ProcessUsage.Since; never falls
	RSS, WorkingSet uint64        // bytes
}

// answers are what guests said of all their containers, those that have ended included.
type answers map[vm.ID][]guest.ContainerStats

// ask asks the guests with more than one running container that have not said lately what these use.
func (c *Collector) ask(ctx context.Context, all []VM) answers {
	if c.cfg.Inside == nil {
		return nil
	}
	var due []VM
	c.mu.Lock()
	for _, v := range all {
		if v.Several && len(v.Containers) > 1 && v.PID > 0 {
			if a := c.accounts[v.ID]; a == nil || !a.shares.fresh(v) {
				due = append(due, v)
			}
		}
	}
	c.mu.Unlock()
	if len(due) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	said := answers{}
	var mu sync.Mutex
	var asked sync.WaitGroup
	next := make(chan vm.ID)
	for range min(askAtOnce, len(due)) {
		asked.Go(func() {
			for id := range next {
				stats, err := c.cfg.Inside(ctx, id)
				if err != nil {
					c.cfg.Log.Debug("guest not asked for its containers", "vm", id, "err", err)
					continue
				}
				mu.Lock()
				said[id] = stats
				mu.Unlock()
			}
		})
	}
	for _, v := range due {
		next <- v.ID // not for long: when the time is over, every question fails at once
	}
	close(next)
	asked.Wait()
	return said
}

// shares are the parts of its VM's use that the containers of one VM have.
type shares struct {
	whole time.Duration            // of the VM's CPU time is divided so far
	cpu   map[string]time.Duration // what each got of it
	said  map[string]uint64        // nanoseconds that the guest counted for each at that time; nil: it did not say
	last  []ContainerUsage         // as they were told
	pid   int                      // of the process that they were told of
}

// fresh reports whether what was told of v's containers just now will do.
func (s *shares) fresh(v VM) bool {
	return len(s.last) > 0 && time.Since(s.last[0].At) < askFresh && s.pid == v.PID &&
		slices.EqualFunc(s.last, v.Containers, func(u ContainerUsage, name string) bool { return u.Name == name })
}

// divide returns the parts of u, which v used. A guest that has not answered this time but did lately has them as they
// were; one that is silent longer, or whose agent does not know, has them in equal shares.
func (s *shares) divide(v VM, u Usage, said []guest.ContainerStats) []ContainerUsage {
	if len(said) == 0 && len(v.Containers) > 1 && s.said != nil && s.pid == v.PID && len(s.last) > 0 && u.At.Sub(s.last[0].At) < askStale {
		return slices.DeleteFunc(slices.Clone(s.last), func(u ContainerUsage) bool { return !slices.Contains(v.Containers, u.Name) })
	}
	counted, memory := map[string]uint64{}, map[string]uint64{}
	for _, c := range said { // by a guest, which may say anything
		counted[c.Name] = uint64(min(max(c.CPUSeconds, 0), maxSeconds) * float64(time.Second))
		memory[c.Name] = uint64(max(c.Memory, 0))
	}
	cpu, held := make([]uint64, len(v.Containers)), make([]uint64, len(v.Containers))
	for i, name := range v.Containers {
		if before := s.said[name]; s.whole == 0 || s.said != nil {
			cpu[i] = counted[name]
			if before <= cpu[i] { // else the guest has booted since
				cpu[i] -= before
			}
		}
		held[i] = memory[name]
	}
	cpu = divide(uint64(max(u.Process.CPU-s.whole, 0)), cpu)
	rss, working := divide(u.Process.RSS, held), divide(u.Process.WorkingSet, held)
	if s.cpu == nil {
		s.cpu = map[string]time.Duration{}
	}
	s.whole, s.pid, s.said, s.last = u.Process.CPU, v.PID, nil, nil
	if len(said) > 0 {
		s.said = counted
	}
	for i, name := range v.Containers {
		s.cpu[name] += time.Duration(cpu[i])
		s.last = append(s.last, ContainerUsage{Name: name, At: u.At, CPU: s.cpu[name], RSS: rss[i], WorkingSet: working[i]})
	}
	return slices.Clone(s.last)
}

// maxSeconds bounds the CPU time that a guest may claim, so that its nanoseconds can be counted: 30 years.
const maxSeconds = 1e9

// divide shares whole among those who have used own of it: each gets that and as much as the others of what is left. If
// they say that they used more than there is, each gets its proportion. The parts add up to whole.
func divide(whole uint64, own []uint64) []uint64 {
	out := make([]uint64, len(own))
	var sum float64
	for _, n := range own {
		sum += float64(n)
	}
	left := whole
	for i, n := range own {
		if sum > float64(whole) {
			n = uint64(float64(whole) * (float64(n) / sum))
		}
		out[i] = min(n, left)
		left -= out[i]
	}
	for i := range out {
		n := left / uint64(len(out)-i)
		out[i] += n
		left -= n
	}
	return out
}
