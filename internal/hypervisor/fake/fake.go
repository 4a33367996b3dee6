// Package fake is a hypervisor.Driver whose VMs are records instead of processes. It serves tests of everything above a driver,
// and scale tests with ten thousand VMs.
//
// It passes the suite that real drivers pass. It can be told to be slow, to fail, and to have guests that misbehave. It runs no
// guest code, emulates no device and opens no disk or tap. A VM costs a map entry: no goroutine, no descriptor.
package fake

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// Name is the driver's name in records and handles.
const Name = "fake"

// Op is an operation that can be made to fail.
type Op string

// The operations. OpLaunched comes after the VM runs and before Launch returns; if it fails, Launch undoes everything.
const (
	OpProbe    Op = "probe"
	OpLaunch   Op = "launch"
	OpLaunched Op = "launched"
	OpAdopt    Op = "adopt"
	OpReap     Op = "reap"
	OpState    Op = "state"
	OpShutdown Op = "shutdown"
	OpKill     Op = "kill"
	OpDial     Op = "dial"
	OpSave     Op = "save"  // before a save does anything
	OpSaved    Op = "saved" // after a save is complete; if it fails, Save undoes everything except the change of disks
	OpLink     Op = "link"
	OpPlug     Op = "plug"
	OpUnplug   Op = "unplug"
	OpDump     Op = "dump"
	OpDumped   Op = "dumped" // in the middle of a dump

	OpPlugNIC   Op = "plug nic"
	OpUnplugNIC Op = "unplug nic"
	OpGrow      Op = "grow"
	OpResize    Op = "resize"
	OpResized   Op = "resized" // in the middle of a resize: the guest has got its CPUs
	OpReset     Op = "reset"
	OpDisplay   Op = "display"
)

// Behaviour is how one VM behaves.
type Behaviour struct {
	Launch         time.Duration // duration of Launch
	Shutdown       time.Duration // from the power-off request until the guest is off
	IgnoreShutdown bool          // the guest ignores the power button
	RunFor         time.Duration // the guest ends itself this long after its start; 0 means never
	End            End           // how it ends itself
}

// End is a way for a VM to end.
type End string

// The ways to end.
const (
	PowerOff End = "power-off" // the guest powers itself off
	Reset    End = "reset"     // the guest resets itself or panics
	Crash    End = "crash"     // the process dies
	killed   End = "killed"
)

func (e End) exit() hypervisor.Exit {
	switch e {
	case PowerOff:
		return hypervisor.Exit{GuestShutdown: true}
	case Reset:
		return hypervisor.Exit{GuestReset: true}
	case Crash:
		return hypervisor.Exit{Code: -1, Signal: 11}
	default:
		return hypervisor.Exit{Code: -1, Signal: 9}
	}
}

// Config configures a Driver. Every field may be zero. The functions run concurrently and must not block for long.
type Config struct {
	Info   hypervisor.Info                                                // returned by Probe; empty fields are filled in
	Behave func(p hypervisor.Plan) Behaviour                              // nil: every VM starts at once and obeys requests
	Fault  func(op Op, id vm.ID) error                                    // called before each operation; the operation returns its error
	Guest  func(ctx context.Context, p hypervisor.Plan) (net.Conn, error) // the guest's end of the agent channel; nil: the guest does not answer
}

// Driver is the fake driver.
type Driver struct {
	cfg  Config
	host *Host
}

var (
	_ hypervisor.Driver     = (*Driver)(nil)
	_ hypervisor.ExitTeller = (*Driver)(nil)
	_ hypervisor.LateLoader = (*Driver)(nil)

	_ hypervisor.MachineTeller = (*Driver)(nil)
	_ hypervisor.Seeker        = (*Driver)(nil)
)

// New returns a driver for the VMs of host. Any number of drivers may share a host, concurrently or one after another.
func New(cfg Config, host *Host) *Driver { return &Driver{cfg: cfg, host: host} }

// Name implements hypervisor.Driver.
func (d *Driver) Name() string { return Name }

func (d *Driver) fault(op Op, id vm.ID) error {
	if d.cfg.Fault == nil {
		return nil
	}
	return d.cfg.Fault(op, id)
}

// Probe implements hypervisor.Driver.
func (d *Driver) Probe(context.Context) (hypervisor.Info, error) {
	if err := d.fault(OpProbe, ""); err != nil {
		return hypervisor.Info{}, err
	}
	info := d.cfg.Info
	info.Version = cmp.Or(info.Version, "1.0")
	if info.Accel == "" {
		info.Accel, info.Why = vm.AccelTCG, "nothing is run at all"
	}
	if info.Firmware == nil {
		info.Firmware = []vm.Firmware{vm.FirmwareBIOS, vm.FirmwareUEFI}
	}
	return info, nil
}

// consoleLog is the name of the console log in Plan.Dir.
const consoleLog = "console.log"

// Launch implements hypervisor.Driver.
func (d *Driver) Launch(ctx context.Context, p hypervisor.Plan) (_ hypervisor.Instance, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("launch VM %s: %w", p.Name, err)
		}
	}()
	if p.ID == "" || p.Dir == "" || p.CPUs < 1 || p.Memory < 1<<20 {
		return nil, errdefs.Invalidf("the plan lacks an id, a folder, a CPU or memory")
	}
	if err := d.fault(OpLaunch, p.ID); err != nil {
		return nil, err
	}
	var b Behaviour
	if d.cfg.Behave != nil {
		b = d.cfg.Behave(p)
	}
	if err := pause(ctx, b.Launch); err != nil {
		return nil, err
	}
	log := booted(p)
	var memory string
	switch {
	case p.Incoming != nil && p.Paused:
		return nil, errdefs.Invalidf("it resumes from saved state, so it cannot start paused")
	case p.Paused:
		log = nil // the guest has not executed an instruction
	case p.Incoming != nil:
		if memory, err = recall(ctx, p); err != nil {
			return nil, err
		}
		log = fmt.Appendf(nil, "fake guest %s goes on\n", p.Name)
	}
	if err := os.WriteFile(filepath.Join(p.Dir, consoleLog), log, 0o600); err != nil {
		return nil, errdefs.Preconditionf("open runtime folder: %w", err)
	}
	v, err := d.host.start(p, b, memory)
	if err != nil {
		return nil, err
	}
	if err := d.fault(OpLaunched, p.ID); err != nil {
		d.host.end(v, killed)
		return nil, err
	}
	return newInstance(d, v), nil
}

// booted is what the guest of p prints to its console when it boots.
func booted(p hypervisor.Plan) []byte { return fmt.Appendf(nil, "fake guest %s has booted\n", p.Name) }

func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

const handleVersion = 1

type handle struct {
	Driver  string `json:"driver"`
	Version int    `json:"version"`
	ID      vm.ID  `json:"id"`
	PID     int    `json:"pid"`
	Run     string `json:"run"` // distinguishes the runs of one VM
}

func decodeHandle(b hypervisor.Handle) (handle, error) {
	var h handle
	dec := json.NewDecoder(bytes.NewReader(b))
	if err := dec.Decode(&h); err != nil {
		return handle{}, errdefs.Invalidf("handle %.60q is not one of the fake driver: %w", b, err)
	}
	if h.Driver != Name || h.Version != handleVersion || h.ID == "" || h.Run == "" {
		return handle{}, errdefs.Invalidf("handle %.60q is not one that the fake driver knows", b)
	}
	return h, nil
}

// Adopt implements hypervisor.Driver.
func (d *Driver) Adopt(ctx context.Context, raw hypervisor.Handle) (hypervisor.Instance, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	h, err := decodeHandle(raw)
	if err != nil {
		return nil, err
	}
	if err := d.fault(OpAdopt, h.ID); err != nil {
		return nil, err
	}
	v, err := d.host.find(h)
	if err != nil {
		return nil, fmt.Errorf("adopt VM %s: %w", h.ID, err)
	}
	return newInstance(d, v), nil
}

// LastExit implements hypervisor.ExitTeller.
func (d *Driver) LastExit(_ context.Context, raw hypervisor.Handle) (hypervisor.Exit, error) {
	h, err := decodeHandle(raw)
	if err != nil {
		return hypervisor.Exit{}, err
	}
	return d.host.lastExit(h)
}

// Seek implements hypervisor.Seeker.
func (d *Driver) Seek(_ context.Context, ids []vm.ID) (map[vm.ID][]int, error) {
	d.host.mu.Lock()
	defer d.host.mu.Unlock()
	found := map[vm.ID][]int{}
	for _, id := range ids {
		if v := d.host.vms[id]; v != nil && v.Ended == "" {
			found[id] = []int{v.PID}
		}
	}
	return found, nil
}

// Reap implements hypervisor.Driver.
func (d *Driver) Reap(_ context.Context, id vm.ID, _ string) error {
	if err := d.fault(OpReap, id); err != nil {
		return err
	}
	return d.host.reap(id)
}
