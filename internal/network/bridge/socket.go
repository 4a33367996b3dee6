package bridge

import (
	"errors"
	"sync"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"

	"cocoonstack.io/cocoon/internal/network/host"
)

// socket is a netlink socket for batches of changes. It stays open, because the kernel closes a socket only after it has finished
// deletions, which takes a grace period of ten milliseconds or more.
type socket struct {
	space host.Space
	large bool // for batches of any size

	mu   sync.Mutex // a connection buffers one batch at a time
	conn *nftables.Conn
}

// room is the memory that the kernel may use for the messages of a large batch, and for its answers to them.
const room = 64 << 20

// commit sends the requests of fill as one batch. After an error the socket may still hold answers, so it is not used again.
func (s *socket) commit(fill func(*nftables.Conn) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil {
		err := s.space.Do(func() (err error) {
			s.conn, err = nftables.New(s.options()...)
			return err
		})
		if err != nil {
			return err
		}
	}
	if err := errors.Join(fill(s.conn), s.conn.Flush()); err != nil {
		return errors.Join(err, s.closeLocked())
	}
	return nil
}

func (s *socket) options() []nftables.ConnOption {
	out := []nftables.ConnOption{nftables.AsLasting()}
	if s.large {
		out = append(out, nftables.WithSockOptions(func(c *netlink.Conn) error {
			return errors.Join(c.SetReadBuffer(room), c.SetWriteBuffer(room))
		}))
	}
	return out
}

// close closes the socket. It may be used again.
func (s *socket) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closeLocked()
}

func (s *socket) closeLocked() error {
	if s.conn == nil {
		return nil
	}
	err := s.conn.CloseLasting()
	s.conn = nil
	return err
}
