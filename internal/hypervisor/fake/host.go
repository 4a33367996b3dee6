package fake

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// firstPID is above the largest pid that Linux assigns, so no mistake can hit a real process.
const firstPID = 1 << 23

// unfinished is the suffix of records that are being written.
const unfinished = ".new"

// Host is the machine on which the fake VMs run. It outlives drivers and, with a folder, also the process that uses it. It is
// safe for concurrent use within one process; a folder belongs to one process at a time.
type Host struct {
	dir string

	mu      sync.Mutex
	nextPID int
	vms     map[vm.ID]*machine
}

// machine is one run of a VM.
type machine struct {
	record
	gone  chan struct{} // closed when the run ends
	timer *time.Timer   // for a guest that ends itself or is shutting down
	conns map[net.Conn]struct{}
	busy  bool // the console is open

	again time.Time // until then, a guest that powers itself off starts again

	faulted chan struct{} // closed and replaced when Fault changes; nil: no caller waits
}

// record is the part that survives the process: one file per VM in the host's folder.
type record struct {
	Plan      hypervisor.Plan `json:"plan"`
	Behaviour Behaviour       `json:"behaviour"`
	Run       string          `json:"run"`
	PID       int             `json:"pid"`
	Started   time.Time       `json:"started"`
	Asked     time.Time       `json:"asked,omitzero"` // when the guest was asked to power off
	Paused    bool            `json:"paused"`
	Ended     End             `json:"ended,omitempty"`
	Memory    string          `json:"memory,omitempty"` // text that the guest remembers
	Down      []bool          `json:"down,omitempty"`   // by NIC: true if it has no carrier

	Resets int `json:"resets,omitempty"` // how often the guest was reset

	Resized vm.Size `json:"resized,omitzero"` // what the guest was given while it runs; zero: nothing

	Grown map[string]int64 `json:"grown,omitempty"` // sizes in bytes that the guest was told while it runs, by serial

	Fault *hypervisor.DiskFault `json:"fault,omitempty"`
}

// NewHost returns a host. With a folder, VMs that an earlier process left there keep running; with "" everything is in memory.
func NewHost(dir string) (*Host, error) {
	h := &Host{dir: dir, nextPID: firstPID, vms: map[vm.ID]*machine{}}
	if dir == "" {
		return h, nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("open fake host: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case strings.HasSuffix(path, unfinished): // its writer was killed
			err = os.Remove(path)
		case strings.HasSuffix(path, ".json") && !strings.HasPrefix(e.Name(), "."):
			err = h.load(path)
		}
		if err != nil {
			return nil, fmt.Errorf("open fake host: %w", err)
		}
	}
	return h, nil
}

func (h *Host) load(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	v := &machine{gone: make(chan struct{})}
	if err := json.Unmarshal(data, &v.record); err != nil {
		return errdefs.DataLossf("%s: %w", path, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.vms[v.Plan.ID] = v
	h.nextPID = max(h.nextPID, v.PID+1)
	if v.Ended != "" {
		close(v.gone)
		return nil
	}
	h.schedule(v)
	return nil
}

// schedule sets the timer for the next thing that the guest does on its own.
//
// A paused guest does nothing on its own.
func (h *Host) schedule(v *machine) {
	if v.timer != nil {
		v.timer.Stop()
	}
	if v.Paused {
		return
	}
	at, end := time.Time{}, End("")
	if v.Behaviour.RunFor > 0 {
		at, end = v.Started.Add(v.Behaviour.RunFor), v.Behaviour.End
		if end == "" {
			end = PowerOff
		}
	}
	if off := v.Asked.Add(v.Behaviour.Shutdown); !v.Asked.IsZero() && (at.IsZero() || off.Before(at)) {
		at, end = off, PowerOff
	}
	if at.IsZero() {
		return
	}
	v.timer = time.AfterFunc(time.Until(at), func() { h.end(v, end) })
}

func (h *Host) start(p hypervisor.Plan, b Behaviour, memory string) (*machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if old := h.vms[p.ID]; old != nil && old.Ended == "" {
		return nil, errdefs.Conflictf("VM %s runs already as fake process %d", p.ID, old.PID)
	}
	v := &machine{gone: make(chan struct{})}
	v.record = record{Plan: p, Behaviour: b, Run: string(vm.NewID()), PID: h.nextPID, Started: time.Now(), Paused: p.Paused, Memory: memory}
	for _, n := range p.NICs {
		v.Down = append(v.Down, n.LinkDown || p.Incoming != nil && p.Incoming.LinksDown)
	}
	h.nextPID++
	if err := h.save(v); err != nil {
		return nil, err
	}
	h.vms[p.ID] = v
	h.schedule(v)
	return v, nil
}

func (h *Host) file(id vm.ID) string { return filepath.Join(h.dir, string(id)+".json") }

// save writes the record of v if this host has a folder: completely or not at all, but not synced. A fake VM must outlive a
// killed process, not a power cut, and thousands of them must not wait for the disk.
func (h *Host) save(v *machine) error {
	if h.dir == "" {
		return nil
	}
	data, err := json.Marshal(v.record)
	if err != nil {
		return fmt.Errorf("save fake VM: %w", err)
	}
	path := h.file(v.Plan.ID)
	if err := os.WriteFile(path+unfinished, data, 0o600); err != nil {
		return fmt.Errorf("save fake VM: %w", err)
	}
	if err := os.Rename(path+unfinished, path); err != nil {
		return fmt.Errorf("save fake VM: %w", err)
	}
	return nil
}

// forget removes every trace of v.
func (h *Host) forget(v *machine) error {
	if h.vms[v.Plan.ID] == v {
		delete(h.vms, v.Plan.ID)
	}
	if h.dir == "" {
		return nil
	}
	if err := os.Remove(h.file(v.Plan.ID)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("forget fake VM: %w", err)
	}
	return nil
}

// end ends v in the given way; only the first end counts. If the guest ended itself, that is kept for LastExit.
func (h *Host) end(v *machine, how End) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.endLocked(v, how)
}

// endLocked is end. Preconditions: the caller holds the host's lock.
func (h *Host) endLocked(v *machine, how End) {
	if v.Ended != "" {
		return
	}
	if how == PowerOff && time.Now().Before(v.again) {
		h.reset(v)
		return
	}
	v.Ended = how
	if v.timer != nil {
		v.timer.Stop()
	}
	for c := range v.conns {
		_ = c.Close()
	}
	v.conns = nil
	if how == PowerOff || how == Reset {
		_ = h.save(v) // if this fails, for example on a full disk, only the cause of the end is lost
	} else {
		_ = h.forget(v)
	}
	close(v.gone)
}

// kill ends v. If v has already ended, kill removes the record of how it ended.
func (h *Host) kill(v *machine) error {
	h.end(v, killed)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.vms[v.Plan.ID] != v { // a later run has begun
		return nil
	}
	return h.forget(v)
}

func (h *Host) find(want handle) (*machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := h.vms[want.ID]
	if v == nil || v.Run != want.Run || v.Ended != "" {
		return nil, errdefs.NotFoundf("the instance has ended")
	}
	return v, nil
}

func (h *Host) lastExit(want handle) (hypervisor.Exit, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := h.vms[want.ID]
	if v == nil || v.Run != want.Run || v.Ended == "" {
		return hypervisor.Exit{}, errdefs.NotFoundf("the end of VM %s was not recorded", want.ID)
	}
	return v.Ended.exit(), nil
}

func (h *Host) reap(id vm.ID) error {
	h.mu.Lock()
	v := h.vms[id]
	h.mu.Unlock()
	if v == nil {
		return nil
	}
	return h.kill(v)
}

// End ends the running VM id; NotFound if it does not run.
func (h *Host) End(id vm.ID, how End) error {
	h.mu.Lock()
	v := h.vms[id]
	h.mu.Unlock()
	if v == nil {
		return errdefs.NotFoundf("no fake VM %s runs", id)
	}
	h.end(v, how)
	return nil
}

// Running returns the VMs that run, with their fake pids.
func (h *Host) Running() map[vm.ID]int {
	h.mu.Lock()
	defer h.mu.Unlock()
	running := make(map[vm.ID]int, len(h.vms))
	for id, v := range h.vms {
		if v.Ended == "" {
			running[id] = v.PID
		}
	}
	return running
}
