package firecracker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/pager"
	"cocoonstack.io/cocoon/internal/hypervisor/savedmemory"
	"cocoonstack.io/cocoon/internal/proc"
)

// A guest can run before its memory is there: the process then asks for each page that it lacks by a userfaultfd, and a pager answers, which is a process of its own
// with a user of its own. If it ends before its work is done, the guest stands still at the next page that it lacks, and never sees a wrong one; the VM is then ended.

const faultsDevice = "/dev/userfaultfd"

// LoadsLate implements hypervisor.LateLoader.
func (d *Driver) LoadsLate() string {
	if _, err := os.Stat(faultsDevice); err != nil {
		return fmt.Sprintf("Firecracker cannot run a guest before its memory is there, because this host has no %s (Linux 6.1 with CONFIG_USERFAULTFD has it)", faultsDevice)
	}
	return ""
}

// late is what a launch needs for a guest whose memory comes later. The zero value is for any other.
type late struct {
	memory, feed *os.File
	listener     *net.UnixListener
}

func (l *late) used() bool { return l.memory != nil }

func (l *late) close() {
	jail.CloseAll([]*os.File{l.memory, l.feed})
	if l.listener != nil {
		_ = l.listener.Close()
	}
}

// openLate opens the memory that is being loaded, and connects to what loads it.
func (l *launch) openLate(ctx context.Context) (err error) {
	in := l.Plan.Incoming
	if why := l.d.LoadsLate(); why != "" {
		return errdefs.Unsupportedf("%s", why)
	}
	if in.Summed {
		if err := savedmemory.Verify(ctx, in.State); err != nil {
			return err
		}
	}
	if l.late.memory, err = jail.OpenData(in.Memory, "", false); err != nil {
		return err
	}
	if st, err := l.late.memory.Stat(); err != nil {
		return err
	} else if st.Size() != l.Plan.Memory {
		return errdefs.DataLossf("the saved memory %s has %d bytes, but the VM has %d", in.Memory, st.Size(), l.Plan.Memory)
	}
	l.late.feed, err = dialFeed(ctx, in.Feed)
	return err
}

// dialFeed connects to a socket, whose path may be too long for one.
func dialFeed(ctx context.Context, path string) (*os.File, error) {
	at, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errdefs.Unavailablef("connect to what loads the memory: %s: %w", path, err)
	}
	defer func() { _ = unix.Close(at) }()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(at))
	if err != nil {
		return nil, errdefs.Unavailablef("connect to what loads the memory: %w", err)
	}
	defer conn.Close()
	return conn.(*net.UnixConn).File()
}

// listenLate makes the socket on which the process says where its memory is.
func (l *launch) listenLate(private *os.File) error {
	path := fmt.Sprintf("/proc/self/fd/%d/%s", private.Fd(), memorySocket)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make socket %s: %w", memorySocket, err)
	}
	f := os.NewFile(uintptr(fd), memorySocket)
	defer f.Close()
	err = unix.Bind(fd, &unix.SockaddrUnix{Name: path})
	if err == nil {
		err = os.Lchown(path, int(l.UID), int(l.UID))
	}
	if err == nil {
		err = unix.Listen(fd, 1)
	}
	if err != nil {
		return fmt.Errorf("listen on %s: %w", memorySocket, err)
	}
	listener, err := net.FileListener(f)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", memorySocket, err)
	}
	l.late.listener = listener.(*net.UnixListener)
	return nil
}

// attended is configure for a guest that has a pager. The pager begins when the process has said where its memory is, and before it has loaded the rest of its state. While
// it works, the process may wait for memory that comes from afar, so the time of a launch stands still: the pager ends when all memory is there, or cannot come.
func (l *launch) attended(ctx context.Context, i *instance) error {
	within, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	limit := l.d.cfg.LaunchTime
	late := time.AfterFunc(limit, func() { cancel(jail.TooLate(limit, nil)) })
	defer late.Stop()
	over, started := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(over)
		err := l.startPager(within, i)
		started <- err
		if err == nil {
			late.Stop()
			select {
			case <-i.pager.over():
				err = i.lost()
				late.Reset(limit)
			case <-within.Done():
				return
			}
		}
		if err != nil {
			cancel(err)
		}
	}()
	err := l.configure(within, i)
	if err == nil { // the process need not have touched any memory yet
		err = <-started
	}
	if ctx.Err() == nil && within.Err() != nil {
		err = context.Cause(within)
	}
	cancel(nil)
	<-over
	return err
}

// startPager hears from the process where its memory is, and starts its pager.
func (l *launch) startPager(ctx context.Context, i *instance) error {
	defer context.AfterFunc(ctx, func() { _ = l.late.listener.Close() })()
	conn, err := l.late.listener.AcceptUnix()
	if err != nil {
		return errdefs.Unavailablef("Firecracker has not said where its memory is: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	regions, faults, err := receive(conn, l.Plan.Memory)
	if err != nil {
		return errdefs.Unavailablef("hear from Firecracker where its memory is: %w", err)
	}
	defer faults.Close()
	pidfd, err := unix.PidfdOpen(l.Proc.PID(), 0)
	if err != nil {
		return fmt.Errorf("open a pidfd of Firecracker: %w", err)
	}
	of := os.NewFile(uintptr(pidfd), "pidfd")
	defer of.Close()
	if err := l.Proc.Signal(0); err != nil { // had it ended, the descriptor could be another one's
		return errdefs.Unavailablef("Firecracker has ended: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	log, err := l.Dir.AppendTo(memoryLog)
	if err != nil {
		return err
	}
	defer log.Close()
	if _, err := log.WriteString("\n"); err != nil { // so there is room for its last word, however full the disk is then
		return fmt.Errorf("write log %s: %w", memoryLog, err)
	}
	uid, err := l.d.jail.Users.Take(l.Plan.ID)
	if err != nil {
		return err
	}
	l.Undo.Push(func(context.Context) error { l.d.jail.Users.Drop(uid); return nil })
	p, err := proc.Start(proc.Spec{
		Path: self, Args: append([]string{marker(i.h.UUID)}, pager.Args(regions)...), Err: log, Files: []*os.File{faults, l.late.memory, l.late.feed, of},
		User: &proc.User{UID: uid, GID: uid}, CgroupDir: l.Cgroup.Dir, CgroupTasks: l.Cgroup.Tasks, Isolated: true, Root: &proc.Root{},
	})
	if err != nil {
		return err
	}
	l.Undo.Push(func(ctx context.Context) error { return errors.Join(p.Kill(ctx), p.Close()) })
	i.h.Pager = &pagerOf{PID: p.PID(), Start: p.StartTime(), UID: uid}
	i.pager = &attendant{users: l.d.jail.Users, uid: uid, proc: p}
	i.whole = make(chan struct{})
	raw, err := jail.Encode(&i.h)
	if err == nil {
		i.Renew(raw)
	}
	return err
}

// maxRegions is how many regions the memory of a VM can have.
const maxRegions = 64

// receive reads what the process says of its memory of size bytes, and its userfaultfd. The caller closes it.
func receive(conn *net.UnixConn, size int64) ([]pager.Region, *os.File, error) {
	text, oob := make([]byte, 16<<10), make([]byte, unix.CmsgSpace(4*4))
	n, m, _, _, err := conn.ReadMsgUnix(text, oob)
	if err != nil {
		return nil, nil, err
	}
	files, err := descriptors(oob[:m])
	if err != nil {
		return nil, nil, err
	}
	regions, err := parseRegions(text[:n], size)
	if err == nil && len(files) != 1 {
		err = fmt.Errorf("it gives %d descriptors", len(files))
	}
	if err == nil {
		err = isFaults(files[0])
	}
	if err != nil {
		jail.CloseAll(files)
		return nil, nil, err
	}
	return regions, files[0], nil
}

// descriptors returns the files in a control message.
func descriptors(oob []byte) (files []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue // it is about something else
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, nil
}

// isFaults checks that f is a userfaultfd, of which everything that is read comes from the kernel.
func isFaults(f *os.File) error {
	target, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(f.Fd())))
	if err != nil || target != "anon_inode:[userfaultfd]" {
		return fmt.Errorf("it gives no userfaultfd, but %.60q: %w", target, errors.Join(err, errdefs.Invalidf("not that kind")))
	}
	return nil
}

// parseRegions reads what the process says of its memory of size bytes.
func parseRegions(text []byte, size int64) ([]pager.Region, error) {
	var all []struct {
		Base   uint64 `json:"base_host_virt_addr"`
		Size   int64  `json:"size"`
		Offset int64  `json:"offset"`
	}
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, errdefs.Invalidf("what it says of its memory cannot be read: %w", err)
	}
	if len(all) > maxRegions {
		return nil, errdefs.Invalidf("its memory has %d regions", len(all))
	}
	out := make([]pager.Region, 0, len(all))
	for _, r := range all {
		out = append(out, pager.Region{Base: r.Base, Size: r.Size, Offset: r.Offset})
	}
	return out, pager.CheckRegions(out, size)
}

// pagerOf identifies the pager of a VM.
type pagerOf struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"`
	UID   uint32 `json:"uid"`
}

// attendant is the pager of an instance. A nil one never ends.
type attendant struct {
	users *jail.Users
	uid   uint32
	proc  *proc.Process // nil: it has ended before it was adopted
}

// endedAlready is a channel that is closed.
var endedAlready = func() <-chan struct{} { c := make(chan struct{}); close(c); return c }()

// over returns a channel that is closed when the pager has ended.
func (a *attendant) over() <-chan struct{} {
	switch {
	case a == nil:
		return nil
	case a.proc == nil:
		return endedAlready
	}
	return a.proc.Done()
}

// release lets it run on without us.
func (a *attendant) release() {
	if a == nil {
		return
	}
	if a.proc != nil {
		_ = a.proc.Close()
	}
	a.users.Drop(a.uid)
}

// end ends it. Its VM has ended.
func (a *attendant) end(ctx context.Context) (err error) {
	if a != nil && a.proc != nil {
		if err = a.proc.Kill(context.WithoutCancel(ctx)); err != nil {
			err = fmt.Errorf("end the pager: %w", err)
		}
	}
	a.release()
	return err
}

// adoptPager finds the pager again that i may have.
func (i *instance) adoptPager() {
	of := i.h.Pager
	if of == nil {
		return
	}
	p, err := proc.Open(of.PID, of.Start, marker(i.h.UUID))
	if err != nil { // whatever the reason is, nobody would see its end
		i.d.log.Debug("pager not found", "vm", i.h.ID, "err", err)
	}
	i.d.jail.Users.Hold(of.UID)
	i.pager, i.whole = &attendant{users: i.d.jail.Users, uid: of.UID, proc: p}, make(chan struct{})
}

// patienceLate is how long a process may take to say its state while its memory comes. The part of it that answers waits for a page too, if a device needs one.
const patienceLate = 2 * time.Second

// complete reports whether all memory of the guest is there.
func (i *instance) complete() bool {
	select {
	case <-i.whole:
		return true
	default:
		return i.whole == nil
	}
}

// awaitMemory waits until all memory of the guest is there, or the process has ended.
func (i *instance) awaitMemory(ctx context.Context) error {
	if i.complete() {
		return nil
	}
	i.d.log.Info("waits for the memory of the guest", "vm", i.h.ID)
	select {
	case <-i.whole:
	case <-i.Proc.Done():
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// reasonMemory is recorded before a VM is ended whose pager ended too early.
const reasonMemory = "memory-lost"

// unattended lets a VM go on whose pager has done its work, and ends any other.
func (i *instance) unattended(ctx context.Context) {
	err := i.lost()
	i.pager.release()
	i.pager = nil
	if err == nil {
		close(i.whole)
		i.d.log.Info("all memory of the guest is there", "vm", i.h.ID)
		return
	}
	i.d.log.Error("memory of the guest not loaded, its vm is ended", "vm", i.h.ID, "err", err)
	if err := i.h.Record(reasonMemory); err != nil {
		i.d.log.Warn("end of guest not recorded", "vm", i.h.ID, "err", err)
	}
	if err := i.Proc.Kill(ctx); err != nil && ctx.Err() == nil {
		i.d.log.Warn("hypervisor does not end", "vm", i.h.ID, "err", err)
	}
}

// lost says why a pager has ended before its work was done; nil: it was done.
func (i *instance) lost() error {
	word := i.h.lastWord()
	if word == pager.Whole {
		return nil
	}
	return errdefs.Unavailablef("the memory of the guest could not be loaded: %s", word)
}

// exit translates a reason into an Exit of the contract.
func (h handle) exit(reason string) hypervisor.Exit {
	e := jail.Ended(reason)
	if reason == reasonMemory {
		e.Cause = "its memory could not be loaded: " + h.lastWord()
	}
	return e
}

// lastWord is what the pager has said last.
func (h handle) lastWord() string {
	word := jail.LastLine(filepath.Join(h.Dir, memoryLog), 0, func(string) bool { return false })
	return cmp.Or(word, "the process that gives it was killed")
}
