package dhcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"
)

// Table holds the reservations. It is called from one goroutine.
type Table interface {
	// Lookup returns the reservation of mac. In DHCPv6, one without an address gets no answer.
	Lookup(mac net.HardwareAddr) (Reservation, bool)
	// Answered is called before an answer is sent, and also if there is none. After Ack the guest has the address for another
	// lease time; after Declined another machine was found with it.
	Answered(a Answer)
}

// Serve answers on s until ctx ends, then closes s and returns nil. If it cannot continue, it closes s and returns the reason.
func Serve(ctx context.Context, s *Socket, c Config, t Table, log *slog.Logger) error {
	defer s.Close()
	return conversation{
		udp:    s.udp,
		answer: func(b []byte, _ netip.Addr) Answer { return c.Answer(b, t.Lookup) },
		send:   func(a Answer) error { return s.send(c.Server, a) },
	}.serve(ctx, t, log)
}

// Serve6 does the same for DHCPv6.
func Serve6(ctx context.Context, s *Socket6, c Config6, t Table, log *slog.Logger) error {
	defer s.Close()
	return conversation{
		udp:    s.udp,
		answer: func(b []byte, from netip.Addr) Answer { return c.Answer(b, from, t.Lookup) },
		send:   s.send,
	}.serve(ctx, t, log)
}

// conversation holds what differs between the protocols.
type conversation struct {
	udp    *net.UDPConn
	answer func(payload []byte, from netip.Addr) Answer
	send   func(Answer) error
}

func (s conversation) serve(ctx context.Context, t Table, log *slog.Logger) error {
	stop := context.AfterFunc(ctx, func() { s.udp.Close() })
	defer stop()
	quiet := limiter{every: time.Minute}
	buf := make([]byte, 4096) // a longer packet is truncated and then ignored as malformed
	for {
		n, from, err := s.udp.ReadFromUDPAddrPort(buf)
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("receive DHCP: %w", err)
		}
		if err != nil {
			// A link that goes down is reported once and recovers by itself.
			log.Warn("dhcp receive failed", "err", err)
			continue
		}
		a := s.answer(buf[:n], from.Addr().WithZone(""))
		t.Answered(a)
		if a.Packet != nil {
			err = s.send(a)
		}
		report(log, &quiet, a, err)
	}
}

// report logs an answer. Guests decide how often they ask, so the log rate of everything except an assignment is limited.
func report(log *slog.Logger, quiet *limiter, a Answer, err error) {
	switch {
	case err != nil:
		if more, ok := quiet.allow(time.Now()); ok {
			log.Warn("dhcp answer not sent", "mac", a.MAC.String(), "ip", a.IP, "suppressed", more, "err", err)
		}
	case a.Kind == Unknown:
		if more, ok := quiet.allow(time.Now()); ok {
			log.Warn("dhcp request from an unknown mac ignored", "mac", a.MAC.String(), "suppressed", more)
		}
	case a.Kind == Declined, a.Kind == Nak:
		if more, ok := quiet.allow(time.Now()); ok {
			log.Warn("dhcp address disputed", "mac", a.MAC.String(), "ip", a.IP, "op", string(a.Kind), "suppressed", more)
		}
	default:
		log.Debug("dhcp", "op", string(a.Kind), "mac", a.MAC.String(), "ip", a.IP)
	}
}

// limiter lets one message through per interval and counts the others.
type limiter struct {
	every      time.Duration
	next       time.Time
	suppressed int
}

func (l *limiter) allow(now time.Time) (suppressed int, ok bool) {
	if now.Before(l.next) {
		l.suppressed++
		return 0, false
	}
	suppressed, l.suppressed, l.next = l.suppressed, 0, now.Add(l.every)
	return suppressed, true
}
