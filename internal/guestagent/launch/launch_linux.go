// Package launch starts a program through a copy of the agent, which does what only the program itself can do, and then becomes the program: it mounts
// /proc of a new PID namespace, and takes all rights from itself that the program does not have, also the system calls that a start needs.
//
// It chooses nothing: who starts the program has resolved its path, its user and its filter.
package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/guestagent/rooms"
	"cocoonstack.io/cocoon/internal/guestagent/seccomp"
)

// Program is a program with all that it gets.
type Program struct {
	Path string
	Args []string
	Env  []string
	Dir  string

	User            *syscall.Credential // nil: that of the agent
	Keep            uint64              // bit n: it can have capability n
	NoNewPrivileges bool
	Filter          seccomp.Filter // of its system calls
	Cgroup          *int           // descriptor of its control group; nil: that of the agent

	OwnPIDs bool          // it is the first process of a PID namespace
	Proc    *rooms.Covers // of the /proc that is mounted for it; nil: it gets what is there
}

// name is how the copy is called.
const name = "cocoon-launch"

// The files that the copy gets beside the standard ones.
const (
	orderFD  = iota + 3 // the program, and how far its start has come
	openFD              // a pipe that is open until the copy has ended or has become the program
	cgroupFD            // the control group of the program, if the order says so
)

// The order is a file in memory. It begins with a page that says how far the start has come: a state, and the text of an error.
const (
	page   = 4096
	textAt = 8
)

// States of a start. An error number of the last step is above stateErrno.
const (
	stateBegun  = 0
	stateLast   = 1 // it becomes the program, or has become it
	stateFailed = 2
	stateErrno  = 1 << 16
)

// order is what the copy reads. Texts of programs may be no UTF-8, which JSON would change.
type order struct {
	Path, Dir string
	Args, Env []byte // with a NUL behind each
	User      *syscall.Credential
	Keep      uint64
	NoNew     bool
	Filter    []byte
	Grouped   bool
	Proc      *rooms.Covers
}

func joined(list []string) []byte {
	if len(list) == 0 {
		return nil
	}
	return []byte(strings.Join(list, "\x00") + "\x00")
}

func split(b []byte) []string {
	if len(b) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00")
}

// Launch is the start of a program.
type Launch struct {
	order, open, write *os.File
	cgroup             *int
	ownPIDs            bool
}

// New prepares the start of p. Close ends it.
func New(p Program) (*Launch, error) {
	filter, err := p.Filter.MarshalBinary()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(order{
		Path: p.Path, Dir: p.Dir, Args: joined(p.Args), Env: joined(p.Env), User: p.User, Keep: p.Keep, NoNew: p.NoNewPrivileges, Filter: filter,
		Grouped: p.Cgroup != nil, Proc: p.Proc,
	})
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a file in memory: %w", err)
	}
	l := &Launch{order: os.NewFile(uintptr(fd), name), cgroup: p.Cgroup, ownPIDs: p.OwnPIDs}
	if _, err = l.order.WriteAt(text, page); err == nil {
		l.open, l.write, err = os.Pipe()
	}
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Close frees what the start needs. The program may run.
func (l *Launch) Close() error {
	var errs []error
	for _, f := range []*os.File{l.order, l.open, l.write} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// Attr returns the path and the arguments of the copy, and completes how it is started: it enters the control group by itself, because the
// starter must not wait for what stands still in that. attr.Files are the standard files.
func (l *Launch) Attr(attr *syscall.ProcAttr) (path string, args []string) {
	attr.Dir, attr.Env = "/", nil
	attr.Files = append(attr.Files, l.order.Fd(), l.write.Fd())
	if l.ownPIDs {
		attr.Sys.Cloneflags |= unix.CLONE_NEWPID
	}
	if l.cgroup != nil {
		attr.Files = append(attr.Files, uintptr(*l.cgroup))
	}
	return exe, []string{name}
}

// Wait waits until the copy has become the program. It also returns nil if the filter has ended the copy in its last step: the caller sees that as the end of
// the program. Preconditions: the copy was started.
// Errors: a unix.Errno if it could not become the program, other errors before.
func (l *Launch) Wait() error {
	err := l.write.Close()
	l.write = nil
	if err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, l.open); err != nil {
		return err
	}
	b := make([]byte, page)
	if _, err := l.order.ReadAt(b, 0); err != nil {
		return err
	}
	switch state := read(b); {
	case state == stateBegun:
		return errors.New("the copy of the agent that would become it has ended")
	case state == stateFailed:
		text, _, _ := strings.Cut(string(b[textAt:]), "\x00")
		return errors.New(text)
	case state > stateErrno:
		return unix.Errno(state - stateErrno)
	}
	return nil
}

// exe is the program of the agent.
const exe = "/proc/self/exe"

// Check returns an error unless /proc is the kernel's, where the copy finds the agent's program. A container can have something of its own there. The agent
// may not be one of the processes that this /proc shows.
func Check() error {
	proc, err := unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /proc of the container: %w", err)
	}
	defer unix.Close(proc)
	var fs unix.Statfs_t
	if err := unix.Fstatfs(proc, &fs); err != nil {
		return fmt.Errorf("look at /proc of the container: %w", err)
	}
	if fs.Type != unix.PROC_SUPER_MAGIC {
		return errors.New("the container has something else at /proc than the kernel's files")
	}
	link, err := unix.Openat2(proc, "self", &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return fmt.Errorf("the container has something else at /proc/self than the kernel's files: %w", err)
	}
	return unix.Close(link)
}
