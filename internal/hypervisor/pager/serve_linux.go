package pager

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filling"
	"cocoonstack.io/cocoon/internal/sparse"
)

// pager is a process at work. Pages are numbered as in the file.
type pager struct {
	faults  uffd
	memory  int // the file
	feed    int
	vm      int
	regions []Region

	pages   int64
	news    filling.Decoder
	here    sparse.Pages    // in the file
	missing int64           // how many are not
	removed sparse.Pages    // the process has given them back: they are zero
	waiting []int64         // the process waits for these
	asked   sparse.Pages    // the feed was asked for these
	queue   []sparse.Extent // in the file, and not yet given without being asked
	out     []byte          // for the feed

	buf, events []byte
	busy        bool // the process is giving pages back, so nothing can be given at this moment
	ended       bool // the process has, or it needs nobody any longer
	deaf        bool // the feed has hung up
}

const (
	piece = 64 // pages that are given at once without being asked
	ahead = 16 // pages that are given when the first of them is asked for
	pause = 1  // ms until a process that gives pages back is asked again whether it has
)

// errBusy means that the process is giving pages back. It goes on when that event has been read.
var errBusy = errors.New("the memory is changing")

func (p *pager) run(size int64) error {
	p.pages, p.missing, p.news.Size = size/sparse.Block, size/sparse.Block, size
	p.here, p.removed, p.asked = sparse.NewPages(size), sparse.NewPages(size), sparse.NewPages(size)
	p.buf, p.events = make([]byte, piece*sparse.Block), make([]byte, maxMessages*messageSize)
	for _, fd := range []int{int(p.faults), p.feed} {
		if err := unix.SetNonblock(fd, true); err != nil {
			return fmt.Errorf("descriptor %d: %w", fd, err)
		}
	}
	for !p.ended {
		err := p.wait()
		if err == nil && !p.ended {
			err = p.turn()
		}
		p.busy = errors.Is(err, errBusy)
		switch {
		case err == nil, p.busy:
		case errors.Is(err, unix.ESRCH): // the process has no memory any longer
			return nil
		default:
			return err
		}
	}
	return nil
}

// wait waits for something to do.
func (p *pager) wait() error {
	fds := []unix.PollFd{{Fd: int32(p.vm), Events: unix.POLLIN}, {Fd: int32(p.faults), Events: unix.POLLIN}}
	if !p.deaf {
		fds = append(fds, unix.PollFd{Fd: int32(p.feed), Events: unix.POLLIN})
		if len(p.out) > 0 {
			fds[2].Events |= unix.POLLOUT
		}
	}
	timeout := -1
	if p.busy {
		timeout = pause
	} else if len(p.queue) > 0 || p.missing == 0 {
		timeout = 0
	}
	if _, err := unix.Poll(fds, timeout); err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("wait for page faults: %w", err)
	}
	p.ended = fds[0].Revents != 0
	return nil
}

// turn does what there is to do. What is asked for comes first.
func (p *pager) turn() error {
	for _, do := range []func() error{p.readFaults, p.readFeed, p.answer, p.ask, p.give} {
		if err := do(); err != nil {
			return err
		}
	}
	if p.missing == 0 && len(p.queue) == 0 {
		return p.leave()
	}
	return nil
}

func (p *pager) readFaults() error {
	events, err := p.faults.read(p.events)
	if err != nil {
		return fmt.Errorf("read page faults: %w", err)
	}
	for _, e := range events {
		if !e.removed {
			if n, ok := p.page(e.start); ok && !slices.Contains(p.waiting, n) {
				p.waiting = append(p.waiting, n)
			}
			continue
		}
		for _, r := range p.regions {
			start, end := max(e.start, r.Base), min(e.start+e.length, r.end())
			if start < end {
				p.removed.Add([]sparse.Extent{{Offset: r.Offset + int64(start-r.Base), Length: int64(end - start)}})
			}
		}
	}
	return nil
}

// page returns the page of the file that is at an address of the process.
func (p *pager) page(addr uint64) (int64, bool) {
	for _, r := range p.regions {
		if addr >= r.Base && addr < r.end() {
			return (r.Offset + int64(addr-r.Base)) / sparse.Block, true
		}
	}
	return 0, false
}

// address returns where page n is in the process, and the number of the page after the last one of its region.
func (p *pager) address(n int64) (addr uint64, end int64) {
	for _, r := range p.regions {
		if at := n*sparse.Block - r.Offset; at >= 0 && at < r.Size {
			return r.Base + uint64(at), (r.Offset + r.Size) / sparse.Block
		}
	}
	return 0, n // regions are all of the file, see CheckRegions
}

func (p *pager) readFeed() error {
	for !p.deaf {
		n, err := unix.Read(p.feed, p.buf)
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
			return nil
		case err == nil && n == 0, errors.Is(err, unix.ECONNRESET):
			p.deaf = true
			if p.missing > 0 {
				return errdefs.Unavailablef("what loads the memory has ended before all of it was there")
			}
			return nil
		case err != nil:
			return fmt.Errorf("hear of the memory: %w", err)
		}
		parts, err := p.news.Decode(p.buf[:n])
		for _, e := range parts {
			for at := e.Offset / sparse.Block; at < e.End()/sparse.Block; at++ {
				if !p.here.Has(at) {
					p.missing--
				}
				p.here.Set(at)
			}
		}
		p.queue = append(p.queue, parts...)
		if err != nil {
			return err
		}
	}
	return nil
}

// answer gives the process what it waits for, as far as it is there.
func (p *pager) answer() error {
	var later []int64
	for i, n := range p.waiting {
		if !p.removed.Has(n) && !p.here.Has(n) {
			if later = append(later, n); !p.asked.Has(n) {
				p.asked.Set(n)
				p.out = append(p.out, filling.Want(n*sparse.Block)...)
			}
			continue
		}
		if err := p.giveRun(n, n+ahead, true); err != nil {
			p.waiting = append(later, p.waiting[i:]...)
			return err
		}
	}
	p.waiting = later
	return nil
}

// ask tells the feed what is waited for.
func (p *pager) ask() error {
	for len(p.out) > 0 && !p.deaf {
		n, err := unix.Write(p.feed, p.out)
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
			return nil
		case err != nil:
			p.out = nil
			return nil //nolint:nilerr // readFeed reads what the feed has said last, and then that it has ended
		}
		p.out = p.out[n:]
	}
	return nil
}

// give gives the process a piece of what is there, without being asked. What is zero there it need not be given.
func (p *pager) give() error {
	if len(p.queue) == 0 {
		return nil
	}
	e := &p.queue[0]
	data, err := unix.Seek(p.memory, e.Offset, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO), err == nil && data >= e.End():
		p.queue = p.queue[1:]
		return nil
	case err != nil:
		return fmt.Errorf("read the memory: %w", err)
	}
	first := max(data, e.Offset) / sparse.Block
	_, end := p.address(first)
	last := min(first+piece, end, e.End()/sparse.Block)
	if err := p.giveRun(first, last, false); err != nil {
		return err
	}
	if rest := e.End() - last*sparse.Block; rest > 0 {
		*e = sparse.Extent{Offset: last * sparse.Block, Length: rest}
	} else {
		p.queue = p.queue[1:]
	}
	return nil
}

// giveRun gives the process the pages from first on and before last, as far as they are in the region of the first, in the file, and not given back; asked means that
// it waits for the first.
func (p *pager) giveRun(first, last int64, asked bool) error {
	addr, end := p.address(first)
	last = min(last, end)
	if asked && p.removed.Has(first) {
		return p.done(first, addr, func() (int64, error) { return p.faults.zero(span{addr, sparse.Block}) })
	}
	data := p.buf[:(last-first)*sparse.Block]
	if n, err := unix.Pread(p.memory, data, first*sparse.Block); err != nil || n < len(data) {
		return fmt.Errorf("read the memory: %d of %d bytes: %w", n, len(data), errors.Join(err, io.ErrUnexpectedEOF))
	}
	block := func(n int64) []byte { return data[(n-first)*sparse.Block:][:sparse.Block] }
	filled := func(n int64) bool { return p.here.Has(n) && !p.removed.Has(n) && !sparse.IsZero(block(n)) }
	for n := first; n < last; {
		at := addr + uint64(n-first)*sparse.Block
		if !filled(n) {
			if n == first && asked {
				if err := p.done(n, at, func() (int64, error) { return p.faults.zero(span{at, sparse.Block}) }); err != nil {
					return err
				}
			}
			n++
			continue
		}
		run := n + 1
		for run < last && filled(run) {
			run++
		}
		given, err := p.faults.copy(at, data[(n-first)*sparse.Block:(run-first)*sparse.Block])
		if given > 0 {
			n += given / sparse.Block
			continue
		}
		if err := p.done(n, at, func() (int64, error) { return 0, err }); err != nil {
			return err
		}
		n++
	}
	return nil
}

// done judges the result of giving page n at addr.
func (p *pager) done(n int64, addr uint64, give func() (int64, error)) error {
	_, err := give()
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EEXIST): // it is there; whoever waits may not have noticed
		err = p.faults.wake(span{addr, sparse.Block})
	case errors.Is(err, unix.EAGAIN):
		return errBusy
	}
	if err != nil {
		return fmt.Errorf("give page %d at %#x: %w", n, addr, err)
	}
	return nil
}

// leave makes the memory of the process ordinary memory. It returns when the process can do without a pager.
func (p *pager) leave() error {
	for _, r := range p.regions {
		if err := p.faults.unregister(span{r.Base, uint64(r.Size)}); err != nil {
			return fmt.Errorf("let go of the memory at %#x: %w", r.Base, err)
		}
	}
	// A thread of the process that began to give pages back before that still waits until its event is read. The kernel refuses to give anything meanwhile.
	for !p.ended {
		if _, err := p.faults.zero(span{p.regions[0].Base, sparse.Block}); !errors.Is(err, unix.EAGAIN) {
			p.ended = true
			return nil
		}
		if _, err := p.faults.read(p.events); err != nil {
			return fmt.Errorf("read page faults: %w", err)
		}
		p.busy = true
		if err := p.wait(); err != nil {
			return err
		}
	}
	return nil
}
