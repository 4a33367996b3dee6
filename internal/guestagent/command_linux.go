package guestagent

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guestagent/launch"
	"cocoonstack.io/cocoon/internal/guestagent/rooms"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// command is a command to run, in the terms of an OCI image configuration.
type command struct {
	args      []string
	env       []string // NAME=value
	dir       string
	user      string
	tty       bool
	hostname  string // for HOSTNAME, when env has no such entry
	stdin     bool   // of a main process: its standard input stays open
	stdinOnce bool   // its input ends with the first session that wrote to it, unless it is a terminal

	makeDir bool        // create dir if it is missing, as container runtimes do for a main process
	groups  []uint32    // additional groups, whoever the user is: those of the volumes
	limits  *limits     // nil: none
	ends    unix.Signal // asks the process to end; 0: stopSignal

	within func(func() error) error // enters the room that it runs in; nil: the guest's own root
	cgroup *int                     // descriptor of its control group; nil: that of the agent

	oomScoreAdj int
	pids        pids
}

// pids says which processes a command sees. The zero value stands for all of the guest.
type pids struct {
	own  bool          // those of a namespace that it begins
	of   *child        // those that this process sees; nil: not
	proc *rooms.Covers // of the /proc that is mounted for it; nil: it gets what is there
}

// start runs c with the child's ends of f as 0, 1 and 2.
func (c command) start(procs *procs, f files) (started *child, err error) {
	begin := func() error {
		p, err := c.resolve()
		if err != nil {
			return err
		}
		if err := c.pids.enter(); err != nil {
			return err
		}
		if c.pids.proc != nil || c.limits != nil && c.limits.filter != nil {
			started, err = p.launch(procs, f, c.tty, c.limits)
		} else {
			started, err = p.startWithin(c.limits, procs, f, c.tty)
		}
		if err == nil {
			started.user = p.user
		}
		return err
	}
	switch {
	case c.within != nil: // begin gets a thread of its own
		return started, c.within(begin)
	case c.limits != nil:
		return started, proc.OnThread(begin)
	}
	return started, begin()
}

// program is a command that is resolved and ready to start.
type program struct {
	path string
	args []string
	env  []string
	dir  string
	cred *syscall.Credential
	user *vm.ContainerUser // that cred stands for

	cgroup      *int
	oomScoreAdj int
	pids        pids
}

// enter lets this thread start processes that see what p says. Preconditions: the thread ends with its work, unless p is zero.
func (p pids) enter() error {
	if p.of == nil {
		return nil
	}
	return p.of.join()
}

// environ is base plus more; a later value of the same name wins.
func environ(base []string, more []*guestv1.EnvVar) []string {
	env := slices.Clone(base)
	for _, v := range more {
		env = setenv(env, v.GetName(), v.GetValue())
	}
	return env
}

func setenv(env []string, name, value string) []string {
	kv := name + "=" + value
	for i, e := range env {
		if strings.HasPrefix(e, name+"=") {
			env[i] = kv
			return env
		}
	}
	return append(env, kv)
}

func getenv(env []string, name string) (string, bool) {
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, name+"="); ok {
			return v, true
		}
	}
	return "", false
}

// resolve looks up the user, folder and executable of c in the guest.
func (c command) resolve() (program, error) {
	if len(c.args) == 0 || c.args[0] == "" {
		return program{}, errdefs.Invalidf("there is no command to run: neither the image nor the request names one")
	}
	for _, s := range slices.Concat(c.args, c.env, []string{c.dir}) {
		if strings.IndexByte(s, 0) >= 0 {
			return program{}, errdefs.Invalidf("a command, its environment and its folder must not hold NUL bytes")
		}
	}
	u, err := lookupUser(c.user, "/etc/passwd", "/etc/group")
	if err != nil {
		return program{}, err
	}
	p := program{args: c.args, dir: cmp.Or(c.dir, "/"), env: c.environ(u), cgroup: c.cgroup, oomScoreAdj: c.oomScoreAdj, pids: c.pids}
	if !filepath.IsAbs(p.dir) {
		return program{}, errdefs.Invalidf("the working folder %q is not an absolute path", p.dir)
	}
	if c.makeDir {
		if err := os.MkdirAll(p.dir, 0o755); err != nil {
			return program{}, errdefs.Invalidf("the working folder %s cannot be made: %w", p.dir, err)
		}
	}
	switch st, err := os.Stat(p.dir); {
	case err != nil:
		return program{}, errdefs.Invalidf("the working folder %s cannot be used: %w", p.dir, cause(err))
	case !st.IsDir():
		return program{}, errdefs.Invalidf("the working folder %s is not a folder", p.dir)
	}
	path, _ := getenv(p.env, "PATH")
	if p.path, err = lookPath(c.args[0], path, p.dir); err != nil {
		return program{}, err
	}
	groups := c.limits.groups(u, c.groups)
	if os.Geteuid() == 0 || u.uid != uint32(os.Geteuid()) {
		p.cred = &syscall.Credential{Uid: u.uid, Gid: u.gid, Groups: groups}
	}
	p.user = u.told(groups)
	return p, nil
}

// environ is the command's environment plus the variables that every process expects.
func (c command) environ(u user) []string {
	env := slices.Clone(c.env)
	defaults := []struct{ name, value string }{{"PATH", defaultPath}, {"HOME", u.home}, {"HOSTNAME", c.hostname}}
	if c.tty {
		defaults = append(defaults, struct{ name, value string }{"TERM", "xterm"})
	}
	for _, d := range defaults {
		if _, ok := getenv(env, d.name); !ok && d.value != "" {
			env = append(env, d.name+"="+d.value)
		}
	}
	return env
}

// lookPath finds the executable called name: as a path relative to dir, or in the folders of path.
func lookPath(name, path, dir string) (string, error) {
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join(dir, name)
		}
		return name, executable(name)
	}
	var denied error
	for _, folder := range filepath.SplitList(path) {
		folder = cmp.Or(folder, ".")
		if !filepath.IsAbs(folder) {
			folder = filepath.Join(dir, folder)
		}
		file := filepath.Join(folder, name)
		err := executable(file)
		if err == nil {
			return file, nil
		}
		if !errdefs.IsNotFound(err) {
			denied = err
		}
	}
	if denied != nil {
		return "", denied
	}
	return "", errdefs.NotFoundf("command %q was not found in PATH (%s) of the guest", name, path)
}

func executable(file string) error {
	st, err := os.Stat(file)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return errdefs.NotFoundf("command %s does not exist in the guest", file)
	case err != nil:
		return errdefs.Invalidf("command %s cannot be run: %w", file, cause(err))
	case st.IsDir():
		return errdefs.Invalidf("command %s is a folder", file)
	case st.Mode()&0o111 == 0:
		return errdefs.Invalidf("command %s is not executable", file)
	}
	return nil
}

// cause strips the operation and path from a file error; our messages already name them.
func cause(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}

// startWithin imposes l on this thread, and starts p. Preconditions: the thread belongs to the caller alone, unless l is nil.
func (p program) startWithin(l *limits, procs *procs, f files, tty bool) (*child, error) {
	if l != nil {
		if err := l.impose(); err != nil {
			return nil, fmt.Errorf("limit command %s: %w", p.path, err)
		}
	}
	return p.start(procs, f.stdin, f.stdout, f.stderr, tty)
}

// launch starts p with a filter that may refuse what the agent needs for a start, or with a /proc of its own.
func (p program) launch(procs *procs, f files, tty bool, l *limits) (*child, error) {
	if err := launch.Check(); err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "command %s cannot be run: %w", p.path, err)
	}
	as := launch.Program{
		Path: p.path, Args: p.args, Env: p.env, Dir: p.dir, User: p.cred, Keep: math.MaxUint64, Cgroup: p.cgroup, OwnPIDs: p.pids.own, Proc: p.pids.proc,
	}
	if l != nil {
		var err error
		if as.Filter, err = l.filters(); err != nil {
			return nil, err
		}
		as.Keep, as.NoNewPrivileges = l.keep, l.NoNewPrivileges
	}
	start, err := launch.New(as)
	if err != nil {
		return nil, fmt.Errorf("prepare command %s: %w", p.path, err)
	}
	defer start.Close()
	attr := &syscall.ProcAttr{Files: []uintptr{f.stdin.Fd(), f.stdout.Fd(), f.stderr.Fd()}, Sys: &syscall.SysProcAttr{Setsid: true, Setctty: tty, Ctty: 0}}
	path, args := start.Attr(attr)
	c, err := procs.start(p.oomScoreAdj, func() (int, error) { return syscall.ForkExec(path, args, attr) })
	if err != nil {
		return nil, p.failed(err)
	}
	if err := start.Wait(); err != nil {
		<-c.done
		return nil, p.failed(err)
	}
	return c, nil
}

// start runs p in its own session with the given files as 0, 1 and 2.
func (p program) start(procs *procs, stdin, stdout, stderr *os.File, tty bool) (*child, error) {
	attr := &syscall.ProcAttr{
		Dir:   p.dir,
		Env:   p.env,
		Files: []uintptr{stdin.Fd(), stdout.Fd(), stderr.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: tty, Ctty: 0, Credential: p.cred},
	}
	if p.cgroup != nil {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, *p.cgroup
		attr.Sys.Unshareflags = unix.CLONE_NEWCGROUP // its control group is the root of those that it sees
	}
	c, err := procs.start(p.oomScoreAdj, func() (int, error) { return syscall.ForkExec(p.path, p.args, attr) })
	if err != nil {
		return nil, p.failed(err)
	}
	return c, nil
}

// failed returns the error of a start that failed with err.
func (p program) failed(err error) error {
	switch {
	case errors.Is(err, unix.ENOENT):
		return errdefs.NotFoundf("command %s cannot be run: its interpreter does not exist in the guest", p.path)
	case errors.Is(err, unix.ENOEXEC):
		return errdefs.Invalidf("command %s is not a program of this machine: %w", p.path, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM), errors.Is(err, unix.E2BIG):
		return errdefs.Invalidf("command %s cannot be run: %w", p.path, err)
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM):
		return errdefs.Exhaustedf("command %s cannot be run: %w", p.path, err)
	}
	return errdefs.New(errdefs.Internal, "run %s: %w", p.path, err)
}
