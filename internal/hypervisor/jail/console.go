package jail

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
)

// Console connects the standard input and output of a hypervisor that has the guest's serial port there. Output goes to a log, so nothing is lost while the
// daemon is away. Input comes from a terminal, whose other end the process inherits as well: so the terminal outlives the daemon, and
// OpenConsole finds it again in the process.
type Console struct {
	In  *os.File // standard input of the process
	Out *os.File // standard output of the process
	End *os.File // the other end of In; the process inherits it and never uses it
}

// NewConsole makes the console of a new process. log is the name of the log in the runtime folder. The caller closes it when the process has started.
func NewConsole(dir Dir, log string) (c Console, err error) {
	defer func() {
		if err != nil {
			c.Close()
			err = fmt.Errorf("make a console: %w", err)
		}
	}()
	if c.Out, err = dir.AppendTo(log); err != nil {
		return c, err
	}
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return c, err
	}
	c.End = os.NewFile(uintptr(fd), "console")
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return c, err
	}
	in, err := unix.IoctlRetInt(fd, unix.TIOCGPTPEER)
	if errors.Is(err, unix.EINVAL) || in == 0 {
		in, err = openPeer(fd)
	}
	if err != nil {
		return c, err
	}
	c.In = os.NewFile(uintptr(in), "console")
	return c, raw(in)
}

// openPeer opens the other end of a terminal by its name.
func openPeer(fd int) (int, error) {
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		return -1, err
	}
	return unix.Open("/dev/pts/"+strconv.Itoa(n), unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
}

// raw lets each byte pass as it is, and echoes none.
func raw(fd int) error {
	t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return err
	}
	t.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	t.Oflag &^= unix.OPOST
	t.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	t.Cflag = t.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 1, 0
	return unix.IoctlSetTermios(fd, unix.TCSETS, t)
}

// Close releases the daemon's copies.
func (c Console) Close() { CloseAll([]*os.File{c.In, c.Out, c.End}) }

// OpenConsole connects to the console of a process that has Console.End as the descriptor end, and whose log is the file log. What the guest prints from
// now on can be read, until the process ends.
func OpenConsole(p *proc.Process, end int, log string) (io.ReadWriteCloser, error) {
	in, err := p.Descriptor(end)
	if err != nil {
		return nil, err
	}
	if err := terminal(in); err != nil { // the process may be in the hands of its guest
		_ = in.Close()
		return nil, err
	}
	out, err := Follow(log, -1, p.Done())
	if err != nil {
		_ = in.Close()
		return nil, err
	}
	return &console{in: in, Follower: out}, nil
}

// terminal checks that f is the controlling end of a terminal: a write to it does not block, and has no effect anywhere else.
func terminal(f *os.File) error {
	_, err := unix.IoctlGetInt(int(f.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.SetNonblock(int(f.Fd()), true)
	}
	if err != nil {
		return errdefs.Unavailablef("the process has no console any more: %w", err)
	}
	return nil
}

type console struct {
	*Follower
	in *os.File
	mu sync.Mutex
}

// Write types p. If the guest does not read, it waits until the console is closed.
func (c *console) Write(p []byte) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n < len(p) {
		m, err := unix.Write(int(c.in.Fd()), p[n:])
		if m > 0 {
			n += m
		}
		switch {
		case errors.Is(err, unix.EAGAIN):
			if _, err := unix.Poll([]unix.PollFd{{Fd: int32(c.in.Fd()), Events: unix.POLLOUT}}, 100); err != nil && !errors.Is(err, unix.EINTR) {
				return n, err
			}
			if c.closed() {
				return n, os.ErrClosed
			}
		case err != nil && !errors.Is(err, unix.EINTR):
			return n, err
		}
	}
	return n, nil
}

// Close ends both directions.
func (c *console) Close() error {
	err := c.Follower.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	return errors.Join(err, c.in.Close())
}
