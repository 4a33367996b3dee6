package probe

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// run runs p until the test ends.
func run(t *testing.T, p *Pinger) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("run: %v", err)
		}
	})
}

func must(t *testing.T, p *Pinger, err error) *Pinger {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPing(t *testing.T) {
	netns.Require(t)
	if err := os.WriteFile("/proc/sys/net/ipv4/ping_group_range", []byte("0 2147483647"), 0o600); err != nil {
		t.Fatal(err)
	}
	raw, err := OpenPinger()
	run(t, must(t, raw, err))
	unprivileged, err := openPing()
	run(t, must(t, unprivileged, err))
	if raw.Kind() != SocketRaw || unprivileged.Kind() != SocketPing || (*Pinger)(nil).Kind() != SocketNone {
		t.Errorf("kinds %s, %s", raw.Kind(), unprivileged.Kind())
	}
	for _, p := range []*Pinger{raw, unprivileged} {
		t.Run(string(p.Kind()), func(t *testing.T) {
			n := NewNet(p)
			var all sync.WaitGroup
			for i := range 200 { // concurrently
				all.Go(func() {
					ip := netip.AddrFrom4([4]byte{127, 7, byte(i), 9}).String()
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					if err := n.Probe(ctx, ip, 0); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if p.v6 != nil {
				if err := n.Probe(ctx, "::1", 0); err != nil {
					t.Error(err)
				}
			}
			short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if err := n.Probe(short, "192.0.2.9", 0); !errdefs.IsUnavailable(err) { // no route, or no answer
				t.Errorf("an address without a host: %v", err)
			}
			if err := n.Probe(ctx, "nonsense", 0); !errdefs.IsInvalid(err) {
				t.Errorf("an invalid address: %v", err)
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			if len(p.waiting) != 0 {
				t.Errorf("%d requests still wait for a reply", len(p.waiting))
			}
		})
	}
	if err := NewNet(nil).Probe(t.Context(), "192.0.2.9", 0); err != nil {
		t.Errorf("without a socket a probe must succeed: %v", err)
	}
}

// A guest cannot answer for another guest, and cannot answer a request that was not sent to it.
func TestForeignRepliesAreIgnored(t *testing.T) {
	p := &Pinger{waiting: map[uint64]echo{}, secret: [8]byte{1, 2, 3}}
	asked := netip.MustParseAddr("10.0.0.7")
	answer := func(secret [8]byte, number uint64, kind icmp.Type, cut int) []byte {
		b, err := (&icmp.Message{Type: kind, Body: &icmp.Echo{Data: binary.BigEndian.AppendUint64(secret[:], number)}}).Marshal(nil)
		if err != nil {
			t.Fatal(err)
		}
		return b[:len(b)-cut]
	}
	good := answer(p.secret, 5, ipv4.ICMPTypeEchoReply, 0)
	for name, tc := range map[string]struct {
		packet []byte
		from   string
		ok     bool
	}{
		"from another address": {good, "10.0.0.8", false},
		"a request":            {answer(p.secret, 5, ipv4.ICMPTypeEcho, 0), "10.0.0.7", false},
		"unknown number":       {answer(p.secret, 6, ipv4.ICMPTypeEchoReply, 0), "10.0.0.7", false},
		"wrong secret":         {answer([8]byte{}, 5, ipv4.ICMPTypeEchoReply, 0), "10.0.0.7", false},
		"too short":            {answer(p.secret, 5, ipv4.ICMPTypeEchoReply, 1), "10.0.0.7", false},
		"empty":                {nil, "10.0.0.7", false},
		"valid reply":          {good, "10.0.0.7", true},
	} {
		e := echo{to: asked, done: make(chan struct{})}
		p.waiting[5] = e
		p.take(protocolICMP, tc.packet, netip.MustParseAddr(tc.from))
		select {
		case <-e.done:
			if !tc.ok {
				t.Errorf("%s: accepted", name)
			}
		default:
			if tc.ok {
				t.Errorf("%s: not accepted", name)
			}
		}
	}
}

func FuzzAnswers(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 0}, protocolICMP)
	f.Fuzz(func(_ *testing.T, packet []byte, protocol int) {
		p := &Pinger{waiting: map[uint64]echo{}}
		p.take(protocol, packet, netip.Addr{})
	})
}
