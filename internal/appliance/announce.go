package appliance

import (
	"context"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/mdns"
	"cocoonstack.io/cocoon/internal/version"
)

// retry is how long the announcement waits for a network.
const retry = 5 * time.Second

// maxHost is the length of a host name that leaves room for what makes it unique on the network.
const maxHost = 50

// announcement is what others on the network learn of the machine.
func (d *Door) announcement(at net.Addr) mdns.Announcement {
	id := d.deps.Identity
	host, err := os.Hostname()
	if err != nil || workload.ValidateName(host) != nil || len(host) > maxHost {
		host = "" // it is announced by its short id
	}
	a := mdns.Announcement{CapsuleID: id.ID(), ShortID: id.ShortID(), Hostname: host, Adopted: id.Adopted(), Version: version.Version, Mode: mdns.ModeRuntime}
	if tcp, ok := at.(*net.TCPAddr); ok {
		a.Port = uint16(tcp.Port)
	}
	return a
}

// announcer announces the machine as soon as there is a network. Without one, or without multicast, operators use its address.
type announcer struct {
	log *slog.Logger

	mu      sync.Mutex
	adopted bool
	real    *mdns.Announcer // nil: not made yet
}

// Update announces that the machine is adopted.
func (a *announcer) Update(adopted bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.adopted = adopted
	if a.real != nil {
		a.real.Update(adopted)
	}
}

// run announces the machine until ctx ends. except are interfaces on which it does not.
func (a *announcer) run(ctx context.Context, what mdns.Announcement, except []string) {
	real, err := mdns.New(what, nil, except, a.log)
	if err != nil {
		a.log.Warn("the machine is not announced on its networks", "err", err)
		return
	}
	a.mu.Lock()
	a.real = real
	real.Update(a.adopted || what.Adopted)
	a.mu.Unlock()
	defer real.Close()
	for said := false; ; {
		err := real.Start(ctx)
		if err == nil {
			break
		}
		if !said {
			a.log.Info("the machine is announced when it has a network", "err", err)
			said = true
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(retry):
		}
	}
	<-ctx.Done()
}
