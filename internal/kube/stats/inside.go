package stats

import (
	"context"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// Limits of queries to guests. A scrape waits for the guests, so the timeout is short. If a guest does not answer in time, its
// last answer is used.
const (
	askLimit  = time.Second      // timeout for all answers of one scrape
	askAtOnce = 16               // guests asked concurrently
	askFresh  = time.Second      // a younger answer is reused
	askStale  = 45 * time.Second // an older answer is not used; the time of three scrapes of metrics-server
)

// ContainerUsage is one container's share of its VM's usage: the usage that the guest counts for the container, plus an equal
// part of the usage that belongs to no container (the guest's kernel, the emulation). The shares of one measurement add up to
// the VM's usage.
type ContainerUsage struct {
	Name            string
	At              time.Time
	CPU             time.Duration // of all runs of the container since ProcessUsage.Since; never decreases
	RSS, WorkingSet uint64        // bytes
}

// answers are the reports of guests about all their containers, including ended ones, and their volumes.
type answers map[vm.ID]guest.Stats

// ask requests the usage of guests with several running containers or with volumes of claims, unless their last answer is recent.
func (c *Collector) ask(ctx context.Context, all []VM) answers {
	if c.cfg.Inside == nil {
		return nil
	}
	var due []VM
	c.mu.Lock()
	for _, v := range all {
		if several := v.Several && len(v.Containers) > 1; (several || len(v.Claims) > 0) && v.PID > 0 {
			if a := c.accounts[v.ID]; a == nil || several && !a.shares.fresh(v) || len(v.Claims) > 0 && !a.volumes.fresh(v) {
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
					c.cfg.Log.Debug("guest not asked for its usage", "vm", id, "err", err)
					continue
				}
				mu.Lock()
				said[id] = stats
				mu.Unlock()
			}
		})
	}
	for _, v := range due {
		next <- v.ID // does not block for long, because every query fails immediately after the timeout
	}
	close(next)
	asked.Wait()
	return said
}

// shares holds the containers' shares in the usage of one VM.
type shares struct {
	whole time.Duration            // CPU time of the VM that is already divided
	cpu   map[string]time.Duration // each container's part of whole
	said  map[string]uint64        // the guest's count for each container at that time, in nanoseconds; nil: no answer
	last  []ContainerUsage         // the shares that were reported last
	pid   int                      // the VM's process at the time of last
}

// fresh reports whether the last reported shares of v's containers are recent enough.
func (s *shares) fresh(v VM) bool {
	return len(s.last) > 0 && time.Since(s.last[0].At) < askFresh && s.pid == v.PID &&
		slices.EqualFunc(s.last, v.Containers, func(u ContainerUsage, name string) bool { return u.Name == name })
}

// divide returns the containers' shares of u, the usage of v. If the guest has not answered now but has recently, it returns
// the last shares. If the guest has not answered for longer, or its agent does not count, the shares are equal.
func (s *shares) divide(v VM, u Usage, said []guest.ContainerStats) []ContainerUsage {
	if len(said) == 0 && len(v.Containers) > 1 && s.said != nil && s.pid == v.PID && len(s.last) > 0 && u.At.Sub(s.last[0].At) < askStale {
		return slices.DeleteFunc(slices.Clone(s.last), func(u ContainerUsage) bool { return !slices.Contains(v.Containers, u.Name) })
	}
	counted, memory := map[string]uint64{}, map[string]uint64{}
	for _, c := range said { // data of a guest is not trusted
		counted[c.Name] = uint64(min(max(c.CPUSeconds, 0), maxSeconds) * float64(time.Second))
		memory[c.Name] = uint64(max(c.Memory, 0))
	}
	cpu, held := make([]uint64, len(v.Containers)), make([]uint64, len(v.Containers))
	for i, name := range v.Containers {
		if before := s.said[name]; s.whole == 0 || s.said != nil {
			cpu[i] = counted[name]
			if before <= cpu[i] { // otherwise the guest has rebooted meanwhile
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

// maxSeconds is the largest CPU time that a guest may report, about 30 years, so that its nanoseconds fit the counter.
const maxSeconds = 1e9

// divide splits whole: each part gets its amount in own, plus an equal part of the rest. If own adds up to more than whole,
// each part is in proportion to own. The parts always add up to whole.
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
