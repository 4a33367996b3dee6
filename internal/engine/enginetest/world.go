// Package enginetest is a small test environment for the engine: a driver, a network, an image store and guests. They
// live in a folder, so that they outlive a killed process as the real ones do, and they fail on request.
//
// It is for tests only. It checks nothing itself; Leftovers lists what still exists.
package enginetest

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// World is everything around an engine. Its fields may be set before it is used.
type World struct {
	Dir     string
	Fault   func(call string) error // called before and after each act, as "driver.Launch" and "driver.Launch done"
	NoAgent bool                    // guests have no channel for an agent
	NoIP    bool                    // the network knows no addresses
	Old     bool                    // guests' agents cannot give a resumed guest its identity
	Told    bool                    // those of disk guests can
	Stuck   bool                    // a save that fails leaves its guest paused
	Machine vm.Machine              // of this host; the zero value gets defaults

	Mute func(context.Context, vm.ID) error // called when a guest is asked for its state, which waits for it

	Net     byte                      // first byte of all addresses, and in MACs; 0 is 10. Addresses in 127 answer pings
	Ready   bool                      // containers run as soon as the guest is set up; otherwise Stand sets their status
	Process func(hypervisor.Plan) int // the pid of a VM; nil: made up

	Reported []guest.Interface // by disk guests, with the MAC of their first interface

	raw bool // see RawOnly

	mu     sync.Mutex
	guests map[vm.ID]*Guest
	pids   int
	taken  map[string]bool // names of drafts
	held   map[string]int  // snapshots, by id

	volumes *Volumes // nil: none
}

// RawOnly makes the driver one whose VMs have raw disks only, also after the end of this process.
func (w *World) RawOnly() error {
	w.raw = true
	return os.WriteFile(filepath.Join(w.Dir, "raw"), nil, 0o600)
}

// New returns the world in dir, including what an earlier process left there.
func New(dir string) (*World, error) {
	w := &World{
		Dir: dir, Fault: func(string) error { return nil }, Mute: func(context.Context, vm.ID) error { return nil }, guests: map[vm.ID]*Guest{},
		taken: map[string]bool{}, held: map[string]int{},
	}
	_, err := os.Stat(filepath.Join(dir, "raw"))
	w.raw = err == nil
	for _, sub := range []string{"procs", "cgroups", "taps", "leases", "tmp", "snapshots", "drafts"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return nil, err
		}
	}
	return w, sweepDrafts(dir)
}

// around runs act between two calls of Fault. If the second fails, act has happened all the same.
func (w *World) around(call string, act func() error) error {
	if err := w.Fault(call); err != nil {
		return err
	}
	if err := act(); err != nil {
		return err
	}
	return w.Fault(call + " done")
}

// Leftovers lists the processes, cgroups, taps, addresses, snapshots and drafts of snapshots that still exist.
func (w *World) Leftovers() ([]string, error) {
	var out []string
	for _, sub := range []string{"procs", "cgroups", "taps", "leases", "snapshots", "drafts"} {
		entries, err := os.ReadDir(filepath.Join(w.Dir, sub))
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			out = append(out, sub+"/"+e.Name())
		}
	}
	return out, nil
}

// proc is a hypervisor process with its guest, as stored in the folder.
type proc struct {
	CID   uint32 // of its socket; 0: it has none
	ID    vm.ID  `json:"id"`
	PID   int    `json:"pid"`
	SetUp bool   `json:"set_up"`
	Exit  *int   `json:"exit,omitempty"` // of the main process
	MAC   string `json:"mac"`            // of the first interface
	Port  string `json:"port"`           // of its agent, "" for none
	Lines int    `json:"lines"`          // written by the main process

	Disk    vm.Disk `json:"disk"`    // that it writes to
	Written int     `json:"written"` // bytes that the guest knows to be on its disk
	Paused  bool    `json:"paused"`

	Down map[int]bool `json:"down,omitempty"` // the places of its interfaces that have no carrier

	Hostname  string `json:"hostname"`
	MachineID string `json:"machine_id"`
	Resumed   int    `json:"resumed"` // how often the guest was told its identity
	Frozen    bool   `json:"frozen"`
	Larger    string `json:"larger"`  // see Self
	Storage   int64  `json:"storage"` // see Self

	Serials []string                    `json:"serials,omitempty"` // of its disks
	Names   []string                    `json:"names,omitempty"`   // of its containers
	Stand   []vm.ContainerStatus        `json:"stand,omitempty"`   // their status
	Entries map[string][]guest.LogEntry `json:"entries,omitempty"` // of their logs
	Sized   map[string]vm.Resources     `json:"sized,omitempty"`   // what they may use

	Manual    []string               `json:"manual,omitempty"`    // containers that somebody starts
	Missing   []string               `json:"missing,omitempty"`   // containers without a program
	Folders   map[string]string      `json:"folders,omitempty"`   // of the node, by where the guest has them
	Apart     bool                   `json:"apart"`               // the guest has no device for the folder that it shares
	Resting   bool                   `json:"resting"`             // its containers are paused
	Forgotten []string               `json:"forgotten,omitempty"` // disks that the guest has released
	Volumes   map[string]GuestVolume `json:"volumes,omitempty"`   // those on disks, by name
	Size      vm.Size                `json:"size"`                // that it was given
	Boot      int64                  `json:"boot"`                // bytes of memory with which it booted
	Told      map[string]int64       `json:"told,omitempty"`      // sizes of disks that it was told, in bytes, by serial
	NICs      map[int]string         `json:"nics,omitempty"`      // MACs of its further interfaces, by place
	Width     int                    `json:"width"`               // places for interfaces with which it booted
}

func (w *World) path(kind, name string) string { return filepath.Join(w.Dir, kind, name) }

func (w *World) save(p proc) error {
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	tmp := w.path("tmp", string(p.ID)) // whole or not at all, but not durable: power cuts are not tested
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, w.path("procs", string(p.ID)))
}

func (w *World) loadProc(id vm.ID) (p proc, ok bool, err error) {
	b, err := os.ReadFile(w.path("procs", string(id)))
	if errors.Is(err, fs.ErrNotExist) {
		return p, false, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &p)
	}
	return p, err == nil, err
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Guest returns the running guest of id, or nil.
func (w *World) Guest(id vm.ID) *Guest {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.guests[id]
}

func (w *World) nextPID(p hypervisor.Plan) int {
	if w.Process != nil {
		return w.Process(p)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pids++
	return os.Getpid()*1000 + w.pids
}
