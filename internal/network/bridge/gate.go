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
	if err := g.change(l, (*nftables.Conn).SetAddElements); err != nil {
		return fmt.Errorf("admit %s at tap %s: %w", l.IP, l.Tap, err)
	}
	return nil
}

// dismiss is the inverse of admit. It may be repeated.
func (g *gate) dismiss(l ipam.Lease) error {
	if err := g.change(l, (*nftables.Conn).SetDeleteElements); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("dismiss %s from tap %s: %w", l.IP, l.Tap, err)
	}
	return nil
}

// change adds the elements of one guest to the sets, or deletes them, as op does.
func (g *gate) change(l ipam.Lease, op func(*nftables.Conn, *nftables.Set, []nftables.SetElement) error) error {
	guest := []ipam.Lease{l}
	t := &nftables.Table{Name: g.rules.table, Family: nftables.TableFamilyBridge}
	senders, guests := g.rules.sets(t)
	mine, address := elements(guest)
	return g.commit(func(c *nftables.Conn) error {
		err := errors.Join(op(c, senders, mine), op(c, guests, address))
		if g.rules.adopt {
			inet := &nftables.Table{Name: g.rules.table, Family: nftables.TableFamilyINet}
			err = errors.Join(err, op(c, g.rules.tenants(inet), tenants(guest)))
		}
		if g.rules.prefix6.IsValid() {
			err = errors.Join(err, op(c, g.rules.guests6(t), g.rules.elements6(guest)))
		}
		return err
	})
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
