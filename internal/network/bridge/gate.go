package bridge

import (
	"errors"
	"fmt"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/network/ipam"
)

// gate adds guests to the sets of allowed senders in the bridge table and removes them, and does the same in the table of
// policies: a few set elements for each guest, independent of their number.
type gate struct {
	rules  rules
	police *policing
	socket socket
}

// admit lets the guest of l send from its tap. It may be repeated.
func (g *gate) admit(l ipam.Lease) error {
	err := g.police.admit(l, g.rules.addresses(l), func(police func(*nftables.Conn) error) error {
		return g.change(l, (*nftables.Conn).SetAddElements, police)
	})
	if err != nil {
		return fmt.Errorf("admit %s at tap %s: %w", l.IP, l.Tap, err)
	}
	return nil
}

// dismiss is the inverse of admit. It may be repeated.
func (g *gate) dismiss(l ipam.Lease) error {
	err := g.police.dismiss(g.rules.addresses(l), func(police func(*nftables.Conn) error) error {
		err := g.change(l, (*nftables.Conn).SetDeleteElements, police)
		if errors.Is(err, unix.ENOENT) { // the sender is gone already, and the batch had no effect
			err = g.socket.commit(police)
		}
		return err
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("dismiss %s from tap %s: %w", l.IP, l.Tap, err)
	}
	return nil
}

// change adds the elements of one guest to the sets, or deletes them, as op does, in one batch with the requests of more.
func (g *gate) change(l ipam.Lease, op func(*nftables.Conn, *nftables.Set, []nftables.SetElement) error, more func(*nftables.Conn) error) error {
	guest := []ipam.Lease{l}
	t := &nftables.Table{Name: g.rules.table, Family: nftables.TableFamilyBridge}
	senders, guests := g.rules.sets(t)
	mine, address := elements(guest)
	return g.socket.commit(func(c *nftables.Conn) error {
		err := errors.Join(op(c, senders, mine), op(c, guests, address))
		if g.rules.adopt {
			inet := &nftables.Table{Name: g.rules.table, Family: nftables.TableFamilyINet}
			err = errors.Join(err, op(c, g.rules.tenants(inet), tenants(guest)))
		}
		if g.rules.prefix6.IsValid() {
			err = errors.Join(err, op(c, g.rules.guests6(t), g.rules.elements6(guest)))
		}
		return errors.Join(err, more(c))
	})
}

// close closes the socket. The gate may be used again.
func (g *gate) close() error {
	if g == nil {
		return nil
	}
	return g.socket.close()
}
