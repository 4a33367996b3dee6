package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// stat is the part of /proc/PID/stat that distinguishes processes.
type stat struct {
	state byte   // R, S, D, Z, …
	start uint64 // clock ticks since boot
}

// StartTime returns the start time of the process that has pid now; NotFound if there is none.
func StartTime(pid int) (uint64, error) {
	st, err := readStat(pid)
	return st.start, err
}

func readStat(pid int) (stat, error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return stat{}, errdefs.NotFoundf("process %d has ended: %w", pid, err)
	}
	st, err := parseStat(data)
	if err != nil {
		return stat{}, fmt.Errorf("process %d: %w", pid, err)
	}
	return st, nil
}

// parseStat reads one line of /proc/PID/stat. The command name (field 2) may contain spaces and parentheses, so fields are
// counted from its last closing parenthesis.
func parseStat(data []byte) (stat, error) {
	i := bytes.LastIndexByte(data, ')')
	if i < 0 {
		return stat{}, errdefs.New(errdefs.Internal, "stat line %.40q has no command name", data)
	}
	fields := strings.Fields(string(data[i+1:]))
	const state, start = 0, 19 // fields 3 and 22 of proc(5), counted from the field after the name
	if len(fields) <= start || len(fields[state]) != 1 {
		return stat{}, errdefs.New(errdefs.Internal, "stat line %.40q is too short", data)
	}
	ticks, err := strconv.ParseUint(fields[start], 10, 64)
	if err != nil {
		return stat{}, fmt.Errorf("start time in stat line: %w", err)
	}
	return stat{state: fields[state][0], start: ticks}, nil
}

// Args returns the arguments of the process that has pid now. A zombie or a kernel thread has none. Of very many, it returns the first.
//
// Linux replaces the memory of a process before it writes the arguments there, so a process that is just executing its program
// has no arguments for a moment, even after Start has returned. Args waits for that moment to pass.
func Args(pid int) ([]string, error) { return argsIn("/proc/" + strconv.Itoa(pid)) }

// argsIn returns the arguments of the process whose folder in /proc is dir.
func argsIn(dir string) ([]string, error) {
	for deadline := time.Now().Add(execTime); ; <-time.After(execPause) {
		args, starts, err := argsNow(dir)
		if err != nil || !starts || time.Now().After(deadline) {
			return args, err
		}
	}
}

// argsNow is argsIn without the wait. starts says that there are none, and that the process may be one that is just executing its program.
func argsNow(dir string) (args []string, starts bool, err error) {
	data, err := CommandLine(dir)
	if err != nil {
		return nil, false, errdefs.NotFoundf("process %s has ended: %w", filepath.Base(dir), err)
	}
	if len(data) > 0 {
		return strings.Split(strings.TrimSuffix(string(data), "\x00"), "\x00"), false, nil
	}
	_, err = os.Readlink(dir + "/exe")
	return nil, err == nil, nil // only a process with memory has a program; a zombie or a kernel thread has neither
}

// maxArgs bounds what is read of the arguments of a process, in bytes. It says itself where they begin and end, and so how long they are.
const maxArgs = 256 << 10

// CommandLine returns the arguments of the process whose folder in /proc is dir, as the kernel gives them, at most the first maxArgs bytes.
func CommandLine(dir string) ([]byte, error) {
	f, err := os.Open(filepath.Join(dir, "cmdline"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxArgs))
}

// execTime is more than Linux needs to load a program and write its arguments, on a busy machine too. A process can also take its arguments away
// for good.
const execTime, execPause = 2 * time.Second, time.Millisecond

// Find opens every process that candidate accepts and whose arguments satisfy match; candidate nil accepts all. It reads all of /proc (tens of µs
// per process), so use it for recovery only, not in normal operation. It waits for all processes that have no arguments yet together, as Args does
// for one, and only for candidates. The caller closes the processes that it gets.
func Find(ctx context.Context, candidate func(pid int) bool, match func(pid int, args []string) bool) ([]*Process, error) {
	pids, err := listPIDs()
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	check := func(pid int) (ok, starts bool) {
		if candidate != nil && !candidate(pid) {
			return false, false
		}
		args, starts, err := argsNow("/proc/" + strconv.Itoa(pid))
		return err == nil && len(args) > 0 && match(pid, args), starts
	}
	within, cancel := context.WithTimeout(ctx, execTime)
	defer cancel()
	var found []*Process
	for {
		pids = slices.DeleteFunc(pids, func(pid int) bool {
			p, starts := openIf(pid, check)
			if p != nil {
				found = append(found, p)
			}
			return !starts
		})
		if len(pids) == 0 {
			return found, nil
		}
		select {
		case <-time.After(execPause):
			continue
		case <-within.Done():
		}
		if err := ctx.Err(); err != nil {
			for _, p := range found {
				_ = p.Close()
			}
			return nil, fmt.Errorf("look for processes: %w", err)
		}
		return found, nil
	}
}

// listPIDs returns the pids of all processes.
func listPIDs() ([]int, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// openIf checks a process before it opens it, because most processes are foreign. It checks it again through the open one. It does not wait
// for a process that starts.
func openIf(pid int, check func(pid int) (ok, starts bool)) (found *Process, starts bool) {
	ok, starts := check(pid)
	if !ok {
		return nil, starts
	}
	fd, err := pidfdOpen(pid)
	if err != nil {
		return nil, false
	}
	p := newProcess(pid, 0, fd)
	if p.start, err = StartTime(pid); err == nil {
		ok, starts = check(pid)
	}
	if err != nil || !ok || p.Signal(0) != nil { // the values just read may belong to another process that has the pid now
		_ = p.Close()
		return nil, starts
	}
	return p, false
}

// InCgroup opens every process in the cgroup folder dir, whatever it runs, except the caller; none if the folder does not exist. It also
// finds a process that was started in the cgroup but has not yet executed its program. The caller closes the processes that it gets.
func InCgroup(dir string) ([]*Process, error) {
	pids, err := cgroupPIDs(dir)
	if err != nil {
		return nil, err
	}
	var found []*Process
	for _, pid := range pids {
		p, err := openIn(dir, pid)
		if errdefs.IsNotFound(err) {
			continue
		}
		if err != nil {
			for _, p := range found {
				_ = p.Close()
			}
			return nil, err
		}
		found = append(found, p)
	}
	return found, nil
}

// openIn opens the process and then checks whether the pid still belongs to a process in dir.
func openIn(dir string, pid int) (*Process, error) {
	fd, err := pidfdOpen(pid)
	if err != nil {
		return nil, err
	}
	p := newProcess(pid, 0, fd)
	p.start, err = StartTime(pid)
	if err == nil {
		var pids []int
		pids, err = cgroupPIDs(dir)
		if err == nil && !slices.Contains(pids, pid) {
			err = errdefs.NotFoundf("process %d has ended", pid)
		}
	}
	if err == nil {
		err = p.Signal(0) // otherwise the values just read may belong to another process that has the pid now
	}
	if err != nil {
		_ = p.Close()
		return nil, err
	}
	return p, nil
}

func cgroupPIDs(dir string) ([]int, error) {
	data, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) { // removed; ENODEV: removed while it was read
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list processes of a cgroup: %w", err)
	}
	var pids []int
	for _, word := range strings.Fields(string(data)) {
		if pid, err := strconv.Atoi(word); err == nil && pid > 0 && pid != os.Getpid() { // 0 means a process of another PID namespace
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// UID returns the effective user of the process that has pid now.
func UID(pid int) (uint32, error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return 0, errdefs.NotFoundf("process %d has ended: %w", pid, err)
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "Uid:"); ok {
			if ids := strings.Fields(rest); len(ids) == 4 {
				uid, err := strconv.ParseUint(ids[1], 10, 32)
				return uint32(uid), err
			}
		}
	}
	return 0, errdefs.New(errdefs.Internal, "process %d: its status names no user", pid)
}
