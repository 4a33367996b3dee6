package bridge

import (
	"errors"
	"fmt"
	"sync"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
)

// gate adds guests to the sets of allowed senders in the bridge table and removes them: a few set elements for each guest,
// independent of their number. It keeps its netlink socket open, because the kernel closes a socket only after it has finished
// deletions, which takes a grace period of ten milliseconds or more.
type gate struct {
	rules rules
	space host.Space

	mu   sync.Mutex // a connection buffers one batch at a time
	conn *nftables.Conn
}

// admit lets the guest of l send from its tap. It may be repeated.
func (g *gate) admit(l ipam.Lease) error {
	senders, guests, mine, address := g.elements(l)
	if err := g.commit(func(c *nftables.Conn) error {
		err := errors.Join(c.SetAddElements(senders, mine), c.SetAddElements(guests, address))
		if g.rules.adopt {
			err = errors.Join(err, c.SetAddElements(g.tenants(), tenants([]ipam.Lease{l})))
		}
		if g.rules.prefix6.IsValid() {
			err = errors.Join(err, c.SetAddElements(g.guests6(), g.rules.elements6([]ipam.Lease{l})))
		}
		return err
	}); err != nil {
		return fmt.Errorf("admit %s at tap %s: %w", l.IP, l.Tap, err)
	}
	return nil
}

// dismiss is the inverse of admit. It may be repeated.
func (g *gate) dismiss(l ipam.Lease) error {
	senders, guests, mine, address := g.elements(l)
	if err := g.commit(func(c *nftables.Conn) error {
		err := errors.Join(c.SetDeleteElements(senders, mine), c.SetDeleteElements(guests, address))
		if g.rules.adopt {
			err = errors.Join(err, c.SetDeleteElements(g.tenants(), tenants([]ipam.Lease{l})))
		}
		if g.rules.prefix6.IsValid() {
			err = errors.Join(err, c.SetDeleteElements(g.guests6(), g.rules.elements6([]ipam.Lease{l})))
		}
		return err
	}); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("dismiss %s from tap %s: %w", l.IP, l.Tap, err)
	}
	return nil
}

func (g *gate) tenants() *nftables.Set {
	return g.rules.tenants(&nftables.Table{Name: g.rules.table, Family: nftables.TableFamilyINet})
}

func (g *gate) guests6() *nftables.Set {
	return g.rules.guests6(&nftables.Table{Name: g.rules.table, Family: nftables.TableFamilyBridge})
}

func (g *gate) elements(l ipam.Lease) (senders, guests *nftables.Set, mine, address []nftables.SetElement) {
	senders, guests = g.rules.sets(&nftables.Table{Name: g.rules.table, Family: nftables.TableFamilyBridge})
	mine, address = elements([]ipam.Lease{l})
	return senders, guests, mine, address
}

// commit sends the requests of fill as one batch. After an error the socket may still hold answers, so it is not used again.
func (g *gate) commit(fill func(*nftables.Conn) error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.conn == nil {
		err := g.space.Do(func() (err error) {
			g.conn, err = nftables.New(nftables.AsLasting())
			return err
		})
		if err != nil {
			return err
		}
	}
	if err := errors.Join(fill(g.conn), g.conn.Flush()); err != nil {
		return errors.Join(err, g.closeLocked())
	}
	return nil
}

// close closes the socket. The gate may be used again.
func (g *gate) close() error {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.closeLocked()
}

func (g *gate) closeLocked() error {
	if g.conn == nil {
		return nil
	}
	err := g.conn.CloseLasting()
	g.conn = nil
	return err
}
