package guestagent

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// partPatience is how long an incomplete line (a prompt) waits for its end before it becomes its own entry.
const partPatience = 200 * time.Millisecond

// mainProcess is the process that the guest exists for.
type mainProcess struct {
	command command
	child   *child
	files   files
	input   *mainInput // nil: it has none
	shown   audience   // the attached sessions
	started time.Time
	kept    chan struct{} // closed when the process has ended and its output is in the log
}

// startMain starts c and copies its output to log until it has ended.
func startMain(procs *procs, log *ring, c command) (*mainProcess, error) {
	f, err := openFiles(c.tty, c.stdin)
	if err != nil {
		return nil, err
	}
	m := &mainProcess{command: c, files: f, started: time.Now(), kept: make(chan struct{})}
	m.child, err = c.start(procs, f)
	f.closeChild()
	if err != nil {
		f.close()
		return nil, err
	}
	if c.stdin {
		m.input = newMainInput(f.in, c.stdinOnce && !c.tty)
		go m.input.feed(m.child.done) // ends with the process, or when its input is closed
	}
	var wg sync.WaitGroup
	wg.Go(func() { m.keep(f.out, &lines{out: log}) })
	if f.err != nil {
		wg.Go(func() { m.keep(f.err, &lines{out: log, stderr: true}) })
	}
	go func() { // ends when the process and children that inherited its output have ended
		wg.Wait()
		<-m.child.done
		f.close()
		log.end()
		m.shown.end()
		close(m.kept)
	}()
	return m, nil
}

// askToEnd asks the process to end, by the signal that it is stopped with.
func (m *mainProcess) askToEnd() { m.child.signal(cmp.Or(m.command.ends, stopSignal)) }

// keep copies r to l and to attached sessions until r ends, or until the process has ended and r has been quiet.
func (m *mainProcess) keep(r *os.File, l *lines) {
	defer l.flush()
	pump(r, m.child.done, func() time.Duration {
		if len(l.part) > 0 {
			return partPatience
		}
		return 0
	}, func(p []byte) error {
		if p == nil {
			l.flush()
		} else {
			l.write(p)
			m.shown.show(l.stderr, p)
		}
		return nil
	})
}

// quiet is how long output may pause after its process has ended before reading stops: a daemon that the process left
// behind may hold the pipe open forever.
const quiet = 250 * time.Millisecond

// pump reads r until its end and calls emit with each piece. After the process has ended, it stops at the first pause
// of length quiet. When idle returns a duration and r pauses that long, pump calls emit(nil). It returns early when
// emit fails.
func pump(r *os.File, ended <-chan struct{}, idle func() time.Duration, emit func([]byte) error) {
	watched := make(chan struct{})
	defer func() { <-watched }()
	over := make(chan struct{})
	defer close(over)
	go func() {
		defer close(watched)
		select {
		case <-ended:
			_ = r.SetReadDeadline(time.Now()) // wakes a read that began earlier
		case <-over:
		}
	}()
	buf := make([]byte, 32<<10)
	for {
		after, pause := isClosed(ended), time.Duration(0)
		if idle != nil {
			pause = idle()
		}
		switch {
		case after:
			<-watched
			_ = r.SetReadDeadline(time.Now().Add(quiet))
		case pause > 0:
			_ = r.SetReadDeadline(time.Now().Add(pause))
		default:
			_ = r.SetReadDeadline(time.Time{})
		}
		if !after && isClosed(ended) {
			continue // the process ended while we set another deadline
		}
		n, err := r.Read(buf)
		if n > 0 {
			if emit(buf[:n]) != nil {
				return
			}
		}
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && !after:
			if pause > 0 && !isClosed(ended) && emit(nil) != nil {
				return
			}
		case err != nil: // io.EOF, quiet, or EIO of a terminal that nobody has open any more
			return
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// files are the standard files of a process: the child's ends and the agent's.
type files struct {
	stdin, stdout, stderr *os.File // the child's
	in, out, err          *os.File // the agent's; in is nil without input, err is nil with a terminal
}

// openFiles makes pipes or a terminal. Without input and without a terminal, stdin is /dev/null.
func openFiles(tty, input bool) (f files, err error) {
	defer func() {
		if err != nil {
			f.closeChild()
			f.close()
			f, err = files{}, fmt.Errorf("open the files of a process: %w", err)
		}
	}()
	if tty {
		var master, slave *os.File
		if master, slave, err = openTerminal(); err == nil {
			f = files{stdin: slave, stdout: slave, stderr: slave, in: master, out: master}
		}
		return f, err
	}
	if f.out, f.stdout, err = os.Pipe(); err != nil {
		return f, err
	}
	if f.err, f.stderr, err = os.Pipe(); err != nil {
		return f, err
	}
	if input {
		f.stdin, f.in, err = os.Pipe()
	} else {
		f.stdin, err = os.Open(os.DevNull)
	}
	return f, err
}

// closeChild closes the child's ends, which the child has already inherited.
func (f *files) closeChild() {
	for _, c := range []*os.File{f.stdin, f.stdout, f.stderr} {
		if c != nil {
			c.Close()
		}
	}
}

func (f *files) close() {
	for _, c := range []*os.File{f.in, f.out, f.err} {
		if c != nil {
			c.Close()
		}
	}
}

// openTerminal opens a pseudo terminal.
func openTerminal() (master, slave *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	master = os.NewFile(uintptr(fd), "/dev/ptmx")
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		master.Close()
		return nil, nil, err
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		master.Close()
		return nil, nil, err
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		master.Close()
		return nil, nil, err
	}
	return master, slave, nil
}

// resize sets the size of a terminal through its master.
func resize(master *os.File, rows, cols uint32) error {
	raw, err := master.SyscallConn()
	if err != nil {
		return err
	}
	size := unix.Winsize{Row: uint16(min(rows, 1<<16-1)), Col: uint16(min(cols, 1<<16-1))}
	var ierr error
	if err := raw.Control(func(fd uintptr) { ierr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &size) }); err != nil {
		return err
	}
	return ierr
}
