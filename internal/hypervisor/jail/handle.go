package jail

import (
	"encoding/json"
	"errors"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// Handle is what finds the process of a VM again. The handle of every driver embeds it.
type Handle struct {
	Driver  string `json:"driver"`
	Version int    `json:"version"` // increases when an older driver cannot adopt what a newer one started
	ID      vm.ID  `json:"id"`
	PID     int    `json:"pid"`
	Start   uint64 `json:"start"` // start time of the process, clock ticks since boot
	UUID    string `json:"uuid"`  // in the name or the arguments of the process
	Dir     string `json:"dir"`
	UID     uint32 `json:"uid"`
	Cgroup  *Place `json:"cgroup,omitempty"` // nil: the driver's own
}

func (h *Handle) base() *Handle { return h }

// Encode returns the text of a driver's handle, which is a struct that embeds Handle.
func Encode(h interface{ base() *Handle }) (hypervisor.Handle, error) {
	b, err := json.Marshal(h)
	if err != nil {
		return nil, fmt.Errorf("encode handle: %w", err)
	}
	return b, nil
}

// Decode reads the handle of the driver with that name and version into h.
// Errors: InvalidArgument.
func Decode(b hypervisor.Handle, h interface{ base() *Handle }, driver string, version int) error {
	if err := json.Unmarshal(b, h); err != nil {
		return errdefs.Invalidf("handle %.60q is not a handle of the driver %s: %w", b, driver, err)
	}
	switch is := h.base(); {
	case is.Driver != driver:
		return errdefs.Invalidf("handle is of driver %q, not of %s", is.Driver, driver)
	case is.Version != version:
		return errdefs.Invalidf("handle has version %d; this driver knows %d", is.Version, version)
	case is.PID <= 1 || is.ID == "" || is.Dir == "" || is.UUID != UUID(is.ID):
		return errdefs.Invalidf("handle %.200q is incomplete", b)
	}
	return nil
}

// Record records how the guest of this run ended.
func (h Handle) Record(reason string) error {
	return End{PID: h.PID, Start: h.Start, Reason: reason}.Write(h.Dir)
}

// RecordedLater reports whether a later run of the VM, whose driver calls Record when it starts, is there. mark is among the arguments of its process.
func (h Handle) RecordedLater(mark string) bool {
	e, err := readEnd(h.Dir)
	if err != nil || e.PID <= 1 || e.PID == h.PID && e.Start == h.Start {
		return false
	}
	p, err := proc.Open(e.PID, e.Start, mark)
	if err != nil {
		return false
	}
	_ = p.Close()
	return true
}

// Recorded returns what Record has recorded, "" if nothing.
func (h Handle) Recorded() (string, error) { return ReadEnd(h.Dir, h.PID, h.Start) }

// LastExit is the answer of hypervisor.ExitTeller for the reason of an end, which ended translates.
func (h Handle) LastExit(reason string, err error, ended func(reason string) hypervisor.Exit) (hypervisor.Exit, error) {
	if err == nil && reason == "" {
		err = errdefs.NotFoundf("the end was not recorded")
	}
	if err != nil {
		return hypervisor.Exit{}, fmt.Errorf("VM %s: %w", h.ID, err)
	}
	return ended(reason), nil
}

// Open finds the process of h again, among whose arguments is mark. If it has ended, Open removes what is left of it: first by end, which may be nil.
// It does not if later reports that a later run of the VM is there, because the files in the runtime folder are of that one.
func (j *Jail) Open(h Handle, mark string, later func() bool, end func() error) (*proc.Process, error) {
	p, err := proc.Open(h.PID, h.Start, mark)
	if err == nil {
		j.Users.Hold(h.UID)
		return p, nil
	}
	if errdefs.IsNotFound(err) && !later() {
		if end != nil {
			err = errors.Join(err, end())
		}
		err = errors.Join(err, j.Clear(h.ID, h.Dir, h.Cgroup))
	}
	return nil, fmt.Errorf("adopt VM %s: %w", h.ID, err)
}
