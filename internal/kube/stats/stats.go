// Package stats measures the resource usage of VMs and their host, from /proc, cgroups and link counters. It serves the result
// like a kubelet (/stats/summary, /metrics/resource) and to Prometheus (vk_cocoon_*).
//
// It starts no process. It queries only the kernel and, for VMs with several containers, their guests. Its Source lists the
// VMs.
package stats

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// VM describes the VM of a pod.
type VM struct {
	ID        vm.ID
	Name      string // name of the VM
	Namespace string // namespace of the pod; Pod and PodUID are also the pod's
	Pod       string
	UID       string
	Backend   string // hypervisor driver

	Containers []string // running containers of the pod
	Several    bool     // the VM may have several containers, and the guest counts the usage of each

	Claims map[string]string // names of PersistentVolumeClaims, by the names of their volumes in the VM

	PID       int // pid of the hypervisor process; 0 if none runs
	StartedAt time.Time
	Taps      []Tap
	COW       string // path of the writable disk; "" if there is none
}

// Tap is the host side of a VM's NIC.
type Tap struct {
	Name  string
	NetNS string // path of the tap's network namespace; "" for that of this process
}

// Config configures a Collector.
type Config struct {
	Node   string
	Proc   string // "" is /proc
	Root   string // directory on the file system that holds the VMs' disks
	Source func() []VM
	// Inside asks a guest for the usage of its containers, if it has several, and of its volumes. Nil: the containers get equal
	// shares, and the usage of volumes is not known.
	Inside func(ctx context.Context, id vm.ID) (guest.Stats, error)
	Log    *slog.Logger
	// Owns reports whether the process with v.PID is v's hypervisor. A pid may be of another machine or of a later process. Nil:
	// the process is v's if its arguments name the VM.
	Owns func(proc string, v VM) bool
}

// Collector measures on demand. It stores only the state that lets counters continue when a VM gets a new process. It is safe
// for concurrent use.
type Collector struct {
	cfg   Config
	host  Host
	links func(netns string) (map[string]link, error)

	asking   sync.Mutex // only one scrape at a time asks guests
	mu       sync.Mutex
	cgroup2  string // mount point of cgroup v2; "" if there is none
	accounts map[vm.ID]*account
}

// New returns a Collector.
func New(cfg Config) (*Collector, error) {
	if cfg.Source == nil || cfg.Log == nil {
		return nil, errdefs.Invalidf("statistics need a source of VMs and a logger")
	}
	if cfg.Owns == nil {
		cfg.Owns = named
	}
	h := Host{Proc: cfg.Proc, Root: cfg.Root}
	return &Collector{cfg: cfg, host: h, links: readLinks, cgroup2: h.cgroup2(), accounts: map[vm.ID]*account{}}, nil
}

// Usage is the usage of one VM. A value that could not be measured is nil, because unknown is not zero.
type Usage struct {
	VM      VM
	At      time.Time
	Process *ProcessUsage // nil if no process of the VM runs on this host
	// Containers are the shares of the running containers in Process. Nil unless requested.
	Containers []ContainerUsage
	Volumes    []VolumeUsage // of claims, from the last answer of the guest. Nil unless requested
	Network    *NetworkUsage
	Disk       *uint64 // bytes that the writable disk occupies
}

// ProcessUsage is the usage of the hypervisor process, which includes the guest.
type ProcessUsage struct {
	Since      time.Time     // when CPU was zero: the first observed start of the VM
	CPU        time.Duration // of all runs since then; never decreases
	RSS        uint64        // bytes of resident memory
	WorkingSet uint64        // bytes of the VM's cgroup without inactive file pages; RSS if the VM has no cgroup of its own
}

// NetworkUsage counts bytes and errors from the guest's side: Rx are the bytes that the host sent. The counters never
// decrease.
type NetworkUsage struct {
	RxBytes, TxBytes   uint64
	RxErrors, TxErrors uint64
}

// Collect measures every VM of the Source, in the Source's order.
func (c *Collector) Collect() []Usage { return c.collect(c.cfg.Source(), false, nil) }

// CollectContainers is Collect with Containers, for which it asks the guests.
func (c *Collector) CollectContainers(ctx context.Context) []Usage {
	c.asking.Lock()
	defer c.asking.Unlock()
	all := c.cfg.Source()
	return c.collect(all, true, c.ask(ctx, all))
}

func (c *Collector) collect(all []VM, containers bool, said answers) []Usage {
	c.mu.Lock()
	defer c.mu.Unlock()
	links := map[string]map[string]link{}
	out := make([]Usage, len(all))
	known := make(map[vm.ID]bool, len(all))
	var r reader
	for i, v := range all {
		known[v.ID] = true
		a := c.account(v.ID)
		u := Usage{VM: v, Disk: occupied(v.COW)}
		u.Process = c.process(&r, v, a)
		u.At = time.Now()
		if u.Process != nil {
			u.Network = c.network(v, a, links)
		}
		if u.Process != nil && containers {
			u.Containers = a.containers(v, u, said[v.ID].Containers)
			u.Volumes = a.volumes.told(v, u.At, said)
		}
		out[i] = u
	}
	for id := range c.accounts {
		if !known[id] {
			delete(c.accounts, id)
		}
	}
	return out
}

// account returns the account of a VM. Precondition: mu is held.
func (c *Collector) account(id vm.ID) *account {
	a := c.accounts[id]
	if a == nil {
		a = &account{taps: map[string]*tapAccount{}}
		c.accounts[id] = a
	}
	return a
}

// total is a counter that continues when its source restarts at zero.
type total struct{ before, last uint64 }

// renew is called when the source has been replaced.
func (t *total) renew() { t.before, t.last = t.before+t.last, 0 }

// now adds a reading. A reading that is lower than the last one means that the source has restarted.
func (t *total) now(v uint64) uint64 {
	if v < t.last {
		t.renew()
	}
	t.last = v
	return t.before + v
}

// account is the state of a VM between two measurements.
type account struct {
	pid    int
	start  uint64 // start of the process, in ticks since boot; identifies the process together with the pid
	cgroup string // directory of the VM's own cgroup; "" if it has none
	since  time.Time
	cpu    total
	taps   map[string]*tapAccount
	shares shares

	volumes volumeAnswer
}

// containers returns the shares of v's containers in u.
func (a *account) containers(v VM, u Usage, said []guest.ContainerStats) (out []ContainerUsage) {
	switch {
	case v.Several && a.shares.fresh(v):
		return slices.Clone(a.shares.last)
	case v.Several:
		return a.shares.divide(v, u, said)
	}
	for _, name := range v.Containers {
		out = append(out, ContainerUsage{Name: name, At: u.At, CPU: u.Process.CPU, RSS: u.Process.RSS, WorkingSet: u.Process.WorkingSet})
	}
	return out
}

type tapAccount struct {
	index  int
	totals [4]total
}

// process measures the hypervisor process of v. It returns nil if the process is not visible on this host.
func (c *Collector) process(r *reader, v VM, a *account) *ProcessUsage {
	if v.PID <= 0 {
		return nil
	}
	st, err := c.host.process(r, v.PID)
	if err != nil {
		return nil // the process has ended, or the pid is of another machine
	}
	if v.PID != a.pid || st.start != a.start {
		if !c.cfg.Owns(c.host.proc(), v) {
			return nil
		}
		a.cpu.renew()
		a.pid, a.start = v.PID, st.start
		a.cgroup = c.host.ownCgroup(r, c.cgroup2, v)
		if a.since.IsZero() {
			a.since = v.StartedAt
		}
	}
	u := &ProcessUsage{Since: a.since, RSS: st.rss, WorkingSet: st.rss}
	used := st.cpu
	if a.cgroup != "" {
		ns, ok := r.cgroupCPU(a.cgroup)
		if !ok {
			return nil // the cgroup was removed with the process; do not mix the values of cgroup and /proc in one counter
		}
		used = ns
		if n, ok := r.cgroupMemory(a.cgroup); ok {
			u.WorkingSet = n
		}
	}
	u.CPU = time.Duration(a.cpu.now(max(used, a.cpu.last)))
	return u
}

// network returns the sum of v's taps, or nil if a tap is not visible.
func (c *Collector) network(v VM, a *account, seen map[string]map[string]link) *NetworkUsage {
	if len(v.Taps) == 0 {
		return nil
	}
	var sum [4]uint64
	for _, t := range v.Taps {
		there, ok := seen[t.NetNS]
		if !ok {
			var err error
			if there, err = c.links(t.NetNS); err != nil {
				c.cfg.Log.Debug("links not read", "netns", t.NetNS, "err", err)
			}
			seen[t.NetNS] = there
		}
		l, ok := there[t.Name]
		if !ok {
			return nil
		}
		ta := a.taps[t.Name]
		if ta == nil {
			ta = &tapAccount{index: l.index}
			a.taps[t.Name] = ta
		}
		if ta.index != l.index {
			ta.index = l.index
			for i := range ta.totals {
				ta.totals[i].renew()
			}
		}
		for i, n := range l.counters {
			sum[i] += ta.totals[i].now(n)
		}
	}
	// Bytes that the host's side received are bytes that the guest sent.
	return &NetworkUsage{RxBytes: sum[linkTx], TxBytes: sum[linkRx], RxErrors: sum[linkTxErrors], TxErrors: sum[linkRxErrors]}
}
