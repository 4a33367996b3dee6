package mdns

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/time/rate"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	announcements = 3 // in a row
	betweenThem   = time.Second
	refresh       = time.Minute // an interface or address that is new is announced at the latest then

	answersPerSecond = 20 // to all askers together
	answersAtOnce    = 50
)

// Announcer announces one appliance from Start to Close.
type Announcer struct {
	ifaces []string
	except []string
	log    *slog.Logger
	limit  *rate.Limiter

	mu       sync.Mutex
	what     Announcement
	conflict bool
	sockets  []*socket
	stop     context.CancelFunc // nil: not started
	again    chan struct{}      // announce now
	wg       sync.WaitGroup
}

// New returns an announcer on the interfaces with these names; without names, on all that lead to other machines, with the exception of
// some. Errors: InvalidArgument.
func New(what Announcement, ifaces, except []string, log *slog.Logger) (*Announcer, error) {
	if err := what.check(); err != nil {
		return nil, err
	}
	return &Announcer{
		what: what, ifaces: slices.Clone(ifaces), except: slices.Clone(except), log: log, limit: rate.NewLimiter(answersPerSecond, answersAtOnce), again: make(chan struct{}, 1),
	}, nil
}

// Start joins the multicast groups and begins to announce and to answer. Its goroutines end with ctx or Close. Errors: Unavailable
// without a network; then it can be called again.
func (a *Announcer) Start(ctx context.Context) error {
	chosen, err := interfaces(a.ifaces, a.except)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.stop != nil {
		return errdefs.Preconditionf("the machine is announced already")
	}
	if a.sockets, err = open(chosen); err != nil {
		return err
	}
	ctx, a.stop = context.WithCancel(ctx)
	for _, s := range a.sockets {
		a.wg.Go(func() { a.answer(s) })
	}
	a.wg.Go(func() { a.announce(ctx) })
	return nil
}

// Update announces whether the machine is adopted. It may be called before Start.
func (a *Announcer) Update(adopted bool) {
	a.mu.Lock()
	changed := a.what.Adopted != adopted
	a.what.Adopted = adopted
	a.mu.Unlock()
	if changed {
		a.wake()
	}
}

func (a *Announcer) wake() {
	select {
	case a.again <- struct{}{}:
	default: // it will be announced anyway
	}
}

// Close says goodbye, and returns when all goroutines have ended. The announcer can be started again.
func (a *Announcer) Close() {
	a.mu.Lock()
	stop := a.stop
	a.mu.Unlock()
	if stop == nil {
		return
	}
	stop()
	a.wg.Wait()
	a.mu.Lock()
	a.stop, a.sockets = nil, nil
	a.mu.Unlock()
}

// zone returns the records for an interface.
func (a *Announcer) zone(iface int) zone {
	a.mu.Lock()
	defer a.mu.Unlock()
	return newZone(a.what, a.conflict, addressesOf(iface))
}

// announce announces at the start, after changes, and now and then. At the end it says goodbye and closes the sockets.
func (a *Announcer) announce(ctx context.Context) {
	defer func() {
		a.all(zone.goodbye)
		for _, s := range a.sockets {
			_ = s.close()
		}
	}()
	left := announcements
	for {
		a.all(zone.all)
		wait := refresh
		if left--; left > 0 {
			wait = betweenThem
		}
		select {
		case <-ctx.Done():
			return
		case <-a.again:
			left = announcements
		case <-time.After(wait):
		}
	}
}

// all sends a message of every interface to the group there.
func (a *Announcer) all(message func(zone) *dns.Msg) {
	for _, s := range a.sockets {
		for _, iface := range s.joined {
			a.send(s, message(a.zone(iface)), iface, nil)
		}
	}
}

func (a *Announcer) send(s *socket, m *dns.Msg, iface int, to *net.UDPAddr) {
	data, err := m.Pack()
	if err == nil {
		err = s.send(data, iface, to)
	}
	if err != nil && !errors.Is(err, net.ErrClosed) { // an interface may be gone, or have no address yet
		a.log.Debug("multicast DNS was not sent", "iface", iface, "err", err)
	}
}

// answer answers questions until the socket is closed.
func (a *Announcer) answer(s *socket) {
	buf := make([]byte, maxPacket)
	for {
		p, err := s.read(buf)
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				a.log.Warn("the machine is no longer found by multicast DNS", "err", err)
			}
			return
		}
		m := new(dns.Msg)
		if m.Unpack(p.data) != nil || m.Opcode != dns.OpcodeQuery || m.Rcode != dns.RcodeSuccess {
			continue
		}
		if m.Response {
			if p.from.Port == port && a.zone(p.iface).contradicts(m) {
				a.rename()
			}
			continue
		}
		reply, unicast := a.zone(p.iface).answer(m, p.from.Port != port)
		if reply == nil || !a.limit.Allow() {
			continue
		}
		if unicast {
			a.send(s, reply, p.iface, p.from)
		} else {
			a.send(s, reply, p.iface, nil)
		}
	}
}

// rename gives the machine a name that no other has, once.
func (a *Announcer) rename() {
	a.mu.Lock()
	first := !a.conflict
	a.conflict = true
	a.mu.Unlock()
	if first {
		a.log.Warn("another machine has the same name on this network; the UUID is added to ours", "capsule", a.what.CapsuleID)
		a.wake()
	}
}
