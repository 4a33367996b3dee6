package lvm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	commandTime = 2 * time.Minute  // how long an lvm may take; LVM waits for other programs that change the volume group
	commandEnd  = 30 * time.Second // how long it may take to end when it is asked to
	maxReport   = 64 << 20         // bytes of a report
	maxMessage  = 400              // bytes of what an lvm says that are in an error
)

// settings are what LVM is told besides its configuration: it does not look for volume groups on what guests wrote.
const settings = "devices{scan_lvs=0}"

// runner starts lvm, one at a time. Each lvm inherits the lock of the runner, which therefore lasts until the last lvm of a killed
// process has ended.
type runner struct {
	lock *os.File
	turn chan struct{}
}

// newRunner waits for an lvm of an earlier process. Errors: Unavailable if that does not end.
func newRunner(ctx context.Context, path string) (*runner, error) {
	lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	taken := make(chan error, 1)
	go func() { taken <- flock(lock) }()
	wait := time.NewTimer(commandTime + commandEnd)
	defer wait.Stop()
	select {
	case err = <-taken:
	case <-ctx.Done():
		err = ctx.Err()
	case <-wait.C:
		err = errdefs.Unavailablef("an lvm that an earlier cocoond started does not end; see `fuser %s`", path)
	}
	if err != nil { // the goroutine may still use the file
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return &runner{lock: lock, turn: make(chan struct{}, 1)}, nil
}

func flock(f *os.File) error {
	for {
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (r *runner) Close() error { return r.lock.Close() }

// run runs an lvm to its end and returns its output. ctx only limits the wait for other commands: an lvm that has begun is not
// interrupted by a caller that goes away.
func (r *runner) run(ctx context.Context, args ...string) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case r.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-r.turn }()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commandTime)
	defer cancel()
	var out, said bytes.Buffer
	cmd := exec.CommandContext(ctx, "lvm", append([]string{args[0], "--config", settings, "-q"}, args[1:]...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = r.lock, &limited{w: &out, left: maxReport}, &limited{w: &said, left: maxReport}
	cmd.Env = []string{"LC_ALL=C", "PATH=/usr/sbin:/sbin:/usr/bin:/bin", "LVM_SUPPRESS_FD_WARNINGS=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt on the terminal of cocoond is not for it
	cmd.Cancel, cmd.WaitDelay = func() error { return cmd.Process.Signal(syscall.SIGTERM) }, commandEnd
	err := cmd.Run()
	switch {
	case err == nil:
		return out.Bytes(), nil
	case errors.Is(err, exec.ErrNotFound):
		return nil, errdefs.Unavailablef("the program lvm is missing; install lvm2 and thin-provisioning-tools")
	case ctx.Err() != nil:
		return nil, errdefs.Unavailablef("lvm %s took more than %v; see whether another program holds the volume group", args[0], commandTime)
	}
	return nil, fmt.Errorf("lvm %s: %w: %s", args[0], err, message(said.String()))
}

// limited keeps the first bytes.
type limited struct {
	w    *bytes.Buffer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	l.left -= n
	l.w.Write(p[:n])
	return len(p), nil
}

// message makes one line of what an lvm said.
func message(said string) string {
	var lines []string
	for line := range strings.Lines(said) {
		if line = strings.TrimSpace(strings.ToValidUTF8(line, "?")); line != "" && !strings.HasPrefix(line, "WARNING:") {
			lines = append(lines, line)
		}
	}
	text := strings.Join(lines, "; ")
	return text[:min(len(text), maxMessage)]
}

// logical is a logical volume, as LVM reports it.
type logical struct {
	name   string
	size   int64    // bytes
	active bool     // it has a device
	tags   []string // see tag
	pool   string   // the thin pool that it is in
	layout []string // such as thin, pool
}

// columns are what report asks for.
const columns = "lv_name,lv_size,lv_active,lv_tags,pool_lv,lv_layout,vg_extent_size"

// report returns the logical volumes of the volume group, by name, and the extent size of the group in bytes.
func (s *Store) report(ctx context.Context) (map[string]logical, int64, error) {
	out, err := s.lvm.run(ctx, "lvs", "--reportformat", "json", "--units", "b", "--nosuffix", "-o", columns, s.vg)
	if err != nil {
		return nil, 0, err
	}
	return parseReport(out)
}

// parseReport reads what `lvs --reportformat json --units b --nosuffix -o` columns writes. Errors: Internal.
func parseReport(text []byte) (all map[string]logical, extent int64, err error) {
	var doc struct {
		Report []struct {
			LV []struct {
				Name   string `json:"lv_name"`
				Size   string `json:"lv_size"`
				Active string `json:"lv_active"`
				Tags   string `json:"lv_tags"`
				Pool   string `json:"pool_lv"`
				Layout string `json:"lv_layout"`
				Extent string `json:"vg_extent_size"`
			} `json:"lv"`
		} `json:"report"`
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		return nil, 0, fmt.Errorf("read the report of lvs: %w", err)
	}
	all = map[string]logical{}
	for _, part := range doc.Report {
		for _, l := range part.LV {
			size, err1 := strconv.ParseInt(l.Size, 10, 64)
			unit, err2 := strconv.ParseInt(l.Extent, 10, 64)
			if err := errors.Join(err1, err2); err != nil {
				return nil, 0, fmt.Errorf("read the report of lvs on %.100q: %w", l.Name, err)
			}
			if _, twice := all[l.Name]; twice || l.Name == "" || size < 0 || unit <= 0 || extent != 0 && unit != extent {
				return nil, 0, fmt.Errorf("the report of lvs contradicts itself on %.100q", l.Name)
			}
			extent = unit
			all[l.Name] = logical{name: l.Name, size: size, active: l.Active == "active", tags: list(l.Tags), pool: l.Pool, layout: list(l.Layout)}
		}
	}
	return all, extent, nil
}

// list splits a list of LVM.
func list(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, ",")
}
